"""The interface of every generation engine."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Literal, Protocol

from megarl.config.rollout import SamplingConfig
from megarl.data.versions import VersionRuns

if TYPE_CHECKING:
    from megarl.data.image_set import ImageSet

#: An end token was sampled, or a stop string completed; the limit of tokens was reached; it was ended with what there
#: was.
FinishReason = Literal["stop", "length", "abort"]


@dataclass(frozen=True)
class Request:
    """One prompt and the seeds of its samples: `len(seeds)` samples share one prefill.

    A sample is a function of the weights, the prompt, the sampling settings and its own seed (0 <= seed < 2**63).

    Attributes:
        room: tokens of a sample, at most; None: `sampling.max_new_tokens`, which it never exceeds.
        begun: of the prompt, the last tokens that belong to the turn which the samples continue.
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
            raise ValueError("seeds must lie in [0, 2**63)")
        if self.room is not None and self.room < 1:
            raise ValueError("a request needs room for at least one token")


@dataclass(frozen=True)
class Completion:
    """One sample: its tokens (end token included; none at all only after an abort) and their log-probs.

    `logprobs[i]` is log p(token_ids[i] | prompt, token_ids[:i]) under the full softmax at the sampling temperature
    (temperature 1 when greedy), before top-k, top-p and min-token masks, or after them where
    `SamplingConfig.logprobs` says so. `versions` says which weights sampled them.

    `cached`: tokens before it whose keys and values were there already; None where nobody counts them.
    """

    token_ids: list[int]
    logprobs: list[float]
    finish_reason: FinishReason
    versions: VersionRuns
    cached: int | None = None


def ignore_progress(samples: int) -> None:
    """Ignore progress: nobody asked for it."""


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
        ...

    def open(self, sampling: SamplingConfig, eos_ids: Sequence[int], sequences: int, longest: int) -> Generation:
        """Begin to generate turns of up to `sequences` sequences of up to `longest` tokens. Arguments as `generate`."""
        ...


class UnopenedEngine:
    """The stand-in for servers that are not there yet; their engine replaces it when they are opened."""

    weight_version = 0

    def generate(self, *arguments: object) -> list[list[Completion]]:
        """Refuse it."""
        raise RuntimeError("samples are generated on servers, and none has been opened yet")

    def open(self, *arguments: object) -> Generation:
        """Refuse it."""
        raise RuntimeError("samples are generated on servers, and none has been opened yet")


class Generation(Protocol):
    """The turns of sequences that come and go. Every rank of a model replica makes the same calls in the same order.

    Attributes:
        is_async: turns go on between two calls of `wait`, so that nothing is lost by a look at other things. Otherwise
            which turns are over first depends on nothing but the turns, and a second run learns it alike.
        is_batched: a `wait` is a round, in which all turns come to their ends. The ranks of `any_busy` go through it
            together, also those that have no turn.
    """

    is_async: ClassVar[bool]
    is_batched: ClassVar[bool]

    def submit(
        self, sequence: int, tokens: list[int], seed: int, room: int, images: ImageSet | None = None, begun: int = 0
    ) -> None:
        """Ask for the next turn of `sequence` (a number below `sequences`), which is `tokens` so far.

        Args:
            tokens: everything since the start; what was submitted and generated before stays its beginning.
            seed: of this turn.
            room: tokens of the turn, at most.
            images: of all of `tokens`.
            begun: of `tokens`, the last ones that belong to this turn already.
        """
        ...

    def wait(self, enough: Callable[[], bool] | None = None) -> dict[int, Completion]:
        """Return the turns that are over, at least one when one is under way; the others go on with the next call.

        Args:
            enough: asked now and then, collective over the replica and the same on its ranks: true ends the waiting,
                whether a turn is over or not.
        """
        ...

    def abort(self, sequence: int) -> None:
        """End the turn of `sequence`, which is under way; the next `wait` gives what there is of it, perhaps nothing.

        Its finish reason is `abort`, unless it came to its own end.
        """
        ...

    def forget(self, sequence: int) -> None:
        """Forget `sequence`, whose turn is over. Its number may be used for another sequence."""
        ...

    def any_busy(self, busy: bool) -> bool:
        """Tell whether a rank that must `wait` together with this one is busy. Collective over those ranks."""
        ...

    def close(self) -> None:
        """Give up turns that are under way; nothing more is asked. Not collective."""
        ...
