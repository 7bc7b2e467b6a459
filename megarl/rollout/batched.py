"""Turns in rounds, for engines that generate for many ranks together: each `wait` is one call of `generate`."""

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
    """A `Generation` over `generate`. All turns of a round are over when it is; equal sequences share one prefill.

    Attributes:
        generate: of the engine.
        together: whether any rank that generates together with this one is busy, collective over those ranks.
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
        """See `Generation`."""
        self._turns[sequence] = (tokens, seed, room, images, begun)

    def wait(self, enough: Callable[[], bool] | None = None) -> dict[int, Completion]:
        """See `Generation`; `enough` is asked before a round, and then its turns wait for the next one.

        A round without turns is one, too: ranks that have some wait for this one in it.
        """
        kept = self._turns if self._turns and enough is not None and enough() else {}
        turns = {} if kept else self._turns
        groups: dict[tuple[int, int, tuple[int, ...], tuple[int, ...]], list[int]] = {}
        for sequence, (tokens, _, room, images, begun) in turns.items():
            seen = () if images is None else images.digests
            groups.setdefault((room, begun, tuple(tokens), seen), []).append(sequence)
        requests = [
            Request(list(tokens), [turns[sequence][1] for sequence in members], room, turns[members[0]][3], begun)
            for (room, begun, tokens, _), members in groups.items()
        ]
        self._turns = kept
        done = self.generate(requests, self.sampling, self.eos_ids)
        aborted, self._aborted = self._aborted, []
        return {sequence: Completion([], [], "abort", []) for sequence in aborted} | {
            sequence: completion
            for members, completions in zip(groups.values(), done, strict=True)
            for sequence, completion in zip(members, completions, strict=True)
        }

    def abort(self, sequence: int) -> None:
        """See `Generation`: its round has not begun."""
        del self._turns[sequence]
        self._aborted.append(sequence)

    def forget(self, sequence: int) -> None:
        """See `Generation`: nothing is kept between rounds."""

    def any_busy(self, busy: bool) -> bool:
        """See `Generation`."""
        return self.together(busy)

    def close(self) -> None:
        """See `Generation`: nothing is under way between rounds."""
