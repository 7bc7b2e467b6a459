"""Turns of one episode that are sampled side by side, such as the attempts at a problem or the calls of sub-agents.

    turn 4   slot of the episode       .--> all have ended: the environment gets them together
    turn 2   another slot             -'
    turn 3   waits for a slot

Every turn has the seed that it would have if they were sampled one after the other, so its tokens do not depend on the
number of slots.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from megarl.data.trajectory import Trajectory


@dataclass
class TurnRound:
    """The turns of an episode that are sampled side by side.

    Attributes:
        lanes: their sequences, in the order of the turns; the episode continues in the last one.
        running: slot -> the sequence whose turn it samples.
        waiting: sequences without a slot.
    """

    lanes: list[Trajectory]
    running: dict[int, Trajectory] = field(default_factory=dict)
    waiting: list[Trajectory] = field(init=False)

    def __post_init__(self) -> None:
        self.waiting = list(self.lanes)
        self._segments = self.lanes[-1].segments + 1  # segments of the episode, those of this round included

    @property
    def is_over(self) -> bool:
        """Whether all turns have ended."""
        return not self.running and not self.waiting

    def place(self, slot: int) -> int:
        """Return the place of the turn that `slot` samples."""
        return next(place for place, lane in enumerate(self.lanes) if lane is self.running[slot])

    def start(self, slot: int, *, last: bool = False) -> None:
        """Give `slot` to the first waiting sequence, or to the last one."""
        self.running[slot] = self.waiting.pop(-1 if last else 0)

    def interrupted(self, lane: Trajectory) -> None:
        """Note that a turn with tokens continues in a further segment, whose number no other segment has."""
        lane.segments = self._segments
        self._segments += 1

    def end(self) -> None:
        """Set the number of segments of the episode."""
        self.lanes[-1].segments = self._segments
