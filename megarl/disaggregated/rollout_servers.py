"""SGLang servers of a rollout role in a team of its own: that team looks after them, the actor's team fills them.

Both have a `Fleet` of the same servers. That of the rollout's team, the pump, has the processes; the other one takes
their states from it before every push (`ServerStates`). A server that comes back during a walk is filled at the next
push, because nobody pushes in between.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from megarl.dag.messages import ServersFilled, ServersStarted, ServerStates, WeightsName
from megarl.dag.stage import Role
from megarl.rollout.sglang.api import ServerApi
from megarl.rollout.sglang.engine import Replica, SglangEngine
from megarl.rollout.sglang.fleet import Fleet, Server
from megarl.system.rendezvous import run_key
from megarl.system.tracing import phase

if TYPE_CHECKING:
    from megarl.config.run import RunConfig
    from megarl.dag.messages import Mail
    from megarl.runtime.rank_state import RankState
    from megarl.system.comm import WorkerGroup


def servers_key(config: RunConfig, run_dir: Path) -> str | None:
    """API key of the servers, which both teams know; None: servers that run already have none.

    Raises:
        ConfigError: the variable that holds it is not set.
    """
    settings = config.rollout.sglang
    return settings.external_key() if settings.urls else run_key(run_dir, "requests to servers")


# -- the pump's end ---------------------------------------------------------------------------------------------------


def pump_engine(c: RankState, fleet: Fleet) -> SglangEngine:
    """Make the engine of the servers of `fleet`, which the actor's team fills. Collective over the rollout's team.

    Every replica of the layout sends its own requests.
    """
    layout = c.layout
    if layout.rank == 0:
        ServersStarted(fleet.reports()).post(c.mail)
    with phase("await_trainer", waits_for=c.team.of(Role.ACTOR)):
        run = WeightsName.read(c.mail).run
    replica = Replica(layout.dp_rank, layout.dp_size, layout.mp_group, layout.world)
    return SglangEngine(c.config.rollout.sglang, fleet, replica, None, run, c.rollout.tokenizer)


def follow_servers(
    engine: SglangEngine, fleet: Fleet, version: int, mail: Mail, world: WorkerGroup, trainer: str
) -> None:
    """Generate with `version` from here on, on the servers that hold it. Collective over the rollout's team.

    The team `trainer` fills them.
    """
    with phase("start_servers"):
        fleet.refresh()
        if world.rank == 0:
            ServerStates(version, fleet.reports()).post(mail)
    with phase("await_weights", waits_for=trainer):
        filled = ServersFilled.read(mail, version)
    for failed, why in filled.failed.items():
        fleet.mark_failed(fleet.servers[int(failed)], why)
    for number in filled.updated:
        fleet.acknowledge(fleet.servers[number], version)
    engine.weight_version = version


# -- the trainer's end ------------------------------------------------------------------------------------------------


def connect_servers(c: RankState) -> Fleet:
    """Connect to the servers that the rollout's team looks after. Collective over the actor's team.

    Raises:
        ConfigError: as `servers_key`.
    """
    settings, key = c.config.rollout.sglang, servers_key(c.config, c.run_dir)
    with phase("await_servers", waits_for=c.team.of(Role.ROLLOUT)):
        reports = ServersStarted.read(c.mail).servers
    servers = [Server(n, ServerApi("", key, f"server {n}")) for n in range(len(reports))]
    fleet = Fleet(servers, settings, world=c.layout.world)
    fleet.adopt(reports)
    return fleet


def learn_of_servers(fleet: Fleet, version: int, mail: Mail, pump: str) -> None:
    """Before the push of `version`: which servers the team `pump` has. Every rank of the actor's team."""
    with phase("await_servers", waits_for=pump):
        fleet.adopt(ServerStates.read(mail, version).servers)


def name_run(run: str, world: WorkerGroup, mail: Mail) -> None:
    """Tell the pump what the weights of this run are called; see `megarl.sync.protocol`."""
    if world.rank == 0:
        WeightsName(run).post(mail)


def announce_servers(fleet: Fleet, version: int, world: WorkerGroup, mail: Mail) -> None:
    """Tell the pump which servers hold this version.

    Raises:
        ServerError: none does.
    """
    fleet.need_one()
    if world.rank == 0:
        failed = {str(server.number): server.why for server in fleet.servers if server.state == "failed"}
        ServersFilled(version, [server.number for server in fleet.current(version)], failed).post(mail)
