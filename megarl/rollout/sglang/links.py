"""How SGLang servers get weights, from the team that starts the servers or from another team.

In a run of one team, the team starts its servers, restarts failed servers, and sends them weights. In runs of several
teams the rollout team starts and restarts the servers, and the actor's team sends them weights
(megarl/dag/messages.py). Both have a `Fleet` of the same servers: the rollout team's has the processes, and the actor
team's copies the states of the servers before every push (`ServerStates`). A server that is back between two pushes
gets weights at the next push.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

from megarl.dag.messages import ServersFilled, ServersStarted, ServerStates, WeightsName
from megarl.dag.stage import Role
from megarl.data.batch import Batch, Jagged
from megarl.data.image_set import image_fields
from megarl.models.hf import image_settings, route_form
from megarl.rollout.family import WeightLink, address_of_worker, record_update
from megarl.rollout.sglang.api import ServerApi
from megarl.rollout.sglang.checks import serves_own_draft
from megarl.rollout.sglang.engine import Replica, SglangEngine
from megarl.rollout.sglang.fleet import Fleet, Server
from megarl.rollout.sglang.layout import ServerLayout
from megarl.rollout.sglang.memory import ServerMemory
from megarl.rollout.sglang.probe import probe_gap, probe_servers
from megarl.rollout.sglang.receiver import SglangReceivers
from megarl.rollout.sglang.start import on_shared_devices, servers_key, settings_of_servers, start_servers
from megarl.sync.adapters import AdapterSync
from megarl.sync.protocol import version_tag
from megarl.sync.updater import SyncReport, WeightSync
from megarl.system.device import has_cuda
from megarl.system.offload_schedule import ACTOR
from megarl.system.tracing import phase

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from megarl.rollout.family import EngineHost


class OwnServers(WeightLink):
    """The servers of a team that trains and generates. Collective over the team."""

    def __init__(self, host: EngineHost) -> None:
        self._host, self.fleet = host, start_servers(host)
        with _closed_on_error(self.fleet):
            self.sync = send_weights_to(host, self.fleet)
        self.engine = engine_of(host, self.fleet, self.sync.run, self.catch_up)
        show_servers(host, self.fleet, self.sync)

    def catch_up(self) -> None:
        """Send the current weights to servers that were restarted. Collective."""
        with on_shared_devices(self._host, "catch_up"):
            report = self.sync.catch_up()
        self._account(report)

    def publish(self, version: int) -> None:
        """Restart failed servers, and send weights `version` to all servers."""
        # A colocated server starts while the actor's gradients and optimizer state are offloaded, because it allocates
        # a share of the memory that is free when it starts.
        with on_shared_devices(self._host, "start_servers"):
            self.fleet.refresh()
            # `refresh` shares the servers' states, so `starting` is the same on all ranks
            starting = any(server.state == "starting" for server in self.fleet.servers)
            if starting and self._host.config.rollout.colocated:
                self.fleet.wait_started()
        record_servers(self._host, self.fleet, self.engine)
        with on_shared_devices(self._host, "publish"):
            report = self.sync.push(version)
        self._account(report)
        self.engine.weight_version = version

    def _account(self, report: SyncReport) -> None:
        # The servers are idle, so a probe takes no longer than other calls without weights.
        limit = min(self._host.config.sync.timeout_s, self.fleet.config.health_timeout_s)
        account_update(self._host, self.fleet, self.sync.run, report, limit)

    def close(self) -> None:
        """Stop the run's servers."""
        with contextlib.ExitStack() as stack:
            stack.callback(self.fleet.close)
            stack.callback(self.sync.close)
            stack.callback(self.engine.close)


class PumpedServers(WeightLink):
    """The weight link of a rollout team: starts and restarts the servers; the actor's team sends them weights.

    Collective over the team. Every replica of the team's layout sends its own requests.
    """

    def __init__(self, host: EngineHost) -> None:
        key, address = servers_key(host.config, host.run_dir), address_of_worker(host.config)
        self._host, self.fleet = host, start_servers(host, key, address)
        with _closed_on_error(self.fleet):
            if host.layout.rank == 0:
                ServersStarted(self.fleet.reports()).post(host.mail)
            with phase("await_trainer", waits_for=host.team_of(Role.ACTOR)):
                run = WeightsName.read(host.mail).run
            self.engine = engine_of(host, self.fleet, run, None)

    def publish(self, version: int) -> None:
        """Restart failed servers, wait until the actor's team has sent weights `version`, and generate with them."""
        mail, fleet = self._host.mail, self.fleet
        with phase("start_servers"):
            fleet.refresh()
            if self._host.layout.rank == 0:
                ServerStates(version, fleet.reports()).post(mail)
        with phase("await_weights", waits_for=self._host.team_of(Role.ACTOR)):
            filled = ServersFilled.read(mail, version)
        for failed, why in filled.failed.items():
            fleet.mark_failed(fleet.servers[int(failed)], why)
        for number in filled.updated:
            fleet.acknowledge(fleet.servers[number], version)
        self.engine.weight_version = version
        record_servers(self._host, fleet, self.engine)

    def close(self) -> None:
        """Stop the run's servers."""
        self.engine.close()
        self.fleet.close()


class FilledServers(WeightLink):
    """The weight link of the actor's team: sends weights to the rollout team's servers. Collective over the team.

    Raises:
        ConfigError: the environment variable that should contain the API key of the servers is not set.
    """

    def __init__(self, host: EngineHost) -> None:
        self._host, config = host, host.config
        self._pump, key = host.team_of(Role.ROLLOUT), servers_key(config, host.run_dir)
        with phase("await_servers", waits_for=self._pump):
            reports = ServersStarted.read(host.mail).servers
        servers = [Server(n, ServerApi("", key, f"server {n}")) for n in range(len(reports))]
        self.fleet = Fleet(servers, settings_of_servers(host), world=host.layout.world)
        self.fleet.adopt(reports)
        self.sync = send_weights_to(host, self.fleet)
        if host.layout.rank == 0:
            WeightsName(self.sync.run).post(host.mail)
        show_servers(host, self.fleet, self.sync)

    def publish(self, version: int) -> None:
        """Send weights `version` to the servers, and post which servers have them."""
        self.adopt(version)
        with on_shared_devices(self._host, "publish"):
            report = self.sync.push(version)
        # A probe may take as long as an update: a busy server answers only when it has room for another request.
        account_update(self._host, self.fleet, self.sync.run, report, self._host.config.sync.timeout_s)
        self.announce(version)

    def adopt(self, version: int) -> None:
        """Wait for the rollout team's message about which servers run, and take it over before weights `version` are
        sent to them.
        """
        with phase("await_servers", waits_for=self._pump):
            self.fleet.adopt(ServerStates.read(self._host.mail, version).servers)

    def announce(self, version: int) -> None:
        """Post which servers have weights `version`, and which failed.

        Raises:
            ServerError: no server is usable.
        """
        self.fleet.need_one()
        if self._host.layout.rank == 0:
            failed = {str(server.number): server.why for server in self.fleet.servers if server.state == "failed"}
            updated = [server.number for server in self.fleet.current(version)]
            ServersFilled(version, updated, failed).post(self._host.mail)

    def close(self) -> None:
        """Stop sending weights."""
        with contextlib.ExitStack() as stack:
            stack.callback(self.fleet.close)
            stack.callback(self.sync.close)


@contextlib.contextmanager
def _closed_on_error(fleet: Fleet) -> Iterator[None]:
    try:
        yield
    except BaseException:
        fleet.close()
        raise


def engine_of(host: EngineHost, fleet: Fleet, run: str, catch_up: Callable[[], None] | None) -> SglangEngine:
    """Return the engine that generates with the servers of `fleet`; see `SglangEngine` for the arguments."""
    layout = host.layout
    replica = Replica(layout.dp_rank, layout.dp_size, layout.mp_group, layout.world)
    routes = route_form(host.hf_config) if host.config.rollout.replay_routes else None
    config = host.config.rollout
    engine = SglangEngine(fleet.config, fleet, replica, catch_up, run, host.tokenizer, routes)
    engine.keeps_tokens = config.replay_kept_tokens
    return engine


def send_weights_to(host: EngineHost, fleet: Fleet) -> WeightSync:
    """Return the `WeightSync` that sends the actor's weights to these servers. Collective over the actor's team."""
    config, servers = host.config, host.config.rollout.sglang
    if servers.colocated:
        host.offload.add_servers(ServerMemory(fleet, servers.health_timeout_s, host.layout.world))
    sizes = servers.tp_size, servers.ep_size
    layout = ServerLayout.of(host.hf_config, *sizes, on_gpu=has_cuda(), attention_dp=servers.attention_dp)
    # Servers on the trainer's GPUs drop all weights before an update, so frozen weights must be sent again too. With
    # separate adapters they keep the base model in host memory.
    stays = () if servers.colocated and has_cuda() else config.model.freeze
    receivers = SglangReceivers(fleet, layout, takes_draft=serves_own_draft(config))
    if config.sync.adapters == "separate":
        return AdapterSync(host.policy, receivers, config.sync, host.run_dir, host.layout.world)
    return WeightSync(host.policy, receivers, config.sync, host.run_dir, host.layout.world, stays)


def show_servers(host: EngineHost, fleet: Fleet, sync: WeightSync) -> None:
    """Print the servers' addresses and the method by which weights are sent to them."""
    if host.layout.rank == 0:
        where = ", ".join(server.api.url for server in fleet.servers)
        way = f"weights by {sync.transport_name}"
        way = f"base {way} once, then adapters as files" if isinstance(sync, AdapterSync) else way
        print(f"generation on SGLang servers at {where}; {way}", flush=True)


def record_servers(host: EngineHost, fleet: Fleet, engine: SglangEngine) -> None:
    """Record the restarts of servers so far, and the share of drafted tokens accepted since the last call."""
    host.metrics.max("rollout/servers_replaced", fleet.replaced)
    proposed, accepted = engine.pop_drafts()
    if host.config.rollout.sglang.speculative is not None:
        host.metrics.mean("rollout/drafts_accepted", accepted, proposed)


def account_update(host: EngineHost, fleet: Fleet, run: str, report: SyncReport, limit_s: float) -> None:
    """Record the metrics of a weight update, and the gap between log-probs of servers and trainer. Collective.

    Args:
        run: the name of the run in the names of weight versions.
        report: the update; `sync.verify` selects the servers to probe.
        limit_s: seconds that a server may take to answer a probe.
    """
    record_update(host, report)
    if not report.to_probe:
        return
    with phase("probe"):
        tag, world = version_tag(report.version, run), host.layout.world
        with host.offload.phase("probe"):
            probes = probe_servers(fleet, report.to_probe, host.hf_config.vocab_size, limit_s, tag, world)
        if not probes:
            return
        fields = {
            "prompt_ids": Jagged.from_list([probe.prompt_ids for probe in probes]),
            "response_ids": Jagged.from_list([probe.token_ids for probe in probes]),
        }
        if host.config.data.image_key is not None:
            none: list[list[Any]] = [[] for _ in probes]
            fields |= image_fields(none, none, image_settings(host.hf_config))
        with host.offload.phase("score", ACTOR):  # with colocated servers the parameters may be offloaded
            ours = host.policy_logprobs(Batch(fields))
    host.metrics.max("sync/probe_gap", probe_gap(probes, [row.tolist() for row in ours.unbind()]))
