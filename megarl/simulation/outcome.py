"""The use of time in a simulated run."""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

FIRST, LAST = 4, 2  # steps that are not counted: queues fill and run empty


class Shares(NamedTuple):
    """Shares of the time of a whole run. Teams work at the same time, so that they need not sum to 1.

    Attributes:
        training: the actor's team computes.
        generating: the mean replica decodes something.
        push: weights are on their way.
        coordinator: it answers calls.
        samples: the actor's team waits for samples, and for those that have to be generated before new weights go.
    """

    training: float
    generating: float
    push: float
    coordinator: float
    samples: float


@dataclass
class Simulated:
    """A simulated run.

    Attributes:
        ends: seconds from the start at which steps ended.
        tokens: of all samples of a step, by step.
        age: mean age of the groups of a step, in versions of the weights.
        spent: seconds of the whole run, by what took them: as in `Shares`.
        calls: of the coordinator.
        failures: servers, and trainers, that died.
        nodes: seconds of the whole run, by node of the actor's team.
    """

    ends: list[float] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    age: list[float] = field(default_factory=list)
    spent: dict[str, float] = field(default_factory=dict)
    nodes: dict[str, float] = field(default_factory=dict)
    calls: int = 0
    failures: tuple[int, int] = (0, 0)

    @property
    def step_s(self) -> float:
        """Mean seconds of a counted step."""
        first, last = (FIRST, len(self.ends) - LAST) if len(self.ends) > FIRST + LAST + 1 else (1, len(self.ends))
        counted = self.ends[first - 1 : last]
        return (counted[-1] - counted[0]) / (len(counted) - 1) if len(counted) > 1 else counted[0]

    @property
    def tokens_per_s(self) -> float:
        """Tokens of responses and prompts that are trained on in a second."""
        return statistics.fmean(self.tokens) / self.step_s

    @property
    def staleness(self) -> float:
        """Mean age of groups in steps."""
        return statistics.fmean(self.age)

    @property
    def shares(self) -> Shares:
        """How much of the whole run each of these took."""
        whole = self.ends[-1]
        return Shares(*(self.spent.get(name, 0.0) / whole for name in Shares._fields))

    def largest_nodes(self) -> Mapping[str, float]:
        """Share of the run of the actor's team's nodes, the largest first."""
        order = sorted(self.nodes, key=self.nodes.__getitem__, reverse=True)
        return {id: self.nodes[id] / self.ends[-1] for id in order}
