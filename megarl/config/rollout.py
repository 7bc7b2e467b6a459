"""The recipe's sections about generation: `rollout`, `env`, `validation`, and `async`."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveInt, StringConstraints

from megarl.config.base import Seconds, Section
from megarl.config.engines import DEFAULT, engine_facts
from megarl.config.model import ParallelConfig
from megarl.config.sglang import SGLangConfig

#: A stop string may not contain U+FFFD: a half-sampled character decodes to it, so the string could end a turn there.
StopString = Annotated[str, StringConstraints(pattern=r"^[^\ufffd]+$")]

ClassReference = Annotated[str, Field(pattern=r"^\S+:[A-Za-z_][\w.]*$", examples=["file.py:Class", "pkg.mod:Class"])]


class SamplingConfig(Section):
    """How tokens are sampled."""

    n: PositiveInt = Field(1, description="samples per prompt")
    temperature: NonNegativeFloat = Field(1.0, le=100, description="0 is greedy")
    top_p: float = Field(1.0, gt=0, le=1, description="nucleus mass; 1 keeps all tokens")
    top_k: NonNegativeInt = Field(0, description="keep the k likeliest tokens; 0 keeps all tokens")
    min_p: float = Field(
        0.0,
        ge=0,
        lt=1,
        description="keep tokens whose probability is at least this share of the likeliest token's; 0: all (embedded "
        "engine)",
    )
    max_new_tokens: PositiveInt = Field(256, description="maximum tokens of a response or turn, end token included")
    min_new_tokens: NonNegativeInt = Field(0, description="forbid end tokens before this many tokens")
    stop_token_ids: list[int] = Field(
        default_factory=list,
        description="end tokens in addition to those of the tokenizer, generation_config.json and the chat template",
    )
    stop: list[StopString] = Field(
        default_factory=list,
        description="strings that end a response with the token that completes one of them; rewards get the text "
        "before the string",
    )
    logprobs: Literal["full", "processed"] = Field(
        "full",
        description="which log-probs are kept with the tokens. full: of the whole distribution at this temperature; "
        "processed: of the distribution after top_p, top_k, min_p and min_new_tokens (embedded engine)",
    )
    ignore_eos: bool = Field(False, description="ignore end tokens and always generate max_new_tokens (for benchmarks)")

    @property
    def is_bounded(self) -> bool:
        """Whether every token is sampled from at most `top_k` tokens."""
        return self.top_k > 0 and self.temperature > 0


class LimitsConfig(Section):
    """Limits of a multi-turn episode; `sampling.max_new_tokens` limits each turn."""

    turns: PositiveInt = Field(16, description="maximum turns of the policy")
    tokens: PositiveInt | None = Field(
        None,
        description="maximum tokens after the first observation, including the environment's; null: max_new_tokens",
    )
    seconds: Seconds | None = Field(
        None,
        description="maximum wall time of an episode; running turns then end with the tokens that they have. Runs with "
        "such a limit are not repeatable; null: no limit",
    )

    def response_tokens(self, sampling: SamplingConfig) -> int:
        """Return the largest number of tokens that may follow the first observation."""
        return self.tokens or sampling.max_new_tokens


class RolloutConfig(Section):
    """The generation engine."""

    engine: Literal["embedded", "sglang"] | ClassReference = Field(
        DEFAULT,
        description="embedded: decode on the trainer's weights in its processes; sglang: generate on SGLang servers; "
        "file.py:Class or pkg.mod:Class: an engine family of yours",
    )
    sglang: SGLangConfig = Field(default_factory=SGLangConfig, description="the servers of the engine sglang")
    parallel: ParallelConfig | None = Field(
        None,
        description="layout of the rollout when it has a team of its own; null: the actor's. Workers that use "
        "servers have data parallelism only",
    )
    sampling: SamplingConfig = Field(
        default_factory=lambda: SamplingConfig(n=8), description="sampling of training responses"
    )
    limits: LimitsConfig = Field(default_factory=LimitsConfig, description="limits of episodes with several turns")
    max_running: PositiveInt = Field(
        256, description="maximum sequences decoded at the same time per replica (embedded)"
    )
    max_prefill_tokens: PositiveInt = Field(8192, description="maximum prompt tokens per prefill pass (embedded)")
    dtype: Literal["model", "fp32", "bf16", "fp16"] = Field(
        "model",
        description="dtype of decoding; model: the trainer's dtype. fp16 has 8 times the resolution of bf16, and no "
        "numbers above 65,504",
    )
    oversample: float = Field(
        1.0,
        ge=1,
        le=2,
        description="prompt groups in flight, as a multiple of the groups that a round of generation needs: the round "
        "ends when enough of them are complete. 1: all groups that begin are waited for",
    )
    carry_steps: NonNegativeInt = Field(
        1,
        description="with oversample, number of steps through which an unfinished group is carried on: it continues "
        "with newer weights, and the last of these steps waits for it. 0: unfinished groups are dropped, and their "
        "prompts begin again in the next step",
    )
    ready_by: Literal["steps", "clock"] = Field(
        "steps",
        description="with oversample, an environment and the embedded engine, which groups are complete first. steps: "
        "by decode steps, where every round of turns waits for all environments, so that a second run repeats the "
        "first; clock: by wall time, so that a slow environment delays its own group only",
    )
    round_prompts: PositiveInt | None = Field(
        None,
        description="prompts of a round of generation with dynamic sampling, which generates rounds until the batch is "
        "full; fewer prompts leave fewer surplus groups; null: data.batch_size",
    )
    stale_steps: NonNegativeInt = Field(
        0, description="number of training steps by which the weights used for generation lag behind"
    )
    replay_routes: bool = Field(
        False,
        description="mixtures of experts: log-probs and updates of the policy use the experts chosen in generation",
    )
    replay_kept_tokens: bool = Field(
        False,
        description="log-probs and updates are of the distribution that was sampled: the tokens that top_k, top_p and "
        "min_p kept for each token",
    )
    cuda_graphs: bool = Field(True, description="capture decode steps as CUDA graphs (embedded)")

    @property
    def oversamples(self) -> bool:
        """Whether a round of generation has more prompt groups in flight than it has to complete (`oversample`)."""
        return self.oversample > 1

    @property
    def carries(self) -> bool:
        """Whether prompt groups that are unfinished at the end of a step continue in the next step (`carry_steps`)."""
        return self.oversamples and self.carry_steps > 0

    def in_flight(self, groups: int) -> int:
        """Return how many prompt groups are in flight in a round of generation that has to complete `groups` groups.

        >>> RolloutConfig(oversample=1.5).in_flight(5), RolloutConfig(oversample=1.1).in_flight(10)
        (8, 11)
        """
        return math.ceil(groups * self.oversample - 1e-9)

    @property
    def holds_model(self) -> bool:
        """Whether the workers of a rollout team hold the model that generates."""
        return engine_facts(self.engine).holds_model

    @property
    def servers(self) -> SGLangConfig | None:
        """The section of the servers that generate; None: the engine has none."""
        section = engine_facts(self.engine).servers
        return None if section is None else getattr(self, section)

    @property
    def servers_key(self) -> str:
        """The recipe key of the section `servers`, such as `rollout.sglang`."""
        return f"rollout.{engine_facts(self.engine).servers}"

    @property
    def colocated(self) -> bool:
        """Whether responses are generated by servers that share the trainer's devices."""
        return self.servers is not None and self.servers.colocated

    @property
    def nccl_environment(self) -> dict[str, str]:
        """NCCL variables with equal values in the trainer and its servers; empty without servers."""
        return {} if self.servers is None else self.servers.nccl_environment()


SINGLE_TURN = "single_turn"
ON_ERROR = ("fail", "mark")
#: Names of built-in environments whose episodes may have several sequences.
BRANCHING = ("agent", "verifiers")


def env_section(env: Mapping[str, Any]) -> tuple[str, str, dict[str, Any]]:
    """Split the section `env` into the environment's name, `on_error`, and the environment's own keys."""
    settings = {key: value for key, value in env.items() if key not in ("name", "on_error")}
    return env.get("name", SINGLE_TURN), env.get("on_error", "fail"), settings


class HeldOutSamplingConfig(Section):
    """How held-out responses are sampled: one greedy response by default. A key that is null takes its value from
    rollout.sampling.
    """

    n: PositiveInt = Field(1, description="samples per prompt")
    temperature: NonNegativeFloat = Field(0.0, le=100, description="0 is greedy")
    top_p: float | None = Field(None, gt=0, le=1, description="nucleus mass; null: as rollout.sampling")
    top_k: NonNegativeInt | None = Field(None, description="keep the k likeliest tokens; null: as rollout.sampling")
    min_p: float | None = Field(
        None,
        ge=0,
        lt=1,
        description="keep tokens whose probability is at least this share of the likeliest token's; "
        "null: as rollout.sampling",
    )
    max_new_tokens: PositiveInt | None = Field(
        None, description="maximum tokens of a response; null: as rollout.sampling"
    )
    min_new_tokens: NonNegativeInt | None = Field(
        None, description="forbid end tokens before this many tokens; null: as rollout.sampling"
    )
    stop_token_ids: list[int] = Field(
        default_factory=list, description="end tokens in addition to those of rollout.sampling"
    )
    stop: list[StopString] = Field(
        default_factory=list, description="strings that end a response, in addition to those of rollout.sampling"
    )
    ignore_eos: bool | None = Field(
        None, description="ignore end tokens and always generate max_new_tokens; null: as rollout.sampling"
    )

    def after(self, training: SamplingConfig) -> SamplingConfig:
        """Return these settings, with missing keys and further stop conditions taken from the settings of training."""
        given = self.model_dump(exclude_none=True)
        ids = [*self.stop_token_ids, *training.stop_token_ids]
        ends = {"stop_token_ids": list(dict.fromkeys(ids)), "stop": list(dict.fromkeys([*self.stop, *training.stop]))}
        return training.model_copy(update=given | ends)


class ValidationConfig(Section):
    """Held-out evaluation."""

    sampling: HeldOutSamplingConfig = Field(
        default_factory=HeldOutSamplingConfig,
        description="sampling of held-out responses: by default greedy, and as long as in training",
    )
    before_train: bool = Field(True, description="evaluate before the first step")
    every: NonNegativeInt = Field(0, description="training steps between evaluations; 0: only at the end")
    select_by: str | None = Field(
        None,
        description="part of the reward by which one of a prompt's samples is selected, the largest value winning "
        "(overall: the score); val/selected@k is the accuracy of the sample selected among k; null: none",
    )
    log_samples: NonNegativeInt = Field(8, description="generations kept for the report at each evaluation")


class AsyncConfig(Section):
    """Generation that runs ahead of training."""

    max_staleness: NonNegativeInt = Field(
        0,
        description="off-policy limit k: samples of step t begin with the weights after step t - 1 - k or later. 0: "
        "generation waits for every training step; above 0 the rollout needs a team of its own",
    )
    order: Literal["in_order", "as_ready"] | ClassReference = Field(
        "in_order",
        description="in_order: step t is generated with exactly the weights after step t - 1 - k (k is "
        "max_staleness); as_ready: a step trains on the groups that finish first, and k is at least 1; file.py:Class "
        "or pkg.mod:Class: a class of yours chooses among finished groups",
    )
    partial: bool = Field(
        False,
        description="let new weights interrupt samples, which then continue with them; needs as_ready. false: a "
        "sample keeps the weights that it began with",
    )

    @property
    def in_order(self) -> bool:
        """Whether steps are generated one after the other; otherwise a step is formed from groups as they finish."""
        return self.order == "in_order"
