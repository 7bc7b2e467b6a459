"""The calls of an episode that a slot of a pool plays, recorded so that they can be repeated in another process."""

from __future__ import annotations

from dataclasses import dataclass, field

from megarl.robots.simulators.protocol import Numbers, Recording


@dataclass
class SlotEpisode:
    """The episode that a slot plays."""

    task: str
    trial: int
    chunks: list[Numbers] = field(default_factory=list)  # the actions of all policy calls so far
    # checksums of the simulator's answers to the reset and to all policy calls so far, which a replay must repeat
    sums: list[int] = field(default_factory=list)
    record: Recording | None = None  # the recording of a clip; None: no clip
    advice: bool = False  # whether the expert's action is requested
    failures: int = 0  # number of processes that failed in this episode

    @property
    def awaits_answer(self) -> bool:
        """Whether the process still has to answer a call."""
        return self.advice or len(self.sums) <= len(self.chunks)

    @property
    def next_call(self) -> str:
        """The kind of the next call that the process has to answer: `reset`, `step` or `expert`."""
        if not self.sums:
            return "reset"
        return "step" if len(self.sums) <= len(self.chunks) else "expert"
