"""The trainer's side of weight updates from shard to shard; every trainer rank has one `ShardTransfer`.

    lead of a receiver    describe (once)         take_shards: one call for the whole update .................. answer
    receiver's ranks          storage ->  store       <- program    ready ->   rounds, from all trainer ranks   done ->
    all trainer ranks                    plan, equal on all                    rounds, phase by phase

The lead of a receiver is the trainer rank that calls it. A cell is a set of receivers that share one process group with
the trainer ranks that send to them. If a receiver's rank ends or stops its heartbeat, all ranks give up its cell and
continue with other cells. Everything other than weights goes through a TCPStore of the first trainer rank.

Receivers on the trainer's GPUs are in no process group: each of their ranks copies what the trainer rank on its GPU,
its proxy, receives for it (proxies.py).
"""

from __future__ import annotations

import contextlib
import datetime
import json
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable, Container, Mapping, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass
from functools import partial
from typing import Protocol
from urllib.parse import urlsplit

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from megarl.sync.protocol import failure
from megarl.sync.receiver import Receiver, ShardMeeting, ShardUpdate, UpdateStep
from megarl.sync.sender import SyncReport
from megarl.sync.shards.boxes import GpuPlace, RankStorage, ServerStorage, TensorTable
from megarl.sync.shards.compare import differing, sent_hashes
from megarl.sync.shards.exchange import (
    Round,
    RoundFailed,
    RoundRunner,
    ServerCell,
    abort,
    connect,
    first_line,
    join,
    links_of,
    rounds_of_sender,
)
from megarl.sync.shards.handover import PAGE_BYTES, HandoverPage
from megarl.sync.shards.plan import UpdatePlan
from megarl.sync.shards.program import TransferProgram
from megarl.sync.shards.proxies import ProxyBuffers, ProxyPart, ProxyRunner, proxies_of
from megarl.sync.shards.table import INSTEAD, pack
from megarl.sync.shared import handle_of, shared_buffer
from megarl.system.comm import WorkerGroup
from megarl.system.errors import ServerError, WorkerError
from megarl.system.processes import address_towards
from megarl.system.store import SharedStore
from megarl.system.tracing import beat, keep_beating, located

_READY_S = 30.0  # seconds within which all ranks of a cell must be ready; else the update leaves the cell out
_QUIET_S = 10.0  # seconds without a heartbeat after which a rank counts as gone; it sends two a second during rounds
_LOOK_S = 0.25  # seconds between two checks of a cell's heartbeats
_GRACE_S = 2.0  # seconds to wait for the answer of a receiver whose cell was given up
_POLL_S = 0.02
_READY_POLL_S = 0.002  # least seconds between two checks of a trainer rank whether receivers are ready
# Largest number of these checks per second by all trainer ranks together: 1,024 ranks check every 51 ms. A check, two
# messages, takes 20 us of the store's only thread if a cell has 128 server ranks, so all checks take at most 40% of its
# time.
_READY_CHECKS = 20_000
_PHASE = "update from shard to shard"
_ANSWERED = 200  # HTTP status with which a server refuses a call; other failures have another status or none


class ShardReceiver(Receiver, Protocol):
    """A receiver whose ranks take boxes (rectangular parts of tensors) directly from the trainer's ranks."""

    def describe_storage(self, meeting: ShardMeeting, step: UpdateStep) -> None:
        """Make each rank of the engine write how it stores the model (`RankStorage`), and its machine's name
        (`machine_name`), to the trainer's store."""

    def take_shards(self, update: ShardUpdate, step: UpdateStep) -> None:
        """Make each rank of the engine receive its part of an update; return when all ranks have the weights."""


@dataclass(frozen=True)
class OwnShards:
    """How all trainer ranks store the model, and the parameters of this rank.

    Attributes:
        parameters: this rank's parameters, by their names in its storage.
        storages: how every trainer rank stores the model.
        places: where every trainer rank runs.
        tensors: the tensors that are sent.
        shapes: unpadded shape of each of these tensors.
        gpus: name of every trainer rank's GPU (`device_name`), if it may be the proxy of a receiver's rank: the rank
            that receives for it; None: receivers have GPUs of their own.
    """

    parameters: Mapping[str, Tensor]
    storages: Sequence[RankStorage]
    places: Sequence[GpuPlace]
    tensors: TensorTable
    shapes: Sequence[tuple[int, ...]]
    gpus: Sequence[str] | None = None


#: fn(own shards, servers) -> the plan, equal on all ranks for equal arguments
Planner = Callable[[OwnShards, Sequence[ServerStorage]], UpdatePlan]


@dataclass(frozen=True)
class _Described:
    """How the ranks of a receiver store the model, and the names of each rank's machine and GPU, as the ranks have
    described."""

    ranks: tuple[RankStorage, ...]
    machines: tuple[str, ...]
    gpus: tuple[str, ...]


@dataclass
class _Plan:
    """The plan of updates for one set of receivers, and this trainer rank's part of it; reused by later updates."""

    name: str
    cells: dict[int, ServerCell]
    cell_of: list[int]  # cell (receivers that share a process group) of each receiver, by its index in the set
    # The rounds have views of the parameters, which stay valid when offloading frees and allocates their memory again.
    rounds: list[Round]  # empty if `proxied` is set
    parameters: list[Tensor]
    program: TransferProgram  # this rank's part of `update`
    update: UpdatePlan
    proxied: ProxyPart | None  # for receivers on the trainer's GPUs


def _program_key(prefix: str, program: str, server: int, rank: int) -> str:
    return f"{prefix}/program/{program}/{server}/{rank}"


class ShardTransfer:
    """Sends this trainer rank's boxes (rectangular parts of tensors) to receivers.

    Args:
        own: how the trainer's ranks store the model.
        planner: returns the plan for a set of receivers.
        world: all ranks of the trainer.
        prefix: name of the run, with which all keys in the store begin.
        timeout_s: deadline in seconds of each step.
        address: address at which receivers reach the store of the first trainer rank; None: the address of the network
            interface that reaches the first receiver.
    """

    def __init__(
        self,
        own: OwnShards,
        planner: Planner,
        world: WorkerGroup,
        prefix: str,
        timeout_s: float,
        address: str | None = None,
    ) -> None:
        self.own, self.planner, self.world, self.prefix, self.timeout_s = own, planner, world, prefix, timeout_s
        self.address = address
        self._store: SharedStore | None = None
        self._last: list[str] = []  # keys of receivers that this rank led in the last update; the next one deletes them
        self._place = ("", 0)
        self._described: dict[str, _Described] = {}  # receiver's address -> its ranks' storages and machines
        self._plans: dict[tuple[str, ...], _Plan] = {}  # addresses of the last receivers -> their plan; one entry
        self._written: list[str] = []  # keys of the last plan's parts; rank 0 deletes them when there is a new plan
        self._groups: dict[int, tuple[ServerCell, dist.ProcessGroup]] = {}  # cell's number -> cell and its group
        self._updates = 0
        self._proxy_group: dist.ProcessGroup | None = None  # all trainer ranks, for the last plan with proxies
        self._device = next(iter(own.parameters.values())).device
        self._buffers = ProxyBuffers(self._device)
        self._backend = "nccl" if self._device.type == "cuda" else "gloo"

    def run(
        self,
        receivers: Sequence[ShardReceiver],
        led: Container[int],
        report: SyncReport,
        checked: Container[int] = (),
    ) -> None:
        """Send the current weights to `receivers`, for which an update has begun. Collective.

        Args:
            led: numbers of the receivers that this rank calls.
            report: gets the bytes, seconds and failures of this rank, and the number of compared parameters.
            checked: numbers of the receivers whose parameters are compared with what was sent, by hashes.

        Raises:
            UserError: a receiver's parameter does not consist of parts of tensors that the trainer's ranks hold.
            WorkerError: the ranks of the trainer have different plans, a receiver cannot describe its parameters, or a
                compared parameter has other values than were sent.
        """
        start = time.perf_counter()
        self._updates += 1
        store = self._meet(receivers)
        self._describe(receivers, led, report)  # collective: after it, all trainer ranks have left the previous update
        # The new number stops server ranks that still wait for keys of the previous update, which are deleted below.
        if self.world.rank == 0:
            store.set(f"{self.prefix}/update", str(self._updates))
        failed = {number for part in self.world.all_gather_json([*report.failed]) for number in part}
        store.delete(*self._last)
        self._last = []
        receivers = [receiver for receiver in receivers if receiver.number not in failed]
        if receivers:
            plan = self._plan(store, receivers)
            names = [receiver.name for receiver in receivers]
            watch = CellWatch(store, f"{self.prefix}/{self._updates}", plan.cells, names, self.world.size)
            calls = self._call(plan, watch, receivers, led, checked)
            if plan.proxied is None:
                lost = self._rounds(plan, watch, report)
            else:
                lost = self._proxied_rounds(plan.proxied, watch, report)
            self._end(plan, watch, receivers, calls, lost, report)
            self._compare(plan, receivers, led, report, checked)
        report.send_s += time.perf_counter() - start

    @property
    def store(self) -> SharedStore:
        """The store of the first trainer rank, through which the trainer and receivers exchange messages.

        Raises:
            ValueError: no update has begun.
        """
        if self._store is None:
            raise ValueError("the store of weight updates does not exist before the first update")
        return self._store

    @property
    def buffer_bytes(self) -> int:
        """Bytes of this rank's buffers for messages."""
        parts = [part for plan in self._plans.values() for each in plan.rounds for part in each.parts]
        parts += [part for plan in self._plans.values() if plan.proxied is not None for part in plan.proxied.buffers]
        return sum({part.untyped_storage().data_ptr(): part.untyped_storage().nbytes() for part in parts}.values())

    def drop(self, url: str) -> None:
        """Forget how the receiver at `url` stores its parameters, because another engine may take over this address."""
        self._described.pop(url, None)
        self._plans = {key: plan for key, plan in self._plans.items() if url not in key}

    def close(self) -> None:
        """Leave all process groups with receivers, and free the buffers."""
        self._plans.clear()
        for _, group in self._groups.values():
            abort(group)
        self._groups.clear()
        self._leave_proxies()
        self._buffers = ProxyBuffers(self._device)

    def _meet(self, receivers: Sequence[ShardReceiver]) -> SharedStore:
        """Return the first trainer rank's store. The first update creates it, with the list of the model's tensors."""
        if self._store is not None:
            return self._store
        problem, store = None, None
        place: list[str | int] = ["", 0]
        if self.world.rank == 0:
            try:
                place, store = self._listen(receivers)
            except (OSError, RuntimeError) as error:
                problem = f"cannot listen for ranks of servers (sync.address): {error}"
        problem, place = self.world.broadcast_json([problem, place])
        if problem is not None:
            raise WorkerError(problem)
        self._place = (str(place[0]), int(place[1]))
        who = f"trainer rank {self.world.rank}"
        if store is None:
            unconnected = f"{who} cannot connect to rank 0 at {self._place} for an update of weights, in phase"
            with located(RuntimeError, lambda phase: f"{unconnected} {phase}"):
                store = dist.TCPStore(*self._place, is_master=False, timeout=self._limit, wait_for_workers=False)
        self._store = SharedStore(store, who, f"{self.timeout_s:g} s, sync.timeout_s")
        sizes = [",".join(map(str, shape)) for shape in self.own.shapes]
        if self.world.rank == 0:
            tables = self.own.tensors.arrays("tensors") | {"tensors.sizes": np.array(sizes, np.str_)}
            self._store.set(f"{self.prefix}/tensors", pack(tables))
        return self._store

    @property
    def _limit(self) -> datetime.timedelta:
        return datetime.timedelta(seconds=self.timeout_s)

    def _listen(self, receivers: Sequence[ShardReceiver]) -> tuple[list[str | int], dist.TCPStore]:
        """Return the address and port of a new store in this process, and the store."""
        address = self.address or address_towards(urlsplit(receivers[0].url).hostname or "")
        listener = socket.create_server((address, 0))
        port = listener.getsockname()[1]
        store = dist.TCPStore(
            address,
            port,
            is_master=True,
            timeout=self._limit,
            wait_for_workers=False,
            master_listen_fd=listener.detach(),
        )
        return [address, port], store

    def _describe(self, receivers: Sequence[ShardReceiver], led: Container[int], report: SyncReport) -> None:
        """Make every new receiver describe how it stores the model, and read the descriptions from the store.

        Raises:
            WorkerError: a receiver cannot describe its parameters.
        """
        new = [receiver for receiver in receivers if receiver.url not in self._described]
        step = UpdateStep("description of its parameters", self.timeout_s)
        calls = {
            receiver.number: in_thread(partial(receiver.describe_storage, self._meeting(receiver.number), step))
            for receiver in new
            if receiver.number in led
        }
        refused = []
        wait(calls.values(), self.timeout_s + _GRACE_S)
        for number, call in calls.items():
            receiver = next(each for each in new if each.number == number)
            late = failure(receiver, step.phase, f"no answer within {self.timeout_s:g} s (sync.timeout_s)")
            error = call.exception() if call.done() else late
            if isinstance(error, ServerError):
                report.failed[number] = str(error)
                refused += [str(error)] if error.status == _ANSWERED else []
            elif error is not None:
                raise error
        everyone = self.world.all_gather_json([[*report.failed], refused])
        if reasons := [reason for _, part in everyone for reason in part]:
            raise WorkerError(f"{reasons[0]}; {INSTEAD}")
        failed = {number for part, _ in everyone for number in part}
        for receiver in new:
            if receiver.number not in failed:
                ranks = [f"{receiver.number}/{rank}" for rank in range(receiver.layout.ranks)]
                self._described[receiver.url] = _Described(
                    tuple(RankStorage.decode(self.store.get(f"{self.prefix}/storage/{rank}")) for rank in ranks),
                    *(
                        tuple(self.store.get(f"{self.prefix}/{kind}/{rank}").decode() for rank in ranks)
                        for kind in ("machine", "gpu")
                    ),
                )

    def _meeting(self, number: int) -> ShardMeeting:
        return ShardMeeting(self._place, self.prefix, number, self.timeout_s)

    def _plan(self, store: SharedStore, receivers: Sequence[ShardReceiver]) -> _Plan:
        """Return the plan for these receivers; reuse the last one if they are the same."""
        key = tuple(receiver.url for receiver in receivers)
        if key in self._plans:
            return self._plans[key]
        self._plans.clear()
        names = self.own.storages[self.world.rank].parameters.names.tolist()
        parameters = [self.own.parameters[name] for name in names]
        proxies = self._proxies(receivers)
        update = self._planned(receivers, proxies)
        digest, ranks = update.digest, [receiver.layout.ranks for receiver in receivers]
        self._write_programs(store, update, digest, receivers)
        if proxies is None:
            # new names of groups, because the store still has the keys of former groups
            cells, cell_of = _cells(update, ranks, f"megarl-{self.prefix}-{self._updates}", key)
            part, program = None, update.program(sender=self.world.rank)
            rounds = rounds_of_sender(program.arrays(), parameters, self.own.tensors.dtypes.tolist())
        else:
            # No server is in a group, so each is given up by itself: here a cell is one server.
            cells = {server: ServerCell("", (), {server: count}) for server, count in enumerate(ranks)}
            part = ProxyPart(update, self.world.rank, proxies, parameters, self._buffers, str(self._updates))
            cell_of, program, rounds = [*cells], part.program, []
            self._join_proxies(part)
        self._plans[key] = plan = _Plan(digest, cells, cell_of, rounds, parameters, program, update, part)
        return plan

    def _proxies(self, receivers: Sequence[ShardReceiver]) -> dict[tuple[int, int], int] | None:
        """Return the trainer rank on each receiver rank's GPU; None: receivers have GPUs of their own.

        Raises:
            ConfigError: on a receiver rank's GPU there is no trainer rank.
        """
        if self.own.gpus is None:
            return None
        trainer = [(place.machine, gpu) for place, gpu in zip(self.own.places, self.own.gpus, strict=True)]
        described = {receiver.name: self._described[receiver.url] for receiver in receivers}
        servers = {name: list(zip(each.machines, each.gpus, strict=True)) for name, each in described.items()}
        return proxies_of(trainer, servers)

    def _join_proxies(self, part: ProxyPart) -> None:
        """Join the process group of all trainer ranks for a new plan with proxies, unless it needs none. Collective.

        Raises:
            WorkerError: another trainer rank did not join.
        """
        self._leave_proxies()
        if part.alone:
            return
        name, size, rank = f"megarl-{self.prefix}-{self._updates}-proxies", self.world.size, self.world.rank
        try:
            with keep_beating(self.timeout_s):
                group = join(self.store.connection, name, size, rank, self._backend, self.timeout_s)
                self._proxy_group = group
                if self._backend == "nccl":
                    connect(group, part.links(), self._device, self.timeout_s, lambda: None)
        except (RuntimeError, RoundFailed) as error:
            raise WorkerError(
                f"trainer rank {rank}, {_PHASE}: it could not join the group of all trainer ranks: {first_line(error)}"
            ) from error

    def _leave_proxies(self) -> None:
        if self._proxy_group is not None:
            abort(self._proxy_group)
        self._proxy_group = None

    def _write_programs(
        self,
        store: SharedStore,
        update: UpdatePlan,
        name: str,
        receivers: Sequence[ShardReceiver],
    ) -> None:
        """Write the receivers' parts of a plan, each rank as many as the others, and delete those of the plan before.
        Return when all are written, so that the time in which receivers have to begin starts then. Collective.

        Raises:
            WorkerError: the ranks have different plans.
        """
        ranks = [(place, rank) for place, receiver in enumerate(receivers) for rank in range(receiver.layout.ranks)]
        if self.world.rank == 0:
            store.delete(*self._written)
            self._written = [_program_key(self.prefix, name, *each) for each in ranks]
        names = self.world.all_gather_json(name)
        if len(set(names)) > 1:
            raise WorkerError(
                "the trainer's ranks have planned different weight updates, an error in megarl; report it, and "
                + INSTEAD
            )
        for place, rank in ranks[self.world.rank :: self.world.size]:
            part = update.program(receiver=(place, rank))
            store.set(_program_key(self.prefix, name, place, rank), part.encode())
        self.world.barrier()

    def _planned(self, receivers: Sequence[ShardReceiver], proxies: Mapping[tuple[int, int], int] | None) -> UpdatePlan:
        same: dict[str, RankStorage] = {}
        servers = []
        seats = Counter(place.machine for place in self.own.places)  # by machine, how many ranks it has so far
        for number, receiver in enumerate(receivers):
            described = self._described[receiver.url]
            places = []
            for rank, machine in enumerate(described.machines):
                if proxies is not None:
                    places.append(self.own.places[proxies[number, rank]])
                    continue
                places.append(GpuPlace(machine, seats[machine]))
                seats[machine] += 1
            ranks = tuple(same.setdefault(rank.digest, rank) for rank in described.ranks)
            servers.append(ServerStorage(ranks, tuple(places)))
        return self.planner(self.own, servers)

    def _call(
        self,
        plan: _Plan,
        watch: CellWatch,
        receivers: Sequence[ShardReceiver],
        led: Container[int],
        checked: Container[int],
    ) -> dict[int, Future[None]]:
        """Start the calls of the receivers that this rank leads; return the calls by the receiver's index."""
        step, calls = UpdateStep(_PHASE, self.timeout_s), {}
        for place, receiver in enumerate(receivers):
            if receiver.number not in led:
                continue
            cell = plan.cell_of[place]
            update = ShardUpdate(
                self._meeting(place),
                str(self._updates),
                plan.name,
                cell,
                plan.cells[cell].to_json(),
                self._backend,
                hashed=receiver.number in checked,
                proxied=plan.proxied is not None,
            )
            watch.begin(place, receiver.layout.ranks)
            calls[place] = in_thread(partial(receiver.take_shards, update, step), partial(watch.give_up, cell))
        return calls

    def _rounds(self, plan: _Plan, watch: CellWatch, report: SyncReport) -> dict[int, str]:
        """Run this rank's rounds; return the reason for each cell (receivers that share a process group) that was given
        up, by the cell's number."""
        wanted = sorted({each.cell for each in plan.rounds})  # all ranks join their cells' groups in ascending order
        lost: dict[int, str] = {}
        limit_s = min(_READY_S, self.timeout_s)
        end = time.monotonic() + limit_s  # one deadline for all cells: their receivers were called at the same time
        for number in wanted:
            cell = plan.cells[number]
            why = watch.wait_ready(number, end, limit_s) or self._join(number, cell, watch, plan.rounds)
            if why is not None:
                lost[number] = why
                watch.give_up(number, why)
        runner = RoundRunner(plan.rounds, sends=True, look=watch.look, lost=watch.give_up, deadline_s=self.timeout_s)
        groups = {number: self._groups[number][1] for number in wanted if number not in lost}
        lost = runner.run(groups, plan.cells, lost)
        for number in lost:
            if number in self._groups:
                abort(self._groups.pop(number)[1])
        report.nbytes += runner.nbytes
        return lost

    def _proxied_rounds(self, part: ProxyPart, watch: CellWatch, report: SyncReport) -> dict[int, str]:
        """Run this rank's rounds for receivers on the trainer's GPUs; return the reason why the receiver on this rank's
        GPU was given up, by its number in the plan.

        Raises:
            WorkerError: messages between trainer ranks failed.
        """
        page, why, limit_s = None, None, min(_READY_S, self.timeout_s)
        server = -1
        if part.served is not None:
            server, rank = part.served
            memory = shared_buffer(PAGE_BYTES, torch.device("cpu"))
            page = HandoverPage(memory.zero_())
            handles = {"buffers": part.handles, "plan": part.name, "page": handle_of(memory)}
            self.store.set(f"{watch.name}/page/{server}/{rank}", json.dumps(handles))
            why = watch.wait_ready(server, time.monotonic() + limit_s, limit_s)
            if why is not None:
                watch.give_up(server, why)
        runner = ProxyRunner(part, self.world.rank, self._proxy_group, self.timeout_s)
        lost = runner.run(page if why is None else None, partial(watch.look, server), partial(watch.give_up, server))
        report.nbytes += runner.nbytes
        return {server: why or lost or ""} if why or lost else {}

    def _join(self, number: int, cell: ServerCell, watch: CellWatch, rounds: Sequence[Round]) -> str | None:
        """Join the process group of a cell unless this rank is in it already; return why joining failed, or None."""
        if number in self._groups:
            members, group = self._groups[number]
            if members == cell:
                return None
            del self._groups[number]
            abort(group)
        limit = min(_READY_S, self.timeout_s)
        try:
            place, look = cell.of_trainer(self.world.rank), partial(watch.look, number)
            group = join(self.store.connection, cell.name, cell.size, place, self._backend, limit, look)
            self._groups[number] = cell, group
            if self._backend == "nccl":
                # Use the whole deadline, because the other ranks may have to connect with other cells first.
                connect(group, links_of(rounds, number, cell, sends=True), self._device, self.timeout_s, look)
        except (RuntimeError, RoundFailed) as error:
            return f"trainer rank {self.world.rank} could not join the group: {first_line(error)}"
        return None

    def _end(
        self,
        plan: _Plan,
        watch: CellWatch,
        receivers: Sequence[ShardReceiver],
        calls: Mapping[int, Future[None]],
        lost: Mapping[int, str],
        report: SyncReport,
    ) -> None:
        """Wait for the answers of the receivers that this rank leads, and add all failed receivers to `report`."""
        end = time.monotonic() + self.timeout_s
        for place, receiver in enumerate(receivers):
            cell = plan.cell_of[place]
            why = lost.get(cell)
            if place in calls:
                why = watch.wait_answer(cell, calls[place], end, self.timeout_s) or why
                self._last += watch.keys(place, receiver.layout.ranks)
                if why is None and not watch.is_done(place, receiver.layout.ranks, plan.name):
                    why = "the server has answered, but one of its ranks does not have the weights of this update"
            if why is not None:
                known = why.startswith(receiver.name)  # the server's own errors already begin with its name
                report.failed[receiver.number] = why if known else str(failure(receiver, _PHASE, why))

    def _compare(
        self,
        plan: _Plan,
        receivers: Sequence[ShardReceiver],
        led: Container[int],
        report: SyncReport,
        checked: Container[int],
    ) -> None:
        """Compare the parameters of the receivers `checked` with all that trainer ranks sent, by hashes. Collective.

        Raises:
            WorkerError: parameters differ.
        """
        wanted = [place for place, receiver in enumerate(receivers) if receiver.number in checked]
        if not wanted:
            return
        storages = [self._described[receiver.url].ranks for receiver in receivers]
        others = set(range(len(receivers))) - set(wanted)
        sent = self.world.all_gather_json(sent_hashes(plan.program, plan.parameters, storages, others))
        wrong = []
        for place in wanted:
            receiver = receivers[place]
            if receiver.number not in led or receiver.number in report.failed:
                continue
            keys = [f"{self.prefix}/{self._updates}/hashes/{place}/{rank}" for rank in range(receiver.layout.ranks)]
            hashes = [json.loads(self.store.get(key)) for key in keys]
            report.verified += sum(map(len, hashes))
            if different := differing(sent, place, hashes):
                why = f"{len(different)} parameters differ from what was sent: {', '.join(different[:3])}"
                wrong.append(str(failure(receiver, "verification", why)))
        if everyone := [text for part in self.world.all_gather_json(wrong) for text in part]:
            raise WorkerError("\n".join(everyone))


def _cells(
    plan: UpdatePlan, ranks: Sequence[int], first: str, key: Sequence[str]
) -> tuple[dict[int, ServerCell], list[int]]:
    """Return the ranks of each cell (servers that share a process group), and the cell of each server.

    Args:
        ranks: number of ranks of each server.
        first: first part of the groups' names, equal on all ranks.
        key: addresses of the servers, which become part of the groups' names.
    """
    cell_of_message = plan.rounds.cell[plan.messages.round]
    gathering = plan.gathering_ranks().values()
    cells, cell_of = {}, [0] * len(ranks)
    for number in sorted(set(cell_of_message.tolist())):
        sent = cell_of_message == number
        servers = sorted(set(plan.messages.server[sent].tolist()))
        trainers = tuple(sorted(set(plan.messages.sender[sent].tolist())))
        name = f"{first}-{'+'.join(key[server] for server in servers)}-{'.'.join(map(str, trainers))}"
        of_cell = {server: ranks[server] for server in servers}
        machines = tuple(tuple(members) for members in gathering if members[0][0] in of_cell)
        cells[number] = ServerCell(name, trainers, of_cell, machines)
        for server in servers:
            cell_of[server] = number
    return cells, cell_of


class CellWatch:
    """Watches the ranks of receivers during one update, through the trainer's store.

    Args:
        name: first part of the update's keys.
        cells: ranks of each cell (receivers that share a process group), by its number.
        names: name of each receiver, by its number in the plan, for errors.
        trainers: number of trainer ranks; all of them watch.
    """

    def __init__(
        self, store: SharedStore, name: str, cells: Mapping[int, ServerCell], names: Sequence[str], trainers: int
    ) -> None:
        self._store, self.name, self._cells, self._names = store, name, cells, names
        self._poll_s = max(_READY_POLL_S, trainers / _READY_CHECKS)
        self._beats: dict[tuple[int, int], tuple[int, float]] = {}  # each rank's heartbeat count, and when it changed
        self._next: dict[int, float] = {}

    def _ranks(self, cell: int) -> list[tuple[int, int]]:
        return [(server, rank) for server, ranks in self._cells[cell].servers.items() for rank in range(ranks)]

    def keys(self, server: int, ranks: int) -> list[str]:
        """Return all keys of a receiver in this update; receivers of a cell share the key of its failure."""
        cell = next(number for number, cell in self._cells.items() if server in cell.servers)
        kinds = ("ready", "beat", "hashes", "done", "page")
        return [f"{self.name}/dead/{cell}"] + [f"{self.name}/{k}/{server}/{r}" for k in kinds for r in range(ranks)]

    def _beat(self, server: int, rank: int) -> str:
        return f"{self.name}/beat/{server}/{rank}"

    def begin(self, server: int, ranks: int) -> None:
        """Write heartbeat 0 of each rank of a receiver before it is called. `look` waits for it."""
        for rank in range(ranks):
            self._store.add(self._beat(server, rank), 0)

    def give_up(self, cell: int, why: str) -> None:
        """Write to the store, for all ranks, that a cell (receivers that share a process group) is given up, and why;
        the first reason is kept."""
        self._store.set_if(f"{self.name}/dead/{cell}", "", why)

    def dead(self, cell: int) -> str | None:
        """Return why a cell (receivers that share a process group) was given up, or None."""
        key = f"{self.name}/dead/{cell}"
        return self._store.get(key).decode() if self._store.check([key]) else None

    def look(self, cell: int) -> str | None:
        """Return why a cell (receivers that share a process group) has to be given up: another rank has given it up, or
        a receiver's rank sends no heartbeat.

        None: there is no reason, or the last check was less than a quarter of a second ago.
        """
        now = time.monotonic()
        if now < self._next.get(cell, 0.0):
            return None
        self._next[cell] = now + _LOOK_S
        beat()
        if (why := self.dead(cell)) is not None:
            return why
        ranks = self._ranks(cell)
        # One message for all ranks: with 1,024 server ranks in 8 cells a cell has 128, and with a message for each of
        # them, 1,024 trainer ranks would send half a million a second, twice as many as the store can answer.
        counts = map(int, self._store.get_all([self._beat(*each) for each in ranks]))
        for (server, rank), count in zip(ranks, counts, strict=True):
            before, since = self._beats.get((server, rank), (-1, now))
            if count != before:
                self._beats[server, rank] = count, now
            elif now - since > _QUIET_S and not self._store.check([f"{self.name}/done/{server}/{rank}"]):
                return f"rank {rank} of {self._names[server]} has been silent for {now - since:.0f} s"
        return None

    def wait_ready(self, cell: int, end: float, limit_s: float) -> str | None:
        """Wait until all ranks of the receivers in a cell (process group) are ready; return why one is not, or None.

        Args:
            end: `time.monotonic()` at which the wait ends, `limit_s` seconds after its beginning.
        """
        ranks = self._ranks(cell)
        keys = [f"{self.name}/ready/{server}/{rank}" for server, rank in ranks]
        while not self._store.check(keys):
            if (why := self.dead(cell)) is not None:
                return why
            if time.monotonic() > end:
                missing = [
                    f"rank {rank} of {self._names[server]}"
                    for (server, rank), key in zip(ranks, keys, strict=True)
                    if not self._store.check([key])
                ]
                return f"not ready within {limit_s:g} s: {', '.join(missing)}"
            beat()
            time.sleep(self._poll_s)
        return None

    def wait_answer(self, cell: int, call: Future[None], end: float, limit_s: float) -> str | None:
        """Wait for a receiver's answer, only briefly if its cell (the receivers in its process group) was given up.
        Return why the update of this receiver failed, or None.

        Args:
            end: `time.monotonic()` at which the wait ends, `limit_s` seconds after its beginning.
        """
        why: str | None = None
        while not call.done():
            if (lost := self.look(cell)) is not None:
                self.give_up(cell, lost)
                why, end = lost, min(end, time.monotonic() + _GRACE_S)
            if time.monotonic() > end:
                return why or f"no answer within {limit_s:g} s"
            with contextlib.suppress(TimeoutError):
                call.exception(_POLL_S)
        error = call.exception()
        if error is not None and not isinstance(error, ServerError):
            raise error
        return self.dead(cell) or (None if error is None else str(error))

    def is_done(self, server: int, ranks: int, program: str) -> bool:
        """Return whether all ranks of a receiver have completed this update, each with the program named `program`."""
        keys = [f"{self.name}/done/{server}/{rank}" for rank in range(ranks)]
        return bool(self._store.check(keys)) and all(self._store.get(key).decode() == program for key in keys)


def in_thread(call: Callable[[], None], failed: Callable[[str], None] | None = None) -> Future[None]:
    """Run `call` in a daemon thread, so that the process can end although the call never returns; return its future.

    Args:
        failed: called with the text of the error if `call` raises one.
    """
    future: Future[None] = Future()

    def run() -> None:
        try:
            call()
            future.set_result(None)
        except BaseException as error:
            future.set_exception(error)
            if failed is not None:
                failed(str(error))

    threading.Thread(target=run, name="receiver", daemon=True).start()
    return future
