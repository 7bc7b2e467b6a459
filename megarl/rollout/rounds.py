"""Turns of one episode that are sampled at the same time, such as attempts at a problem, or calls of sub-agents.

    turn 4   slot of the episode       .--> when all have ended, the environment gets all turns
    turn 2   another slot             -'
    turn 3   waits for a slot

Every turn has the seed that it would have if the turns were sampled one after the other, so its tokens do not depend on
the number of slots (places for turns in the engine).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from megarl.data.trajectory import Trajectory


@dataclass
class TurnRound:
    """The turns of an episode that are sampled at the same time, as far as there are slots (places in the engine).

    Attributes:
        lanes: the sequences of tokens to which the turns belong, in the order of the turns. The episode continues in
            the last one.
        running: slot -> the sequence whose turn is sampled in it.
        waiting: sequences whose turns have no slot yet.
    """

    lanes: list[Trajectory]
    running: dict[int, Trajectory] = field(default_factory=dict)
    waiting: list[Trajectory] = field(init=False)

    def __post_init__(self) -> None:
        self.waiting = list(self.lanes)
        self._segments = self.lanes[-1].segments + 1  # number of the next new segment

    @property
    def is_over(self) -> bool:
        """Whether all turns of the round have ended."""
        return not self.running and not self.waiting

    def place(self, slot: int) -> int:
        """Return the index, in this round, of the turn that is sampled in `slot`."""
        return next(place for place, lane in enumerate(self.lanes) if lane is self.running[slot])

    def start(self, slot: int, *, last: bool = False) -> None:
        """Give `slot` to the first waiting sequence, or to the last one if `last`."""
        self.running[slot] = self.waiting.pop(-1 if last else 0)

    def interrupted(self, lane: Trajectory) -> None:
        """Give a new segment number, which determines the seed, to a turn that was interrupted after some tokens."""
        lane.segments = self._segments
        self._segments += 1

    def end(self) -> None:
        """Count the round's turns in the episode, so that its next turn gets a number, and so a seed, of its own."""
        self.lanes[-1].segments = self._segments
