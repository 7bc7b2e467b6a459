"""What the training loop calls: `push` after an update of the policy, `catch_up` when servers fell behind.

Both are collective over all ranks of the trainer:

    all ranks          agree on the servers to update
    lead of a server   pause, begin                       one lead per server: the first sender of its route
    all ranks          agree on who is open
    all ranks          rounds: gather, send               (courier.py)
    all ranks          agree on who got everything
    lead               commit, end, tag, [verify], flush, resume
    all ranks          agree on who is current; every rank's fleet is told

A server that fails at any point is marked failed on every rank; the others go on.
"""

from __future__ import annotations

import dataclasses
import secrets
import socket
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar
from urllib.parse import urlsplit

import torch.distributed as dist

from megarl.comm import address_for_others, all_gather_json, broadcast_json, group_size
from megarl.config.sync import SyncConfig
from megarl.device import DTYPES, device, has_cuda
from megarl.errors import ConfigError, ServerError, WorkerError
from megarl.models.policy import PolicyModel
from megarl.models.weights.export import iter_hf_tensors, layout_of_all
from megarl.models.weights.fill import coordinate
from megarl.phase import phase
from megarl.processes import LOOPBACK, is_address_here
from megarl.rollout.sglang.fleet import Fleet, Server
from megarl.rollout.sglang.tags import version_tag
from megarl.sync import verify
from megarl.sync.courier import Courier, Sent
from megarl.sync.keeper import Keeper
from megarl.sync.plan import Place, ServerLayout, holdings, make_plan
from megarl.sync.protocol import ServerUpdate
from megarl.sync.source import Source, held_pieces
from megarl.sync.transports.base import Target, Transport
from megarl.sync.transports.delta import DeltaTransport, relays_of_all
from megarl.sync.transports.disk import DiskTransport
from megarl.sync.transports.distributed import DistributedTransport
from megarl.sync.transports.tensor import TensorTransport

if TYPE_CHECKING:
    from transformers import PretrainedConfig

T = TypeVar("T")


@dataclass
class SyncReport:
    """One synchronisation, the same on every rank. Seconds are those of the slowest rank, bytes of all together.

    `to_probe`: updated servers that `sync.verify` selects; what they compute can be compared once they generate.
    """

    version: int
    transport: str
    updated: list[int] = field(default_factory=list)
    failed: dict[int, str] = field(default_factory=dict)
    nbytes: int = 0
    seconds: float = 0.0
    gather_s: float = 0.0
    send_s: float = 0.0
    verified: int = 0
    to_probe: list[int] = field(default_factory=list)


class NullSync:
    """For an engine that generates with the trainer's own parameters: there is nothing to send."""

    def push(self, version: int) -> SyncReport:
        """Nothing moves."""
        return SyncReport(version, "none")

    def catch_up(self) -> SyncReport:
        """Nobody can fall behind."""
        return SyncReport(0, "none")

    def close(self) -> None:
        """Nothing is held."""


class WeightSync:
    """Keeps the servers of a fleet on the trainer's weights.

    Args:
        chunks: this rank's part of the model; its live parameters are sent.
        hf: configuration of the whole model.
        fleet: the servers; the same list on every rank.
        server: how each of them splits the model (its host is read from its URL).
        config: section `sync` of the recipe.
        run_dir: the folder of the disk transport and the log of the keeper lie in it.
    """

    def __init__(
        self,
        chunks: Sequence[PolicyModel],
        hf: PretrainedConfig,
        fleet: Fleet,
        server: ServerLayout,
        config: SyncConfig,
        run_dir: Path,
    ) -> None:
        self.chunks, self.hf, self.fleet, self.config = chunks, hf, fleet, config
        self.version: int | None = None
        self.run = broadcast_json(secrets.token_hex(4), 0)  # part of versions' names
        self.rank = dist.get_rank() if group_size() > 1 else 0
        model_dtype = chunks[0].config.params_dtype
        self.dtype = model_dtype if config.dtype == "model" else DTYPES[config.dtype]
        ranks = layout_of_all(coordinate(chunks))
        names, addresses = hosts_of_ranks()
        hosts = _server_hosts([s.api.url for s in fleet.servers], names, addresses)
        layouts = [dataclasses.replace(server, host=host) for host in hosts]
        apart = has_cuda() and fleet.on_other_gpus
        self.transport_name = choose_transport(config.transport, hosts, set(names.values()), apart=apart)
        kind = TRANSPORTS[self.transport_name]
        self.plan = make_plan(
            holdings(hf, ranks),
            [Place(at.pp_rank, names[rank]) for rank, at in enumerate(ranks)],
            layouts,
            dtype=str(self.dtype).removeprefix("torch."),
            fp8=config.fp8,
            bucket_bytes=config.bucket_mb * 10**6,
            same_host=kind.same_host,
            one_replica=kind.one_replica,
            senders_per_stage=kind.senders_per_stage,
        )
        self.transport = self._make_transport(run_dir, names, addresses)
        at, live = self.transport.device, self.transport.live
        source = Source(held_pieces(chunks), self.plan, self.rank, self.dtype, at, live=live)
        self.courier = Courier(source, self.transport)
        leads = any(self.plan.route_of(server.number).lead == self.rank for server in fleet.servers)
        self.keeper = Keeper(run_dir / "sync", config.timeout_s) if fleet.external and leads else None

    def push(self, version: int) -> SyncReport:
        """Bring every living server to the parameters as they are now, under the name `version`. Collective.

        Raises:
            ValueError: versions do not go backwards.
            WorkerError: a server's checksums are not those of the trainer.
        """
        if self.version is not None and version < self.version:
            raise ValueError(f"weight version {version} after {self.version}")
        self.version = version
        return self._sync(lambda server: True)

    def catch_up(self) -> SyncReport:
        """Bring the living servers that are not on the current version to it. Collective; cheap when there are none."""
        if self.version is None:
            raise ValueError("catch_up before the first push")
        return self._sync(lambda server: server.version != self.version)

    def close(self) -> None:
        """Leave process groups, free buffers; the keeper brings back what is not done. Not collective."""
        if self.keeper is not None:
            self.keeper.close()
        self.transport.close()
        self.courier.release()

    def _make_transport(self, run_dir: Path, names: dict[int, str], addresses: dict[str, str]) -> Transport:
        limit = self.config.timeout_s
        if self.transport_name == "tensor":
            return TensorTransport(self.plan, device(), limit)
        if self.transport_name == "distributed":
            return DistributedTransport(self.plan, device(), limit, self.config.address)
        if self.transport_name == "delta":
            hosts = {at.host for at in self.plan.servers}
            relays, key, mine = relays_of_all(hosts, names, addresses, self.config, run_dir)
            return DeltaTransport(self.plan, relays, key, f"{self.rank}", limit, mine)
        folder = Path(self.config.folder) if self.config.folder else run_dir / "sync"
        return DiskTransport(folder, self.rank, self.hf, limit)

    def _sync(self, wanted: Callable[[Server], bool]) -> SyncReport:
        assert self.version is not None
        report = SyncReport(self.version, self.transport_name)
        start = time.perf_counter()
        numbers = [s.number for s in self.fleet.servers if s.state in ("catching_up", "current") and wanted(s)]
        everyone = all_gather_json([numbers, self.transport.broken()])
        broken = [why for _, why in everyone if why is not None]
        if broken:
            raise WorkerError(broken[0])
        agreed = sorted(set.intersection(*(set(part) for part, _ in everyone)))
        if not agreed:
            return report
        with phase("weight_sync"):
            updates = {n: self._update(n) for n in agreed if self.plan.route_of(n).lead == self.rank}
            self._each(updates, self._open, report)
            ready = self._agree(agreed, report)
            sent = self._send(ready, report)
            self._agree(ready, report)
            self._finish(updates, [n for n in ready if n not in report.failed], report)
        self._close_report(report, sent, time.perf_counter() - start, agreed)
        return report

    def _target(self, number: int) -> Target:
        server = self.fleet.servers[number]
        return Target(number, server.api, server.version, self.run)

    def _update(self, number: int) -> ServerUpdate:
        api = self.fleet.servers[number].api
        tag, limit = version_tag(self.version or 0, self.run), self.config.timeout_s
        return ServerUpdate(api, tag, session=self.transport.session, deadline_s=limit)

    def _open(self, update: ServerUpdate) -> None:
        if self.keeper is not None:
            self.keeper.open(update.api)
        update.pause(self.config.pause)
        if update.session:
            self._tell_loading(update)
        update.begin()

    def _tell_loading(self, update: ServerUpdate) -> None:
        if self.keeper is not None:
            self.keeper.loading(update.api, update.version)

    def _send(self, ready: list[int], report: SyncReport) -> Sent:
        """All rounds on this rank."""
        routes = [i for i, route in enumerate(self.plan.routes) if any(n in route.servers for n in ready)]
        mine = self.courier.source.my_route()
        targets = [self._target(n) for n in ready if mine is not None and n in self.plan.routes[mine].servers]
        if targets:
            self.transport.start(report.version, targets)
        sent = self.courier.run(routes, targets)
        report.failed |= sent.failed
        return sent

    def _finish(self, updates: dict[int, ServerUpdate], ready: list[int], report: SyncReport) -> None:
        """Publish, then each lead takes its servers through the remaining steps."""
        problem = None
        if self.rank == 0 and ready:
            try:
                self.transport.publish()
            except (OSError, WorkerError) as error:
                problem = f"cannot publish version {report.version}: {error}"
        problem = broadcast_json(problem, 0)
        if problem is not None:
            raise WorkerError(problem)
        mine = {n: update for n, update in updates.items() if n in ready}

        def load(number: int) -> None:
            update = mine[number]
            self._tell_loading(update)
            update.load(lambda: self.transport.commit(self._target(number)))
            update.end()
            update.tag()

        def reopen(number: int) -> None:
            mine[number].flush(self.config.pause)
            mine[number].resume()
            if self.keeper is not None:
                self.keeper.done(mine[number].api, mine[number].version, self.transport.folder_held())

        self._each({n: n for n in mine}, load, report)
        selected = self._to_verify(ready)
        self._verify(mine, [] if self.config.fp8 else selected, report)
        self._each({n: n for n in mine if n not in report.failed}, reopen, report)
        report.to_probe = selected

    def _verify(self, mine: dict[int, ServerUpdate], chosen: list[int], report: SyncReport) -> None:
        """Compare checksums of these servers; collective. One that gives none has failed like in other steps.

        Raises:
            WorkerError: on every rank, when a server holds something else than the trainer.
        """
        if not chosen:
            return
        layouts = sorted({(self.plan.servers[n].tp, self.plan.servers[n].ep) for n in chosen})
        tensors = iter_hf_tensors(self.chunks)
        found = verify.expected_checksums(tensors, self.hf, layouts, self.dtype, on_gpu=has_cuda())
        expected = dict(zip(layouts, broadcast_json([found.get(at) for at in layouts], 0), strict=True))
        reported: dict[int, verify.Checksums] = {}

        def ask(number: int) -> None:
            reported[number] = verify.reported_checksums(mine[number].api, self.config.timeout_s)

        self._each({n: n for n in mine if n in chosen and n not in report.failed}, ask, report)
        wrong: list[str] = []
        for number, found_there in reported.items():
            at = self.plan.servers[number].tp, self.plan.servers[number].ep
            try:
                report.verified += verify.compare(mine[number].api, expected[at], found_there)
            except ServerError as error:
                wrong.append(str(error))
        everyone = [text for part in all_gather_json(wrong) for text in part]
        if everyone:
            raise WorkerError("\n".join(everyone))

    def _to_verify(self, ready: list[int]) -> list[int]:
        """The servers of `ready` that `sync.verify` selects, the same on every rank."""
        if self.config.verify == "off":
            return []
        new = [n for n in ready if self.config.verify == "every" or self.fleet.servers[n].version is None]
        return sorted({number for part in all_gather_json(new) for number in part})

    def _each(self, work: Mapping[int, T], action: Callable[[T], None], report: SyncReport) -> None:
        """Run `action` for every server of `work` at the same time; failures go into the report."""
        if not work:
            return
        with ThreadPoolExecutor(len(work)) as pool:
            running = {number: pool.submit(action, value) for number, value in work.items()}
        for number, future in running.items():
            error = future.exception()
            if isinstance(error, Exception) and not isinstance(error, ServerError):
                traceback.print_exception(error)  # one server's failure ends no run, and the cause must not be lost
                api, where = self.fleet.servers[number].api, f"update to version {report.version}"
                error = ServerError(api.name, api.url, where, f"{type(error).__name__}: {error}")
            if isinstance(error, ServerError):
                report.failed[number] = str(error)
            elif error is not None:
                raise error

    def _agree(self, numbers: list[int], report: SyncReport) -> list[int]:
        """Tell every rank about failures; returns the servers of `numbers` without one."""
        for part in all_gather_json([[number, why] for number, why in report.failed.items()]):
            for number, why in part:
                report.failed.setdefault(number, why)
        return [number for number in numbers if number not in report.failed]

    def _close_report(self, report: SyncReport, sent: Sent, seconds: float, agreed: list[int]) -> None:
        """Make the report the same on every rank, and tell the fleet."""
        self._agree(agreed, report)
        mine = [sent.nbytes, seconds, sent.gather_s, sent.send_s, report.verified]
        everyone = all_gather_json(mine)
        report.nbytes = sum(part[0] for part in everyone)
        report.seconds, report.gather_s, report.send_s = (max(part[i] for part in everyone) for i in (1, 2, 3))
        report.verified = sum(part[4] for part in everyone)
        report.updated = [number for number in agreed if number not in report.failed]
        report.to_probe = [number for number in report.to_probe if number in report.updated]
        for number in agreed:
            server = self.fleet.servers[number]
            if number in report.failed:
                self.transport.drop(self._target(number))
                self.fleet.mark_failed(server, report.failed[number])
            else:
                self.fleet.acknowledge(server, report.version)


TRANSPORTS: dict[str, type[Transport]] = {
    "tensor": TensorTransport,
    "distributed": DistributedTransport,
    "disk": DiskTransport,
    "delta": DeltaTransport,
}


def choose_transport(wanted: str, servers: Sequence[str], trainers: set[str], *, apart: bool = False) -> str:
    """The transport that `auto` stands for.

    Args:
        servers: the host of each.
        trainers: hosts of trainer ranks.
        apart: the servers' GPUs are not the trainer's, whose memory they cannot map.

    Raises:
        ConfigError: `tensor` is asked for and a server runs where no trainer rank does, or is `apart`.
    """
    away = [host for host in servers if host not in trainers]
    if wanted == "auto":
        return "distributed" if away or apart else "tensor"
    if wanted == "tensor" and (away or apart):
        raise ConfigError(
            f"no trainer rank runs on {away[0]}, so memory cannot be shared with the server there"
            if away
            else "servers with GPUs of their own (rollout.sglang.gpus) cannot map the memory of the trainer's",
            where="sync.transport",
            found=wanted,
            allowed="auto, distributed, disk or delta",
        )
    return wanted


def hosts_of_ranks() -> tuple[dict[int, str], dict[str, str]]:
    """Name of every rank's host, and the address at which others reach each host; collective.

    Raises:
        WorkerError: a host finds no way to the others.
    """
    mine = socket.gethostname()
    found = all_gather_json([mine, address_for_others(mine)])
    return {rank: name for rank, (name, _) in enumerate(found)}, dict(found)


def _server_hosts(urls: Sequence[str], names: dict[int, str], addresses: dict[str, str]) -> list[str]:
    """Host of every server. The first rank resolves for all: ranks that disagree would follow different plans."""
    is_first = group_size() == 1 or dist.get_rank() == 0
    return broadcast_json([host_of(url, names[0], addresses) for url in urls] if is_first else None, 0)


def host_of(url: str, here: str, addresses: dict[str, str]) -> str:
    """Host of a server, in the names of the trainer's hosts where it is one of them.

    Args:
        url: of the server.
        here: name of this host.
        addresses: at which others reach each of the trainer's hosts. A host may know its own name as a loopback
            address only.
    """
    host = urlsplit(url).hostname or ""
    if host in LOOPBACK:
        return here if len(addresses) == 1 else host
    for name, address in addresses.items():
        if host in (name, address):
            return name
    if is_address_here(host):
        return here
    return next((name for name in addresses if host in _looked_up(name)), host)


def _looked_up(name: str) -> list[str]:
    try:
        return socket.gethostbyname_ex(name)[2]
    except OSError:
        return []
