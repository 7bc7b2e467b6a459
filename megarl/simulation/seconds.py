"""Where the seconds of a simulated run come from: one small interface, and functions of tokens that it uses."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Protocol


class Seconds(Protocol):
    """The durations of the parts of a run. Pass your own object with these methods to use better numbers than those
    from formulas.
    """

    def token(self, running: int) -> float:
        """Return the seconds of one decoding step of a replica with `running` samples."""

    def prefill(self, tokens: int) -> float:
        """Return the seconds in which a replica prefills a prompt or interrupted sample of `tokens` tokens."""

    def node(self, id: str, tokens: float, replicas: int) -> float:
        """Return the seconds of a graph node (except generation) whose fullest replica, of `replicas`, has `tokens`
        tokens.
        """

    def push(self, replicas: int) -> float:
        """Return the seconds until all rollout replicas have new weights."""

    def handover(self, tokens: float) -> float:
        """Return the seconds in which a replica fetches samples of `tokens` tokens that another team wrote."""

    def other(self, team: str) -> float:
        """Return the seconds per step that a team spends outside all nodes: on metrics, files and Python."""

    def call(self) -> float:
        """Return the seconds in which the coordinator process handles one call."""


@dataclass(frozen=True)
class Line:
    """A duration that grows with tokens: `fixed + per_token * tokens` seconds."""

    fixed: float
    per_token: float = 0.0

    def at(self, tokens: float) -> float:
        """Return how many seconds an operation takes for `tokens` tokens."""
        return self.fixed + self.per_token * tokens


@dataclass(frozen=True)
class Table:
    """Durations of a run's operations for the simulation, measured in a run or computed by formulas."""

    token_s: Line  # seconds per decoding step, by number of running samples
    prefill_s: Line = field(default_factory=lambda: Line(0.0))  # seconds of a prefill, by number of tokens
    nodes: Mapping[str, Line] = field(default_factory=dict)  # seconds by node id; other nodes take no time
    push_s: float = 0.0  # seconds of a weight update
    handover_s: Line = field(default_factory=lambda: Line(0.0))  # seconds of a handover, by number of tokens
    other_s: Mapping[str, float] = field(default_factory=dict)  # by team, seconds of a step outside its nodes
    call_s: float = 0.001  # seconds that the coordinator takes per call

    def slower_links(self, times: float) -> Table:
        """Return a copy of this table in which weight updates and handovers take `times` times as long."""
        line = self.handover_s
        slower = Line(line.fixed * times, line.per_token * times)
        return replace(self, push_s=self.push_s * times, handover_s=slower)

    def token(self, running: int) -> float:
        """Return the seconds of one decoding step of a replica with `running` samples."""
        return self.token_s.at(running)

    def prefill(self, tokens: int) -> float:
        """Return the seconds in which a replica prefills `tokens` tokens."""
        return self.prefill_s.at(tokens)

    def node(self, id: str, tokens: float, replicas: int) -> float:
        """Return the seconds of a node whose fullest replica has `tokens` tokens; 0 for nodes that are not in the
        table."""
        return self.nodes[id].at(tokens) if id in self.nodes else 0.0

    def push(self, replicas: int) -> float:
        """Return the seconds of a weight update, whatever the number of replicas."""
        return self.push_s

    def handover(self, tokens: float) -> float:
        """Return the seconds in which a replica fetches samples of `tokens` tokens that another team wrote."""
        return self.handover_s.at(tokens)

    def other(self, team: str) -> float:
        """Return the seconds per step that a team spends outside all nodes; 0 if they were not measured."""
        return self.other_s.get(team, 0.0)

    def call(self) -> float:
        """Return the seconds in which the coordinator process handles one call."""
        return self.call_s
