"""Generation in rounds, for engines whose ranks generate together: each `wait` is one call of `generate`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, ClassVar

from megarl.config.rollout import SamplingConfig
from megarl.rollout.engine import Completion, Request

if TYPE_CHECKING:
    from megarl.data.image_set import ImageSet

Generate = Callable[[list[Request], SamplingConfig, Sequence[int]], list[list[Completion]]]


@dataclass
class BatchedGeneration:
    """A `Generation` that runs rounds of `generate`. A round finishes all its turns; equal sequences share one prefill.

    Attributes:
        generate: the engine's `RolloutEngine.generate`.
        together: returns whether any rank that generates together with this one is busy; collective over these ranks.
    """

    generate: Generate
    together: Callable[[bool], bool]
    sampling: SamplingConfig
    eos_ids: Sequence[int]
    is_async: ClassVar[bool] = False
    is_batched: ClassVar[bool] = True
    _turns: dict[int, tuple[list[int], int, int, ImageSet | None, int]] = field(default_factory=dict)
    _aborted: list[int] = field(default_factory=list)

    def submit(
        self, sequence: int, tokens: list[int], seed: int, room: int, images: ImageSet | None = None, begun: int = 0
    ) -> None:
        """Store the next turn of `sequence` until `wait` runs a round; see `Generation.submit` for the arguments."""
        self._turns[sequence] = (tokens, seed, room, images, begun)

    def wait(self, enough: Callable[[], bool] | None = None) -> dict[int, Completion]:
        """Generate all waiting turns in one batch, a round, and return them by sequence.

        If `enough()` is True, this rank returns nothing and its turns wait for the next round. It joins a round
        without turns as well, because ranks that have turns wait for it.
        """
        next_round = self._turns if self._turns and enough is not None and enough() else {}
        turns = {} if next_round else self._turns
        groups: dict[tuple[int, int, tuple[int, ...], tuple[int, ...]], list[int]] = {}
        for sequence, (tokens, _, room, images, begun) in turns.items():
            seen = () if images is None else images.digests
            groups.setdefault((room, begun, tuple(tokens), seen), []).append(sequence)
        requests = [
            Request(list(tokens), [turns[sequence][1] for sequence in members], room, turns[members[0]][3], begun)
            for (room, begun, tokens, _), members in groups.items()
        ]
        self._turns = next_round
        done = self.generate(requests, self.sampling, self.eos_ids)
        aborted, self._aborted = self._aborted, []
        return {sequence: Completion([], [], "abort", []) for sequence in aborted} | {
            sequence: completion
            for members, completions in zip(groups.values(), done, strict=True)
            for sequence, completion in zip(members, completions, strict=True)
        }

    def abort(self, sequence: int) -> None:
        """Drop the turn of `sequence` that waits for the next call of `generate`; `wait` returns it as aborted."""
        del self._turns[sequence]
        self._aborted.append(sequence)

    def forget(self, sequence: int) -> None:
        """Do nothing, because nothing is cached between rounds."""

    def any_busy(self, busy: bool) -> bool:
        """Return whether any rank that generates together with this one is busy. Collective over these ranks."""
        return self.together(busy)

    def close(self) -> None:
        """Do nothing, because each call of `wait` finishes all turns, so none is in flight here."""
