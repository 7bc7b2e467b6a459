"""The interface of every generation engine."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Literal, NoReturn, Protocol

import torch

from megarl.config.rollout import SamplingConfig
from megarl.data.kept_tokens import KeptTokens
from megarl.data.tensor_text import from_text, to_text
from megarl.data.versions import VersionRuns

if TYPE_CHECKING:
    from torch import Tensor

    from megarl.data.image_set import ImageSet

#: `stop`: an end token or a stop string; `length`: the token limit; `abort`: aborted with its partial tokens.
FinishReason = Literal["stop", "length", "abort"]


@dataclass(frozen=True)
class Request:
    """One prompt and the seeds of its samples: `len(seeds)` samples share one prefill.

    A sample is a function of the weights, the prompt, the sampling settings and its own seed (0 <= seed < 2**63).

    Attributes:
        room: token limit of a sample, up to `sampling.max_new_tokens`, which is also the default.
        begun: number of tokens at the end of the prompt that belong to the turn which the samples continue.
    """

    prompt_ids: list[int]
    seeds: list[int]
    room: int | None = None
    images: ImageSet | None = None
    begun: int = 0

    def __post_init__(self) -> None:
        if not self.prompt_ids:
            raise ValueError("a request needs at least one prompt token")
        if any(not 0 <= seed < 2**63 for seed in self.seeds):
            raise ValueError("a seed must be at least 0 and less than 2**63")
        if self.room is not None and self.room < 1:
            raise ValueError("a request must allow at least one new token")


@dataclass(frozen=True)
class Completion:
    """One sample: its tokens (end token included; empty only after an abort) and their log-probs.

    `logprobs[i]` is log p(token_ids[i] | prompt, token_ids[:i]) under the full softmax at the sampling temperature
    (temperature 1 when greedy), before top-k, top-p and min-token masks, or after them where
    `SamplingConfig.logprobs` is `processed`. `versions` are the weight versions that sampled the tokens.

    `cached`: input tokens that were in the prefix cache; None if the engine does not count them. `routes`: those of the
    whole sequence, prompt included, if `rollout.replay_routes` is set (`megarl.data.routes`); None: not recorded.
    `kept_tokens`: tokens that the filters kept for each token, if `rollout.replay_kept_tokens` is set.
    """

    token_ids: list[int]
    logprobs: list[float]
    finish_reason: FinishReason
    versions: VersionRuns
    cached: int | None = None
    routes: Tensor | None = None
    kept_tokens: KeptTokens | None = None

    def to_json(self) -> dict[str, Any]:
        """Return the fields as JSON values; ids and log-probs are base64, as JSON of millions of floats is slow."""
        record = None if self.kept_tokens is None else self.kept_tokens.to_text()
        ids = to_text(torch.tensor(self.token_ids, dtype=torch.int32)[:, None])
        logprobs = to_text(torch.tensor(self.logprobs, dtype=torch.float64)[:, None])
        tensors = {"token_ids": ids, "logprobs": logprobs, "routes": to_text(self.routes)}
        return {**vars(self), **tensors, "kept_tokens": record}

    @classmethod
    def from_json(cls, fields: dict[str, Any]) -> Completion:
        """Restore a completion from `to_json`."""
        record = None if fields["kept_tokens"] is None else KeptTokens.from_text(fields["kept_tokens"])
        tensors = {key: from_text(fields[key]) for key in ("token_ids", "logprobs")}
        lists = {key: [] if tensor is None else tensor.flatten().tolist() for key, tensor in tensors.items()}
        return cls(**{**fields, **lists, "routes": from_text(fields["routes"]), "kept_tokens": record})


def ignore_progress(samples: int) -> None:
    """Do nothing; the default progress callback of `RolloutEngine.generate`."""


class RolloutEngine(Protocol):
    """An engine that generates samples. Every rank of a model replica calls `generate` with the same arguments."""

    weight_version: int

    def generate(
        self,
        requests: Sequence[Request],
        sampling: SamplingConfig,
        eos_ids: Sequence[int],
        advance: Callable[[int], None] = ignore_progress,
    ) -> list[list[Completion]]:
        """Return the completions in the order of `requests` and of their seeds; `sampling.n` is not read.

        `advance(k)` is called, from any thread, when this process has finished k more samples.
        """

    def open(self, sampling: SamplingConfig, eos_ids: Sequence[int], sequences: int, longest: int) -> Generation:
        """Return a `Generation` for up to `sequences` sequences of up to `longest` tokens."""


class UnopenedEngine:
    """A placeholder until the rollout opens its engine; every call raises an error."""

    weight_version = 0

    def generate(self, *arguments: object) -> NoReturn:
        """Raise a RuntimeError, because no engine is open yet."""
        raise RuntimeError("the generation engine is not open yet; call open_rollout before generating")

    open = generate


class Generation(Protocol):
    """Generation of turns that are submitted at any time. Every rank of a replica makes the same calls in order.

    Attributes:
        is_async: whether turns are also generated between calls of `wait`. If not, the order in which turns finish
            is reproducible.
        is_batched: whether each `wait` is a round that finishes all turns. The ranks of `any_busy` run it together,
            including ranks without a turn.
    """

    is_async: ClassVar[bool]
    is_batched: ClassVar[bool]

    def submit(
        self, sequence: int, tokens: list[int], seed: int, room: int, images: ImageSet | None = None, begun: int = 0
    ) -> None:
        """Submit the next turn of `sequence`, a number below the `sequences` of `RolloutEngine.open`.

        Args:
            tokens: all tokens of the sequence; they begin with the tokens submitted and generated before.
            seed: seed of this turn.
            room: maximum number of new tokens of the turn.
            images: all images in `tokens`.
            begun: number of tokens at the end of `tokens` that already belong to this turn.
        """

    def wait(self, enough: Callable[[], bool] | None = None) -> dict[int, Completion]:
        """Return the finished turns by sequence, at least one if any is in flight; the next call continues the others.

        Args:
            enough: called repeatedly, with equal results on all ranks of the replica; True ends the wait, even
                without a finished turn.
        """

    def abort(self, sequence: int) -> None:
        """Abort the in-flight turn of `sequence`; the next `wait` returns its partial tokens, perhaps none.

        Its finish reason is `abort`, unless the turn ended by itself.
        """

    def forget(self, sequence: int) -> None:
        """Free the cache of `sequence`, which has no turn in flight. Its number may be used again."""

    def any_busy(self, busy: bool) -> bool:
        """Return whether any rank that must `wait` together with this one is busy. Collective over these ranks."""

    def close(self) -> None:
        """Drop all in-flight turns and end the generation. Not collective."""
