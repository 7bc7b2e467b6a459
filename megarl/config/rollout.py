"""The recipe's sections about generation: `rollout`, `env`, `validation`, and `async`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveInt, StringConstraints

from megarl.config.base import Seconds, Section
from megarl.config.model import ParallelConfig
from megarl.config.sglang import SGLangConfig

#: U+FFFD stands for broken bytes: half a character looks like it until the other half is sampled.
StopString = Annotated[str, StringConstraints(pattern=r"^[^\ufffd]+$")]


class SamplingConfig(Section):
    """The sampling of tokens."""

    n: PositiveInt = Field(1, description="samples per prompt")
    temperature: NonNegativeFloat = Field(1.0, le=100, description="0 is greedy")
    top_p: float = Field(1.0, gt=0, le=1, description="nucleus mass; 1 keeps everything")
    top_k: NonNegativeInt = Field(0, description="keep the k likeliest tokens; 0 keeps everything")
    min_p: float = Field(
        0.0,
        ge=0,
        lt=1,
        description="keep tokens of at least this share of the likeliest one's probability; 0: all (embedded engine)",
    )
    max_new_tokens: PositiveInt = Field(256, description="response length limit, end token included")
    min_new_tokens: NonNegativeInt = Field(0, description="no end token before this many tokens")
    stop_token_ids: list[int] = Field(
        default_factory=list,
        description="end tokens in addition to those of tokenizer, generation_config.json and chat template",
    )
    stop: list[StopString] = Field(
        default_factory=list,
        description="texts that end a response with the token that completes one; rewards get the text before it",
    )
    logprobs: Literal["full", "processed"] = Field(
        "full",
        description="log-probs kept with the tokens. full: of the whole distribution at this temperature; processed: "
        "of the one sampled from, after top_p, top_k, min_p and min_new_tokens (embedded engine)",
    )
    ignore_eos: bool = Field(False, description="always generate max_new_tokens (benchmarks)")


class LimitsConfig(Section):
    """The limits of a multi-turn episode; `sampling.max_new_tokens` is the limit of each turn."""

    turns: PositiveInt = Field(16, description="turns of the policy")
    tokens: PositiveInt | None = Field(
        None, description="tokens after the first observation, the environment's included; null: max_new_tokens"
    )
    seconds: Seconds | None = Field(
        None,
        description="wall time; running turns then end with their tokens so far. Such runs are not repeatable; null: "
        "no limit",
    )

    def response_tokens(self, sampling: SamplingConfig) -> int:
        """Return the largest number of tokens after the first observation."""
        return self.tokens or sampling.max_new_tokens


class RolloutConfig(Section):
    """The generation engine."""

    engine: Literal["embedded", "sglang"] = Field(
        "embedded", description="embedded: decode on the trainer's own weights; sglang: on SGLang servers"
    )
    sglang: SGLangConfig = Field(default_factory=SGLangConfig, description="servers of the engine sglang")
    parallel: ParallelConfig | None = Field(
        None, description="layout in a team of its own; null: the actor's; workers that ask servers have dp only"
    )
    sampling: SamplingConfig = Field(default_factory=lambda: SamplingConfig(n=8), description="training samples")
    limits: LimitsConfig = Field(default_factory=LimitsConfig, description="of episodes with several turns")
    max_running: PositiveInt = Field(256, description="sequences decoded at the same time per replica (embedded)")
    max_prefill_tokens: PositiveInt = Field(8192, description="prompt tokens per prefill pass (embedded)")
    dtype: Literal["model", "fp32", "bf16"] = Field("model", description="dtype of decoding; model: the trainer's")
    stale_steps: NonNegativeInt = Field(0, description="training steps that the generating weights lag behind")
    cuda_graphs: bool = Field(True, description="capture decode steps on GPUs (embedded)")

    @property
    def colocated(self) -> bool:
        """Whether samples are generated on servers that share the trainer's devices."""
        return self.engine == "sglang" and self.sglang.colocated

    @property
    def nccl_environment(self) -> dict[str, str]:
        """Variables of NCCL on which the trainer and its servers must agree; empty without servers."""
        return self.sglang.nccl_environment() if self.engine == "sglang" else {}


SINGLE_TURN = "single_turn"
ON_ERROR = ("fail", "mark")


def env_section(env: Mapping[str, Any]) -> tuple[str, str, dict[str, Any]]:
    """Return name, `on_error`, and the environment's own keys of the section `env`."""
    own = {key: value for key, value in env.items() if key not in ("name", "on_error")}
    return env.get("name", SINGLE_TURN), env.get("on_error", "fail"), own


class HeldOutSamplingConfig(Section):
    """The sampling of held-out responses: one greedy response; other settings are as in training unless given."""

    n: PositiveInt = Field(1, description="samples per prompt")
    temperature: NonNegativeFloat = Field(0.0, le=100, description="0 is greedy")
    top_p: float | None = Field(None, gt=0, le=1, description="nucleus mass; null: as rollout.sampling")
    top_k: NonNegativeInt | None = Field(None, description="keep the k likeliest tokens; null: as rollout.sampling")
    min_p: float | None = Field(
        None, ge=0, lt=1, description="least share of the likeliest token's probability; null: as rollout.sampling"
    )
    max_new_tokens: PositiveInt | None = Field(None, description="response length limit; null: as rollout.sampling")
    min_new_tokens: NonNegativeInt | None = Field(
        None, description="no end token before this many tokens; null: as rollout.sampling"
    )
    stop_token_ids: list[int] = Field(
        default_factory=list, description="end tokens in addition to those of rollout.sampling"
    )
    stop: list[StopString] = Field(default_factory=list, description="stop strings in addition to rollout.sampling's")
    ignore_eos: bool | None = Field(None, description="generate max_new_tokens; null: as rollout.sampling")

    def after(self, training: SamplingConfig) -> SamplingConfig:
        """Return the full settings; stop conditions of training apply here, too."""
        own = self.model_dump(exclude_none=True)
        ids = [*self.stop_token_ids, *training.stop_token_ids]
        ends = {"stop_token_ids": list(dict.fromkeys(ids)), "stop": list(dict.fromkeys([*self.stop, *training.stop]))}
        return training.model_copy(update=own | ends)


class ValidationConfig(Section):
    """Held-out evaluation."""

    sampling: HeldOutSamplingConfig = Field(
        default_factory=HeldOutSamplingConfig, description="held-out samples: greedy, and as long as in training"
    )
    before_train: bool = Field(True, description="evaluate before the first step")
    every: NonNegativeInt = Field(0, description="training steps between evaluations; 0: only at the end")
    select_by: str | None = Field(
        None,
        description="part of the reward (overall: the score) whose largest value chooses one of a prompt's samples "
        "(best of n): val/selected@k is the accuracy of the chosen one of k; null: none",
    )
    log_samples: NonNegativeInt = Field(8, description="generations kept for the report at each evaluation")


PolicyReference = Annotated[str, Field(pattern=r"^\S+:[A-Za-z_][\w.]*$", examples=["file.py:Class", "pkg.mod:Class"])]


class AsyncConfig(Section):
    """Generation that runs ahead of training."""

    max_staleness: NonNegativeInt = Field(
        0,
        description="k: samples of step t begin with the weights after step t - 1 - k or later. 0: generation waits "
        "for every step; more: the rollout needs a team of its own",
    )
    order: Literal["in_order", "as_ready"] | PolicyReference = Field(
        "in_order",
        description="in_order: step t is generated with exactly the weights after step t - 1 - k (k is "
        "max_staleness); as_ready: a step trains on the groups that finish first, and k is at least 1; "
        "file.py:Class or pkg.mod:Class: a class of yours chooses among finished groups",
    )
    partial: bool = Field(
        False,
        description="new weights interrupt samples, which continue with them; needs as_ready. false: a sample ends "
        "with the weights that it began with",
    )

    @property
    def in_order(self) -> bool:
        """Whether whole steps are generated one after the other; else a step is formed of groups that are ready."""
        return self.order == "in_order"
