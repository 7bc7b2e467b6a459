"""How a simulated run spends its time."""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

FIRST, LAST = 4, 2  # number of first and of last steps that are not counted: in these steps queues fill and drain


class Shares(NamedTuple):
    """Shares of the time of a whole run. Teams work at the same time, so the shares need not sum to 1."""

    training: float  # share of the time in which the actor's team computes
    generating: float  # share of the time in which a replica decodes (mean over replicas)
    push: float  # share of the time in which weights are being published
    coordinator: float  # share of the time in which the coordinator replies to calls
    # share of the time in which the actor's team waits for samples, or for samples that must be generated before new
    # weights are sent
    samples: float


@dataclass
class Simulated:
    """The course of a simulated run: times, tokens, and off-policy steps."""

    ends: list[float] = field(default_factory=list)  # seconds from the start at which steps ended
    tokens: list[int] = field(default_factory=list)  # tokens of all samples of each step
    age: list[float] = field(default_factory=list)  # per step, the mean off-policy steps of its groups
    spent: dict[str, float] = field(default_factory=dict)  # seconds of the whole run by category, as in `Shares`
    nodes: dict[str, float] = field(default_factory=dict)  # seconds of the whole run by node of the actor's team
    calls: int = 0  # number of calls to the coordinator
    failures: tuple[int, int] = (0, 0)  # number of failed servers, and of failed trainers

    @property
    def step_s(self) -> float:
        """Mean seconds of a step, without the first `FIRST` and last `LAST` steps; in a short run without the first."""
        first, last = (FIRST, len(self.ends) - LAST) if len(self.ends) > FIRST + LAST + 1 else (1, len(self.ends))
        counted = self.ends[first - 1 : last]
        return (counted[-1] - counted[0]) / (len(counted) - 1) if len(counted) > 1 else counted[0]

    @property
    def tokens_per_s(self) -> float:
        """Prompt and response tokens trained on per second."""
        return statistics.fmean(self.tokens) / self.step_s

    @property
    def staleness(self) -> float:
        """Mean off-policy steps of groups."""
        return statistics.fmean(self.age)

    @property
    def shares(self) -> Shares:
        """Share of the whole run that each category took."""
        whole = self.ends[-1]
        return Shares(*(self.spent.get(name, 0.0) / whole for name in Shares._fields))

    def largest_nodes(self) -> Mapping[str, float]:
        """Share of the run that each node of the actor's team took, the largest first."""
        order = sorted(self.nodes, key=self.nodes.__getitem__, reverse=True)
        return {id: self.nodes[id] / self.ends[-1] for id in order}
