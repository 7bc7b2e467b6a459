"""Sends and receives weights in rounds of messages between trainer ranks and server ranks; both run this file.

    sender    pack A, send A, pack B, send B, wait for A, pack A, send A, wait for B, ...
    receiver  receive A, receive B, wait for A, gather and unpack A, receive A, wait for B, ...

A, B: the two buffers of a rank. So the messages of the next round are already in flight when a round ends.

Servers' processes, which lack megarl, load this file too, so it imports nothing of megarl. It reads the tables of
program.py as arrays by their names on the wire (`links.offset`).

All ranks run their rounds in one order, and each has at most two rounds in flight. So all ranks of the first unfinished
round have started it, and it ends. Server ranks on one machine that need the same bytes each receive a stripe (a share)
of these bytes. They gather the stripes of a round while they receive the next round, in a process group of their own,
also in this order. If a round cannot end because a rank is gone, the process group of its cell (trainer ranks, and the
servers that they send to) is aborted; other cells continue.
"""

from __future__ import annotations

import contextlib
import datetime
import math
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import (
    Backend,
    PrefixStore,
    _abort_process_group,
    _new_process_group_helper,
    _world,
)

POLL_S = 0.05  # seconds between two checks of a round in flight on a CPU, or of a group that is being joined
POLL_DEVICE_S = 0.0001
_WATCHDOG = "TORCH_NCCL_ASYNC_ERROR_HANDLING"
_environment = threading.Lock()

Tables = Mapping[str, Any]  # NumPy arrays by name, such as `links.offset`
_Result = TypeVar("_Result")
Link = tuple[Callable[..., Any], int]  # dist.isend or dist.irecv, and the other rank's number in the group


class RoundFailed(Exception):
    """A cell (the ranks of one process group) cannot continue its rounds; the message names the round and the rank."""


@dataclass(frozen=True)
class ServerCell:
    """A cell: one process group of trainer ranks in ascending order, followed by all ranks of some servers in order.

    Attributes:
        name: unique name of the process group.
        trainers: ranks of the trainer.
        servers: number of ranks of each server, by the server's number.
        machines: for each machine whose server ranks exchange stripes (shares of what several of them need), these
            ranks as (server, rank).
    """

    name: str
    trainers: tuple[int, ...]
    servers: dict[int, int]
    machines: tuple[tuple[tuple[int, int], ...], ...] = ()

    @property
    def size(self) -> int:
        """Number of ranks of the group."""
        return len(self.trainers) + sum(self.servers.values())

    def of_trainer(self, rank: int) -> int:
        """Return the process-group rank of trainer rank `rank`."""
        return self.trainers.index(rank)

    def of_server(self, server: int, rank: int) -> int:
        """Return the process-group rank of rank `rank` of server `server`."""
        before = sum(ranks for number, ranks in self.servers.items() if number < server)
        return len(self.trainers) + before + rank

    def gathering(self, server: int, rank: int) -> tuple[str, tuple[tuple[int, int], ...]] | None:
        """Return name and members of the process group in which a server rank exchanges stripes (shares of what several
        ranks need) with others on its machine; None: it does not."""
        for number, members in enumerate(self.machines):
            if (server, rank) in members:
                return f"{self.name}-machine-{number}", members
        return None

    def to_json(self) -> dict[str, Any]:
        """Return the cell as a JSON object."""
        servers = [[number, ranks] for number, ranks in self.servers.items()]
        return {"name": self.name, "trainers": self.trainers, "servers": servers, "machines": self.machines}

    @classmethod
    def of_json(cls, values: Mapping[str, Any]) -> ServerCell:
        """Return the cell from the result of `to_json`."""
        servers = {int(number): int(ranks) for number, ranks in values["servers"]}
        machines = tuple(tuple((server, rank) for server, rank in members) for members in values["machines"])
        return cls(str(values["name"]), tuple(values["trainers"]), dict(sorted(servers.items())), machines)


def join(
    store: dist.Store,
    name: str,
    size: int,
    rank: int,
    backend: str,
    timeout_s: float,
    look: Callable[[], str | None] | None = None,
) -> dist.ProcessGroup:
    """Create the process group `name` of `size` ranks and join it as `rank`.

    With gloo this call waits until all ranks have joined. With nccl `connect` does, or else the first messages.

    Args:
        look: called while this call waits; returns why it has to end, such as another rank that is gone, or None.

    Raises:
        RoundFailed: `look` returned a reason.
        RuntimeError: not all ranks have joined within `timeout_s` seconds.
    """
    if look is None or backend == "nccl":
        return _join(store, name, size, rank, backend, timeout_s)
    return _watched(lambda: _join(store, name, size, rank, backend, timeout_s), f"joining {name}", look, discard=abort)


def _join(store: dist.Store, name: str, size: int, rank: int, backend: str, timeout_s: float) -> dist.ProcessGroup:
    limit = datetime.timedelta(seconds=timeout_s)
    # The annotation is Any, because newer torch has its own type for names of groups.
    named: dict[str, Any] = {"group_name": name, "timeout": limit}
    # The group waits for keys on a connection of its own, because torch's client holds a lock while it waits, and
    # `look` reads the store meanwhile. With nccl the group waits in `connect`, for the id that its rank 0 makes.
    store = store.clone()  # type: ignore[attr-defined]  # missing in torch's stub
    with without_watchdog() if backend == "nccl" else contextlib.nullcontext():
        group, _ = _new_process_group_helper(size, rank, [], Backend(backend), PrefixStore(name, store), **named)
    _world.pg_group_ranks[group] = {member: member for member in range(size)}
    return group


def connect(
    group: dist.ProcessGroup,
    links: Sequence[Link],
    device: torch.device,
    timeout_s: float,
    look: Callable[[], str | None],
) -> None:
    """Make nccl's communicator of a group, and connect this rank with all ranks that it sends to or receives from.

    Collective over all ranks of the group. Without this call, the first batch of messages would make the communicator,
    for which it waits for all ranks, and connect its pairs of ranks, for which it waits for theirs. But ranks begin
    with different groups and with different rounds, so they would wait for each other. A rank of several groups has to
    connect them in the order in which the other ranks do.

    Args:
        links: the messages of this rank; the numbers of ranks are those in the group.
        look: called while this call waits; returns why it has to end, such as another rank that is gone, or None.

    Raises:
        RoundFailed: `look` returned a reason.
        RuntimeError: another rank has not called this within `timeout_s` seconds. nccl would wait for ever.
    """

    def begin() -> None:
        if device.type == "cuda":
            torch.cuda.set_device(device)  # a new thread begins on device 0
        group._get_backend(device).eager_connect_single_device(device)
        data = torch.zeros(len(links), 16, dtype=torch.uint8, device=device)
        operations = [dist.P2POp(link, row, peer, group) for (link, peer), row in zip(links, data, strict=True)]
        for work in dist.batch_isend_irecv(operations) if operations else []:
            work.wait()
        if device.type == "cuda":
            torch.cuda.current_stream().synchronize()

    _watched(begin, "connecting the ranks of a group", look, timeout_s)


def _watched(
    call: Callable[[], _Result],
    what: str,
    look: Callable[[], str | None],
    timeout_s: float = math.inf,
    discard: Callable[[_Result], None] | None = None,
) -> _Result:
    """Run `call`, which may wait forever for other ranks, in a daemon thread, and return its result.

    Args:
        what: what the call does, for errors.
        look: called meanwhile; returns why to stop waiting for the call, or None.
        timeout_s: deadline in seconds.
        discard: called with the result if the call returns after this function has stopped waiting for it.

    Raises:
        RoundFailed: `look` returned a reason.
        RuntimeError: the call has not returned before the deadline. Errors of the call are raised too.
    """
    returned: Future[_Result] = Future()

    def run() -> None:
        try:
            result = call()
        except BaseException as error:
            if returned.set_running_or_notify_cancel():
                returned.set_exception(error)
            return
        if returned.set_running_or_notify_cancel():
            returned.set_result(result)
        elif discard is not None:
            discard(result)

    threading.Thread(target=run, name=what.partition(" ")[0], daemon=True).start()
    end = time.monotonic() + timeout_s
    while not wait([returned], POLL_S).done:
        # If the future cannot be cancelled, the call has just returned, and the loop ends.
        if (why := look()) is not None and returned.cancel():
            raise RoundFailed(f"{what}: {why}")
        if time.monotonic() > end and returned.cancel():
            raise RuntimeError(f"{what}: not done within {timeout_s:g} s")
    return returned.result()


@contextlib.contextmanager
def without_watchdog() -> Iterator[None]:
    """In this block, create groups without nccl's watchdog, which would end this process if a rank is gone."""
    with _environment:
        before = os.environ.get(_WATCHDOG)
        os.environ[_WATCHDOG] = "0"  # torch reads this variable when it creates a group
        try:
            yield
        finally:
            del os.environ[_WATCHDOG]
            if before is not None:
                os.environ[_WATCHDOG] = before


@dataclass
class RoundMessage:
    """One send or receive of a round.

    Attributes:
        peer: the other rank: (server, rank) if this rank sends, (-1, trainer rank) if it receives.
        data: uint8, contiguous: a part of a buffer or of a parameter.
    """

    peer: tuple[int, int]
    data: Tensor


@dataclass(frozen=True)
class StripeGroup:
    """The process group of the ranks of a machine that exchange stripes (shares of what several of them need).

    Attributes:
        members: (server, rank) of each, in the order of the group's ranks.
    """

    group: dist.ProcessGroup
    members: tuple[tuple[int, int], ...]


@dataclass
class Round:
    """One round of one rank: its messages, and what is copied between parameters and buffer.

    Attributes:
        cell: number of the process group.
        name: phase and number of the round, for errors.
        buffer: which of the rank's two buffers the round uses: 0 or 1.
        parameters, parts: equally shaped views of parameters and of the buffer, which are copied one to the other.
        stripe: uint8, the part of the buffer that this rank, after receiving it, sends to other ranks of its machine
            that need it too; None: there is none.
        stripes: the parts of the buffer in which these ranks' stripes arrive, with (server, rank) as the peer.
    """

    cell: int
    name: str
    buffer: int
    messages: list[RoundMessage] = field(default_factory=list)
    parameters: list[Tensor] = field(default_factory=list)
    parts: list[Tensor] = field(default_factory=list)
    stripe: Tensor | None = None
    stripes: list[RoundMessage] = field(default_factory=list)

    def described(self, *, sends: bool) -> str:
        """Return the round's name and the ranks that it sends to or receives from, for errors."""
        if sends:
            others = ", ".join(f"rank {rank} of server {server}" for server, rank in {m.peer: 0 for m in self.messages})
            return f"{self.name} to {others}"
        return f"{self.name} from trainer ranks {sorted({message.peer[1] for message in self.messages})}"

    def gather_described(self) -> str:
        """Return the round's name and the ranks that exchange stripes with this one, for errors."""
        others = ", ".join(f"rank {each.peer[1]} of server {each.peer[0]}" for each in self.stripes)
        return f"{self.name}, gathering with {others}"

    @property
    def on_device(self) -> bool:
        """Whether the messages are in a GPU's memory."""
        return self.messages[0].data.is_cuda if self.stripe is None else self.stripe.is_cuda

    @property
    def nbytes(self) -> int:
        """Bytes of all messages."""
        return sum(message.data.nbytes for message in self.messages)


def rounds_of_sender(
    tables: Tables, parameters: Sequence[Tensor], dtypes: Sequence[str], local: Mapping[int, Tensor] | None = None
) -> list[Round]:
    """Return the rounds of a trainer rank.

    Args:
        tables: arrays of the `TransferProgram` of this rank, by name.
        parameters: parameters in the order of the rank's `ParameterTable`.
        dtypes: dtype on the wire of each tensor in `TensorTable`.
        local: by row, the messages that this rank does not send but packs into a buffer from which a server rank on its
            GPU copies them: uint8, the message's part of this buffer.
    """
    local = local or {}
    buffers = [torch.empty(size, dtype=torch.uint8, device=parameters[0].device) for size in buffer_sizes(tables)]
    rounds, data = _messages(tables, buffers, None)
    for row, part in local.items():
        data[row].data = part
    unsent = {id(data[row]) for row in local}
    for now in rounds:
        now.messages = [message for message in now.messages if id(message) not in unsent]
    _add_copies(rounds, data, tables, parameters, dtypes, "links")
    return rounds


def rounds_of_receiver(
    tables: Tables,
    parameters: Sequence[Tensor],
    dtypes: Sequence[str],
    who: tuple[int, int],
    buffers: Sequence[Tensor] | None = None,
) -> list[Round]:
    """Return the rounds of server rank `who` (server, rank).

    Args:
        tables, parameters, dtypes: as for `rounds_of_sender`.
        buffers: the buffers of rounds with even and with odd numbers, into which another process receives the messages;
            None: this process makes them, and receives the messages.
    """
    if buffers is None:
        sizes = buffer_sizes(tables, receives=True)
        buffers = [torch.empty(size, dtype=torch.uint8, device=parameters[0].device) for size in sizes]
    rounds, data = _messages(tables, buffers, who)
    _add_copies(rounds, data, tables, parameters, dtypes, "targets")
    return rounds


def rounds_of_proxy(tables: Tables, buffers: Sequence[Tensor], who: tuple[int, int]) -> list[Round]:
    """Return the rounds in which a trainer rank receives the messages of server rank `who` (server, rank) into
    `buffers`, those of rounds with even and with odd numbers, without copying them to parameters.

    `tables`: as for `rounds_of_sender`.
    """
    return _messages(tables, buffers, who)[0]


def _messages(
    tables: Tables, buffers: Sequence[Tensor], who: tuple[int, int] | None
) -> tuple[list[Round], list[RoundMessage]]:
    """Return the rounds of a receiver, or those of a sender if `who` is None, without copies, and all messages in the
    order of the tables."""
    sends = who is None
    at = tables["messages.send_at" if sends else "messages.receive_at"].tolist()
    sizes, number = tables["messages.nbytes"].tolist(), tables["messages.round"].tolist()
    rounds = [
        Round(cell, f"round {part} of phase {phase}", place % 2)
        for place, (phase, part, cell) in enumerate(
            zip(*(tables[f"rounds.{key}"].tolist() for key in ("phase", "number", "cell")), strict=True)
        )
    ]
    ends = zip(*(tables[f"messages.{key}"].tolist() for key in ("sender", "server", "receiver")), strict=True)
    data = []
    for place, nbytes, turn, (sender, *receiver) in zip(at, sizes, number, ends, strict=True):
        part = buffers[turn % 2][place : place + nbytes] if place >= 0 else None
        peer = (receiver[0], receiver[1]) if sends else (-1, sender)
        message = RoundMessage(peer, part if part is not None else torch.empty(0))
        if who in (None, (receiver[0], receiver[1])):  # the tables also have messages to other ranks of the machine
            rounds[turn].messages.append(message)
        data.append(message)
    if who is not None:
        _add_stripes(rounds, tables, buffers, who)
    return rounds, data


def _add_copies(
    rounds: Sequence[Round],
    data: Sequence[RoundMessage],
    tables: Tables,
    parameters: Sequence[Tensor],
    dtypes: Sequence[str],
    table: Literal["links", "targets"],
) -> None:
    """Set in each round what is copied between parameters and buffer.

    Args:
        data: the messages in the order of the tables.
        table: which table has the places in `parameters`: that of a sender, or that of a receiver.
    """
    number = tables["messages.round"].tolist()
    copies = _copies(tables, parameters, sends=table == "links")
    links = zip(*(tables[f"links.{key}"].tolist() for key in ("message", "start", "nbytes", "tensor")), strict=True)
    for link, (row, start, nbytes, tensor) in enumerate(links):
        for view in copies.get(link, ()):
            if not data[row].data.numel():  # the message needs no buffer: its data is the parameter's own memory
                flat = view.as_strided((view.numel(),), (1,), view.storage_offset())
                data[row].data = flat.view(torch.uint8)
                continue
            part = data[row].data[start : start + nbytes].view(getattr(torch, dtypes[tensor])).view(view.shape)
            rounds[number[row]].parameters.append(view)
            rounds[number[row]].parts.append(part)


def buffer_sizes(tables: Tables, *, receives: bool = False) -> tuple[int, int]:
    """Return the bytes of the two buffers of a sender or of a receiver: that of rounds with even numbers in the tables,
    and that of odd ones."""
    ends = [[0], [0]]
    columns = ("messages.receive_at" if receives else "messages.send_at", "messages.nbytes", "messages.round")
    for place, nbytes, turn in zip(*(tables[column].tolist() for column in columns), strict=True):
        ends[turn % 2].append(place + nbytes if place >= 0 else 0)
    for place, nbytes, turn in zip(*(tables[f"fans.{key}"].tolist() for key in ("at", "stripe", "round")), strict=True):
        ends[turn % 2].append(place + nbytes)
    return max(ends[0]), max(ends[1])


def _add_stripes(rounds: Sequence[Round], tables: Tables, buffers: Sequence[Tensor], who: tuple[int, int]) -> None:
    """Set in each round the stripe (share of bytes) that rank `who` (server, rank) sends to other ranks of its machine,
    and the stripes that it receives from them."""
    columns = (tables[f"fans.{key}"].tolist() for key in ("round", "server", "rank", "at", "stripe"))
    for turn, server, rank, place, nbytes in zip(*columns, strict=True):
        part = buffers[turn % 2][place : place + nbytes]
        if (server, rank) == who:
            rounds[turn].stripe = part
        else:
            rounds[turn].stripes.append(RoundMessage((server, rank), part))


def _copies(tables: Tables, parameters: Sequence[Tensor], *, sends: bool) -> dict[int, list[Tensor]]:
    """Return, for each link (a box in a message), the views of parameters that it is packed from or unpacked into."""
    table = "links" if sends else "targets"
    link = range(len(tables["links.message"])) if sends else tables["targets.link"].tolist()
    shapes = (tables["links.hi"] - tables["links.lo"]).tolist()
    views: dict[int, list[Tensor]] = {}
    columns = (tables[f"{table}.{key}"].tolist() for key in ("parameter", "offset", "strides"))
    for row, parameter, offset, strides in zip(link, *columns, strict=True):
        whole = parameters[parameter]
        view = whole.as_strided(shapes[row], strides, whole.storage_offset() + offset)
        views.setdefault(row, []).append(view)
    return views


def links_of(rounds: Sequence[Round], number: int, cell: ServerCell, *, sends: bool) -> list[Link]:
    """Return, for each rank with which this rank exchanges messages in any round of the cell with this number (trainer
    ranks and the servers that they send to), whether this rank sends or receives, and the other's rank in the group."""
    peers = sorted({each.peer for now in rounds if now.cell == number for each in now.messages})
    if sends:
        return [(dist.isend, cell.of_server(*peer)) for peer in peers]
    return [(dist.irecv, cell.of_trainer(rank)) for _, rank in peers]


def stripe_links(rounds: Sequence[Round], members: Sequence[tuple[int, int]]) -> list[Link]:
    """Return a send and a receive, with the other's rank in the group, for each rank of this server rank's machine with
    which it exchanges stripes (shares of what several of them need) in any round.

    `members`: the ranks of the process group, as (server, rank).
    """
    peers = sorted({members.index(each.peer) for now in rounds for each in now.stripes})
    return [(operation, peer) for peer in peers for operation in (dist.isend, dist.irecv)]


class RoundRunner:
    """Runs the rounds of one rank. If a round fails, the rank gives up the round's cell (the process group of trainer
    ranks and the servers that they send to), and continues with the rounds of other cells.

    Args:
        rounds: this rank's rounds, in the order in which they run.
        sends: whether this rank sends; otherwise it receives.
        look: called with a cell's number between rounds, and while a round is in flight; returns why the rank has to
            give up the cell, or None.
        lost: called with the number of a cell that this rank gives up, and the reason.
        deadline_s: seconds after which a round has failed.
        machine: the group in which a server rank exchanges stripes (shares of what several ranks of its machine need);
            None: it exchanges none.
    """

    def __init__(
        self,
        rounds: Sequence[Round],
        *,
        sends: bool,
        look: Callable[[int], str | None],
        lost: Callable[[int, str], None],
        deadline_s: float,
        machine: StripeGroup | None = None,
    ) -> None:
        self.rounds, self.sends, self.look, self.lost, self.deadline_s = rounds, sends, look, lost, deadline_s
        self.machine = machine
        self.failed: dict[int, str] = {}
        self.nbytes = 0  # bytes of all rounds whose messages have arrived

    @torch.no_grad()
    def run(
        self, groups: Mapping[int, dist.ProcessGroup], cells: Mapping[int, ServerCell], failed: Mapping[int, str]
    ) -> dict[int, str]:
        """Run the rounds of all cells (process groups of trainer ranks and servers), and return the reason for each
        cell that was given up, by its number.

        Args:
            groups, cells: process group of each cell, and its ranks.
            failed: cells that have failed before the first round, with the reasons.
        """
        self.failed, self.nbytes = dict(failed), 0
        flights: deque[tuple[Round, list[dist.Work]]] = deque()
        for now in self.rounds:
            if now.cell not in self.failed and (why := self.look(now.cell)) is not None:
                self._give_up(now.cell, why, groups)
            if now.cell in self.failed:
                continue
            # One earlier round may stay in flight if it uses the other buffer. If a round between them was skipped,
            # both may use the same buffer.
            while len(flights) > 1 or (flights and flights[0][0].buffer == now.buffer):
                self._end(flights.popleft(), groups)
            if now.cell in self.failed:
                continue
            if self.sends and now.parts:
                torch._foreach_copy_(now.parts, now.parameters)
            flights.append((now, self._start(now, groups, cells)))
        while flights:
            self._end(flights.popleft(), groups)
        return self.failed

    def _start(
        self, now: Round, groups: Mapping[int, dist.ProcessGroup], cells: Mapping[int, ServerCell]
    ) -> list[dist.Work]:
        """Start the messages of a round as one batch, and return their handles; none if this fails."""
        cell, group = cells[now.cell], groups[now.cell]
        operation = dist.isend if self.sends else dist.irecv
        operations = [
            dist.P2POp(
                operation, each.data, cell.of_server(*each.peer) if self.sends else cell.of_trainer(each.peer[1]), group
            )
            for each in now.messages
        ]
        return self._begin(now, operations, now.described(sends=self.sends), groups)

    def _start_gather(self, now: Round, groups: Mapping[int, dist.ProcessGroup]) -> list[dist.Work]:
        """Start to exchange the stripes (shares) of a round with other ranks of the machine; return the handles."""
        if now.stripe is None or self.machine is None or now.cell in self.failed:
            return []
        group, members = self.machine.group, self.machine.members
        operations = []
        for each in now.stripes:
            other = members.index(each.peer)
            operations += [
                dist.P2POp(dist.isend, now.stripe, other, group),
                dist.P2POp(dist.irecv, each.data, other, group),
            ]
        return self._begin(now, operations, now.gather_described(), groups)

    def _begin(
        self, now: Round, operations: list[dist.P2POp], what: str, groups: Mapping[int, dist.ProcessGroup]
    ) -> list[dist.Work]:
        """Start operations of a round as one batch; return their handles. If that fails, give up the round's cell (its
        process group) and return none."""
        try:
            return dist.batch_isend_irecv(operations) if operations else []
        except RuntimeError as error:
            self._give_up(now.cell, f"{what}: {first_line(error)}", groups)
            return []

    def _end(
        self,
        flight: tuple[Round, list[dist.Work]],
        groups: Mapping[int, dist.ProcessGroup],
    ) -> None:
        """Wait until the messages of a round have arrived; a receiver then exchanges stripes with other ranks of its
        machine, and copies everything to its parameters."""
        now, works = flight
        if self._arrived(now, works, partial(now.described, sends=self.sends), groups):
            self.nbytes += now.nbytes
        if self.sends:
            return
        self._arrived(now, self._start_gather(now, groups), now.gather_described, groups)
        if now.parts and now.cell not in self.failed:
            torch._foreach_copy_(now.parameters, now.parts)

    def _arrived(
        self,
        now: Round,
        works: Sequence[dist.Work],
        what: Callable[[], str],
        groups: Mapping[int, dist.ProcessGroup],
    ) -> bool:
        """Wait until `works` of a round have ended; return whether there were any and all succeeded. If one fails, give
        up the round's cell (its process group)."""
        if not works or now.cell in self.failed:
            return False
        end = time.monotonic() + self.deadline_s
        part: Future[None] | None = None if now.on_device else waited_for(works)
        while not ended(works, part, POLL_DEVICE_S if now.on_device else POLL_S):
            why = self.look(now.cell)
            if why is None and time.monotonic() > end:
                why = f"not done within {self.deadline_s:g} s"
            if why is not None:
                self._give_up(now.cell, f"{what()}: {why}", groups)
                return False
        try:
            if part is not None:
                part.result()
            else:
                check_device(works)
        except RuntimeError as error:
            self._give_up(now.cell, f"{what()}: {first_line(error)}", groups)
            return False
        return True

    def _give_up(self, cell: int, why: str, groups: Mapping[int, dist.ProcessGroup]) -> None:
        """Record why a cell failed, and abort its process group and that of the machine with all messages in flight."""
        self.failed[cell] = why
        self.lost(cell, why)
        abort(groups[cell])
        if self.machine is not None:
            abort(self.machine.group)


def waited_for(works: Sequence[dist.Work]) -> Future[None]:
    """Wait for gloo's `works` in a daemon thread, because gloo may wait forever if another rank is gone."""
    part: Future[None] = Future()

    def wait() -> None:
        try:
            for work in works:
                work.wait()
            part.set_result(None)
        except BaseException as error:
            part.set_exception(error)

    threading.Thread(target=wait, name="round", daemon=True).start()
    return part


def ended(works: Sequence[dist.Work], part: Future[None] | None, poll_s: float) -> bool:
    """Wait for `poll_s` seconds at most, and return whether all `works` have ended.

    Args:
        part: with gloo, done when the thread that waits for `works` is.
    """
    if part is not None:
        with contextlib.suppress(TimeoutError):
            part.exception(poll_s)
        return part.done()
    if all(work.is_completed() for work in works):
        return True
    time.sleep(poll_s)
    return False


def check_device(works: Sequence[dist.Work]) -> None:
    """Raise the first error of nccl's `works`, because their wait() does not; make the current stream wait for them."""
    for work in works:
        error = work.exception()
        if error is not None:
            raise error
        work.wait()


def first_line(error: BaseException) -> str:
    """Return the first line of an error's message, because torch adds a stack trace; or its type, if it has no text."""
    return str(error).partition("\n")[0] or type(error).__name__


#: Held while this process leaves a group, since torch's records of groups are not safe from several threads.
leaving = threading.Lock()


def abort(group: dist.ProcessGroup) -> None:
    """Abort a process group whose other ranks may be gone; its messages in flight fail."""
    with leaving, contextlib.suppress(RuntimeError, ValueError):
        _abort_process_group(group)
