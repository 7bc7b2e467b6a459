"""The source of the seconds of a simulated run: one small interface, and the two values that a phase depends on."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Protocol


class Seconds(Protocol):
    """The durations of the parts of a run. Anyone with better numbers than formulas gives an object with these
    methods."""

    def token(self, running: int) -> float:
        """Return seconds until every one of `running` samples of a replica has one token more."""

    def prefill(self, tokens: int) -> float:
        """Return seconds that a replica spends on reading a prompt or an interrupted sample of so many tokens."""

    def node(self, id: str, tokens: float, replicas: int) -> float:
        """Return seconds of a node of the graph (not of generation) whose fullest replica, of `replicas`, has so many
        tokens."""

    def push(self, replicas: int) -> float:
        """Return seconds until all replicas of the rollout have new weights."""

    def handover(self, tokens: float) -> float:
        """Return seconds until a replica has fetched samples of so many tokens that another team wrote."""

    def other(self, team: str) -> float:
        """Return seconds of a team and step that are in no node: metrics, files, Python."""

    def call(self) -> float:
        """Return seconds of the coordinator for one call."""


@dataclass(frozen=True)
class Line:
    """The seconds that grow with tokens: `fixed + per_token * tokens`."""

    fixed: float
    per_token: float = 0.0

    def at(self, tokens: float) -> float:
        """Return seconds of so many tokens."""
        return self.fixed + self.per_token * tokens


@dataclass(frozen=True)
class Table:
    """The seconds from a table: of measurements, or of anybody's plan.

    Attributes:
        token_s: of a decoding step, by samples that run.
        prefill_s: by tokens.
        nodes: by the node's id; one that is not named takes no time.
        push_s: of new weights.
        handover_s: by tokens.
        other_s: by team.
        call_s: of the coordinator.
    """

    token_s: Line
    prefill_s: Line = field(default_factory=lambda: Line(0.0))
    nodes: Mapping[str, Line] = field(default_factory=dict)
    push_s: float = 0.0
    handover_s: Line = field(default_factory=lambda: Line(0.0))
    other_s: Mapping[str, float] = field(default_factory=dict)
    call_s: float = 0.001

    def slower_links(self, times: float) -> Table:
        """Return the same table with links on which everything takes so many times as long."""
        line = self.handover_s
        slower = Line(line.fixed * times, line.per_token * times)
        return replace(self, push_s=self.push_s * times, handover_s=slower)

    def token(self, running: int) -> float:
        """See `Seconds`."""
        return self.token_s.at(running)

    def prefill(self, tokens: int) -> float:
        """See `Seconds`."""
        return self.prefill_s.at(tokens)

    def node(self, id: str, tokens: float, replicas: int) -> float:
        """See `Seconds`."""
        return self.nodes[id].at(tokens) if id in self.nodes else 0.0

    def push(self, replicas: int) -> float:
        """See `Seconds`."""
        return self.push_s

    def handover(self, tokens: float) -> float:
        """See `Seconds`."""
        return self.handover_s.at(tokens)

    def other(self, team: str) -> float:
        """See `Seconds`."""
        return self.other_s.get(team, 0.0)

    def call(self) -> float:
        """See `Seconds`."""
        return self.call_s
