"""Sends and receives weights in rounds of messages between trainer ranks and server ranks; both run this file.

              round 0               round 1               round 2
    sender    pack A | send A, pack B | send B, pack A | ...
    receiver           receive A      | receive B, unpack A | ...          A, B: the two buffers of a rank

Servers' processes, which lack megarl, load this file too, so it imports nothing of megarl. It reads the tables of
program.py as arrays by their names on the wire (`links.offset`).

All ranks run their rounds in one order, each one round at a time. So all ranks of the first unfinished round have
started it, and it ends. If it cannot end because a rank is gone, the process group of its cell (trainer ranks, and the
servers that they send to) is aborted; other cells continue.
"""

from __future__ import annotations

import contextlib
import datetime
import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

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

_POLL_S = 0.05  # seconds between two checks of a round in flight on a CPU
_POLL_DEVICE_S = 0.0001
_WATCHDOG = "TORCH_NCCL_ASYNC_ERROR_HANDLING"
_environment = threading.Lock()

Tables = Mapping[str, Any]  # NumPy arrays by name, such as `links.offset`


class RoundFailed(Exception):
    """A cell (the ranks of one process group) cannot continue its rounds; the message names the round and the rank."""


@dataclass(frozen=True)
class ServerCell:
    """A cell: one process group of trainer ranks in ascending order, followed by all ranks of some servers in order.

    Attributes:
        name: unique name of the process group.
        trainers: ranks of the trainer.
        servers: number of ranks of each server, by the server's number.
    """

    name: str
    trainers: tuple[int, ...]
    servers: dict[int, int]

    @property
    def size(self) -> int:
        """Number of ranks of the group."""
        return len(self.trainers) + sum(self.servers.values())

    def of_trainer(self, rank: int) -> int:
        """Return the group's rank of trainer rank `rank`."""
        return self.trainers.index(rank)

    def of_server(self, server: int, rank: int) -> int:
        """Return the group's rank of rank `rank` of server `server`."""
        before = sum(ranks for number, ranks in self.servers.items() if number < server)
        return len(self.trainers) + before + rank

    def to_json(self) -> dict[str, Any]:
        """Return the cell as a JSON object."""
        servers = [[number, ranks] for number, ranks in self.servers.items()]
        return {"name": self.name, "trainers": list(self.trainers), "servers": servers}

    @classmethod
    def of_json(cls, values: Mapping[str, Any]) -> ServerCell:
        """Return the cell from the result of `to_json`."""
        servers = {int(number): int(ranks) for number, ranks in values["servers"]}
        return cls(str(values["name"]), tuple(values["trainers"]), dict(sorted(servers.items())))


def join(store: dist.Store, cell: ServerCell, rank: int, backend: str, timeout_s: float) -> dist.ProcessGroup:
    """Create the process group of a cell (trainer ranks, and the servers that they send to) and join it as `rank`.

    With gloo this call waits until all ranks have joined; with nccl the first messages wait.
    """
    limit = datetime.timedelta(seconds=timeout_s)
    named: dict[str, Any] = {"group_name": cell.name, "timeout": limit}  # newer torch has its own type for names
    with without_watchdog() if backend == "nccl" else contextlib.nullcontext():
        group, _ = _new_process_group_helper(
            cell.size, rank, [], Backend(backend), PrefixStore(cell.name, store), **named
        )
    _world.pg_group_ranks[group] = {member: member for member in range(cell.size)}
    return group


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


@dataclass
class Round:
    """One round of one rank: its messages, and what is copied between parameters and buffer.

    Attributes:
        cell: number of the process group.
        name: phase and number of the round, for errors.
        buffer: which of the rank's two buffers the round uses: 0 or 1.
        parameters, parts: equally shaped views of parameters and of the buffer, which are copied one to the other.
    """

    cell: int
    name: str
    buffer: int
    messages: list[RoundMessage] = field(default_factory=list)
    parameters: list[Tensor] = field(default_factory=list)
    parts: list[Tensor] = field(default_factory=list)

    def described(self, *, sends: bool) -> str:
        """Return the round's name and the ranks that it sends to or receives from, for errors."""
        if sends:
            others = ", ".join(f"rank {rank} of server {server}" for server, rank in {m.peer: 0 for m in self.messages})
            return f"{self.name} to {others}"
        return f"{self.name} from trainer ranks {sorted({message.peer[1] for message in self.messages})}"

    @property
    def nbytes(self) -> int:
        """Bytes of all messages."""
        return sum(message.data.nbytes for message in self.messages)


def rounds_of_sender(tables: Tables, parameters: Sequence[Tensor], dtypes: Sequence[str]) -> list[Round]:
    """Return the rounds of a trainer rank.

    Args:
        tables: arrays of the `TransferProgram` of this rank, by name.
        parameters: parameters in the order of the rank's `ParameterTable`.
        dtypes: dtype on the wire of each tensor in `TensorTable`.
    """
    return _rounds(tables, parameters, dtypes, sends=True)


def rounds_of_receiver(tables: Tables, parameters: Sequence[Tensor], dtypes: Sequence[str]) -> list[Round]:
    """Return the rounds of a rank of a server; the arguments are those of `rounds_of_sender`."""
    return _rounds(tables, parameters, dtypes, sends=False)


def _rounds(tables: Tables, parameters: Sequence[Tensor], dtypes: Sequence[str], *, sends: bool) -> list[Round]:
    at = tables["messages.send_at" if sends else "messages.receive_at"].tolist()
    sizes, number = tables["messages.nbytes"].tolist(), tables["messages.round"].tolist()
    ends = [[0], [0]]  # ends of the messages in the buffer of even rounds, and in that of odd rounds
    for place, nbytes, turn in zip(at, sizes, number, strict=True):
        ends[turn % 2].append(place + nbytes if place >= 0 else 0)
    buffers = [torch.empty(max(part), dtype=torch.uint8, device=parameters[0].device) for part in ends]
    rounds = [
        Round(cell, f"round {part} of phase {phase}", place % 2)
        for place, (phase, part, cell) in enumerate(
            zip(*(tables[f"rounds.{key}"].tolist() for key in ("phase", "number", "cell")), strict=True)
        )
    ]
    copies = _copies(tables, parameters, sends=sends)
    peers = zip(
        *(tables[f"messages.{key}"].tolist() for key in (("server", "receiver") if sends else ("sender", "sender"))),
        strict=True,
    )
    data = []
    for place, nbytes, turn, peer in zip(at, sizes, number, peers, strict=True):
        part = buffers[turn % 2][place : place + nbytes] if place >= 0 else None
        message = RoundMessage(peer if sends else (-1, peer[0]), part if part is not None else torch.empty(0))
        rounds[turn].messages.append(message)
        data.append(message)
    links = zip(*(tables[f"links.{key}"].tolist() for key in ("message", "start", "nbytes", "tensor")), strict=True)
    for link, (message, start, nbytes, tensor) in enumerate(links):
        for view in copies.get(link, ()):
            if at[message] < 0:  # without a buffer, from parameter to parameter
                flat = view.as_strided((view.numel(),), (1,), view.storage_offset())
                data[message].data = flat.view(torch.uint8)
                continue
            part = data[message].data[start : start + nbytes].view(getattr(torch, dtypes[tensor])).view(view.shape)
            rounds[number[message]].parameters.append(view)
            rounds[number[message]].parts.append(part)
    return rounds


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
    """

    def __init__(
        self,
        rounds: Sequence[Round],
        *,
        sends: bool,
        look: Callable[[int], str | None],
        lost: Callable[[int, str], None],
        deadline_s: float,
    ) -> None:
        self.rounds, self.sends, self.look, self.lost, self.deadline_s = rounds, sends, look, lost, deadline_s
        self.failed: dict[int, str] = {}
        self.nbytes = 0  # sent or received in rounds that have ended

    @torch.no_grad()
    def run(
        self, groups: Mapping[int, dist.ProcessGroup], cells: Mapping[int, ServerCell], failed: Mapping[int, str]
    ) -> dict[int, str]:
        """Run the rounds of all cells, and return the reason for each cell that was given up, by its number.

        Args:
            groups, cells: process group of each cell, and its ranks.
            failed: cells that have failed before the first round, with the reasons.
        """
        self.failed, self.nbytes = dict(failed), 0
        before: tuple[Round, list[dist.Work]] | None = None
        for now in self.rounds:
            if now.cell not in self.failed and (why := self.look(now.cell)) is not None:
                self._give_up(now.cell, why, groups)
            if now.cell in self.failed:
                continue
            if before is not None and before[0].buffer == now.buffer:  # a round between the two was skipped
                self._end(before, groups)
                before = None
            if self.sends and now.parts:
                torch._foreach_copy_(now.parts, now.parameters)
            if before is not None:
                self._wait(before, groups)
            works = self._start(now, groups, cells)
            if before is not None:
                self._unpack(before[0])
            before = (now, works)
        if before is not None:
            self._end(before, groups)
        return self.failed

    def _start(
        self, now: Round, groups: Mapping[int, dist.ProcessGroup], cells: Mapping[int, ServerCell]
    ) -> list[dist.Work]:
        """Start the messages of a round as one batch, and return their handles; none if this fails."""
        if now.cell in self.failed:
            return []
        cell, group = cells[now.cell], groups[now.cell]
        operation = dist.isend if self.sends else dist.irecv
        operations = [
            dist.P2POp(
                operation, each.data, cell.of_server(*each.peer) if self.sends else cell.of_trainer(each.peer[1]), group
            )
            for each in now.messages
        ]
        try:
            return dist.batch_isend_irecv(operations)
        except RuntimeError as error:
            self._give_up(now.cell, f"{now.described(sends=self.sends)}: {_first_line(error)}", groups)
            return []

    def _end(
        self,
        flight: tuple[Round, list[dist.Work]],
        groups: Mapping[int, dist.ProcessGroup],
    ) -> None:
        self._wait(flight, groups)
        self._unpack(flight[0])

    def _unpack(self, done: Round) -> None:
        if not self.sends and done.parts and done.cell not in self.failed:
            torch._foreach_copy_(done.parameters, done.parts)

    def _wait(
        self,
        flight: tuple[Round, list[dist.Work]],
        groups: Mapping[int, dist.ProcessGroup],
    ) -> None:
        """Wait until the messages of a round have arrived; give up the round's cell if that fails."""
        now, works = flight
        if not works or now.cell in self.failed:
            return
        on_device = now.messages[0].data.is_cuda
        end = time.monotonic() + self.deadline_s
        part: Future[None] | None = None if on_device else _waited_for(works)
        while not _ended(works, part, _POLL_DEVICE_S if on_device else _POLL_S):
            why = self.look(now.cell)
            if why is None and time.monotonic() > end:
                why = f"not done within {self.deadline_s:g} s"
            if why is not None:
                self._give_up(now.cell, f"{now.described(sends=self.sends)}: {why}", groups)
                return
        try:
            if part is not None:
                part.result()
            else:
                _check_device(works)
        except RuntimeError as error:
            self._give_up(now.cell, f"{now.described(sends=self.sends)}: {_first_line(error)}", groups)
        else:
            self.nbytes += now.nbytes

    def _give_up(self, cell: int, why: str, groups: Mapping[int, dist.ProcessGroup]) -> None:
        """Record why a cell failed, and abort its process group with all messages in flight."""
        self.failed[cell] = why
        self.lost(cell, why)
        abort(groups[cell])


def _waited_for(works: Sequence[dist.Work]) -> Future[None]:
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


def _ended(works: Sequence[dist.Work], part: Future[None] | None, poll_s: float) -> bool:
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


def _check_device(works: Sequence[dist.Work]) -> None:
    """Raise the first error of nccl's `works`, because their wait() does not; make the current stream wait for them."""
    for work in works:
        error = work.exception()
        if error is not None:
            raise error
        work.wait()


def _first_line(error: BaseException) -> str:
    return str(error).partition("\n")[0]


_leaving = threading.Lock()


def abort(group: dist.ProcessGroup) -> None:
    """Abort a process group whose other ranks may be gone; its messages in flight fail."""
    with _leaving, contextlib.suppress(RuntimeError, ValueError):
        _abort_process_group(group)
