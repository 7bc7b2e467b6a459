"""Measurements for `placement.auto: measured`: seconds of nodes in an earlier run of the recipe, and their workers.

earlier run      actor + rollout on 2 workers                     reference on 1
seconds          rollout 6, old_logp 1, actor_train 3             ref_logp 4
device-seconds   2 * (6 + 1 + 3) = 20                             1 * 4 = 4
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from megarl.artifacts.timings import Timings, read_timings
from megarl.config.run import RunConfig
from megarl.dag.graph import TaskGraph
from megarl.dag.node import team_of
from megarl.dag.stage import Role
from megarl.system.errors import ConfigError, DataError

_KEY = "placement.measured"


@dataclass(frozen=True)
class Measured:
    """The measurements of the earlier run that `placement.measured` names."""

    timings: Timings
    workers: dict[str, int]  # number of workers of the team that ran each node, by the node's id
    served: frozenset[str]  # nodes that servers run on separate devices, so that more workers would not speed them up

    def device_seconds(self, nodes: Iterable[str]) -> float:
        """Return these nodes' device-seconds per step: seconds times workers, without nodes that servers compute."""
        return sum(self.timings.seconds[id] * self.workers[id] for id in nodes if id not in self.served)


def read_measured(config: RunConfig, graph: TaskGraph) -> Measured:
    """Read the measurements of the nodes of `graph` from the run `placement.measured`."""
    folder = config.placement.measured
    if folder is None:
        raise ConfigError(
            "placement.auto=measured needs the measurements of an earlier run, but none is set",
            where=_KEY,
            found=None,
            allowed="a run folder of this recipe, whatever its placement",
            fix=f"set {_KEY}=RUNS/<name>/<stamp>, or placement.auto=even for a first run",
        )
    try:
        timings = read_timings(Path(folder))
    except DataError as error:
        message = f"{error.what}: {error.where}"
        raise ConfigError(message, where=_KEY, found=folder, allowed=error.allowed, fix=error.fix) from error
    missing = [id for id in graph.order() if id not in timings.seconds]
    if missing:
        raise ConfigError(
            f"the earlier run has no measurements of the nodes {', '.join(missing)}",
            where=_KEY,
            found=folder,
            allowed=f"a run with the nodes {', '.join(graph.order())}",
            fix=f"run this recipe for a few steps, with one team or placement.auto=even, and set {_KEY} to its folder",
        )
    by_servers = config.rollout.servers is not None and not config.rollout.colocated
    served = frozenset(node.id for node in graph if by_servers and node.role is Role.ROLLOUT)
    owner = {Role(role): name for name, (roles, _) in timings.teams.items() for role in roles}
    workers = {node.id: timings.teams[team_of(node, owner)][1] if timings.teams else timings.workers for node in graph}
    return Measured(timings, workers, served)
