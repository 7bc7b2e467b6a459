"""The trainer's side of updates of servers on its own GPUs: a trainer rank is the proxy of the server rank on its GPU.

    trainer ranks   send and receive in rounds, in a process group without servers
    proxy           receives into two buffers, which the server rank on its GPU maps too (handover.py)
    server rank     copies from these buffers to its parameters

So a process of a server uses one GPU only. A server rank that does not copy delays the update once, until its proxy
gives it up.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from megarl.sync.shards.exchange import (
    POLL_DEVICE_S,
    POLL_S,
    Link,
    Round,
    Tables,
    abort,
    buffer_sizes,
    check_device,
    ended,
    first_line,
    rounds_of_proxy,
    rounds_of_sender,
    waited_for,
)
from megarl.sync.shards.handover import HandoverPage, wait_for
from megarl.sync.shards.plan import UpdatePlan
from megarl.sync.shards.program import TransferProgram
from megarl.sync.shards.table import INSTEAD
from megarl.sync.shared import Handle, handle_of, shared_buffer
from megarl.system.errors import ConfigError, WorkerError
from megarl.system.tracing import keep_beating

_COPY_S = 30.0  # most seconds in which a server rank has to copy a round
# A server that does not copy may take at most this share of a step's deadline, because the other servers wait for it.
_COPY_SHARE = 0.25
# A message may have to wait until its proxy has given up a server rank, once before the rounds and once in them.
_MESSAGE_DEADLINES = 3
ServerRank = tuple[int, int]  # number of the server in the plan, and the rank
Device = tuple[str, str]  # names of machine and GPU; on a CPU the name of the GPU is empty


def proxies_of(trainer: Sequence[Device], servers: Mapping[str, Sequence[Device]]) -> dict[ServerRank, int]:
    """Return the proxy of each server rank: the trainer rank on its GPU; on a CPU the next trainer rank on its machine
    that is no proxy yet.

    Args:
        trainer: machine and GPU of each trainer rank.
        servers: machine and GPU of each rank of each server, by the server's name, in the order of the plan.

    Raises:
        ConfigError: a server rank is on a GPU where no trainer rank runs, or with another server rank.
    """
    free: dict[Device, list[int]] = {}
    for number, device in enumerate(trainer):
        free.setdefault(device, []).append(number)
    proxies = {}
    for place, (name, devices) in enumerate(servers.items()):
        for rank, device in enumerate(devices):
            if not free.get(device):
                machine, gpu = device
                raise ConfigError(
                    f"rank {rank} of {name} would get its weights from the trainer rank on its GPU, but on "
                    f"{f'GPU {gpu} of ' if gpu else ''}machine {machine} there is no trainer rank, or it already has a "
                    "server rank",
                    where="sync.transport",
                    found="shards",
                    allowed="shards with at most one rank of colocated servers on each trainer rank's GPU",
                    fix=f"lower rollout.sglang.servers or tp_size; or {INSTEAD}",
                )
            proxies[place, rank] = free[device].pop(0)
    return proxies


@dataclass(frozen=True)
class ProxyStep:
    """One round of a trainer rank: what it sends, and what it receives for the server rank on its GPU."""

    name: str
    sent: Round | None
    received: Round | None


class ProxyBuffers:
    """The two buffers of a proxy, which a server rank on the same GPU maps. They are equally large, and made again only
    if they have to be larger, because a server process that was killed never releases memory that it has mapped."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._buffers: tuple[Tensor, ...] = ()

    def of_sizes(self, sizes: tuple[int, int]) -> tuple[Tensor, ...]:
        """Return two buffers of at least these bytes: uint8."""
        needed = max(*sizes, 1)  # memory without bytes cannot be shared
        if not self._buffers or needed > self._buffers[0].numel():
            self._buffers = ()  # frees the old ones first
            self._buffers = tuple(shared_buffer(needed, self._device) for _ in sizes)
        return self._buffers


class ProxyPart:
    """One trainer rank's part of a plan in which server ranks get their weights from trainer ranks on their GPUs.

    Args:
        rank: the trainer rank.
        proxies: the trainer rank on each server rank's GPU.
        parameters: parameters of this trainer rank, in the order of its storage.
        buffers: gives this rank's buffers for a server rank.
        name: differs between all parts of a run.

    Attributes:
        program: the transfers in which this rank sends.
        served: the server rank on this rank's GPU, or None.
        buffers: the two buffers for this server rank, uint8; none if there is no server rank.
        handles: a handle of each, which the server rank opens once.
        steps: this rank's rounds, in the order in which they run.
        alone: whether no rank sends a message, so that no process group is needed.
        on_device: whether parameters and buffers are in a GPU's memory.
    """

    def __init__(
        self,
        update: UpdatePlan,
        rank: int,
        proxies: Mapping[ServerRank, int],
        parameters: Sequence[Tensor],
        buffers: ProxyBuffers,
        name: str,
    ) -> None:
        self.proxies, self.name = proxies, name
        self.alone = bool((update.messages.send_at < 0).all())
        self.on_device = parameters[0].is_cuda
        self.program = update.program(sender=rank)
        self.served = next((served for served, proxy in proxies.items() if proxy == rank), None)
        self.buffers: tuple[Tensor, ...] = ()
        received: dict[tuple[int, ...], Round] = {}
        local: dict[int, Tensor] = {}
        if self.served is not None:
            tables = update.program(receiver=self.served).arrays()
            self.buffers = buffers.of_sizes(buffer_sizes(tables, receives=True))
            rounds = rounds_of_proxy(tables, self.buffers, self.served)
            received = dict(zip(_keys(tables), rounds, strict=True))
            for each in rounds:  # what this rank holds itself, it packs into the buffer
                each.messages = [message for message in each.messages if message.peer[1] != rank]
            local = _local_messages(self.program, received, self.buffers)
        self.handles: list[Handle] = [handle_of(part) for part in self.buffers]
        tables = self.program.arrays()
        sends = rounds_of_sender(tables, parameters, update.tensors.dtypes.tolist(), local)
        sent = dict(zip(_keys(tables), sends, strict=True))
        self.steps = [
            ProxyStep((sent.get(key) or received[key]).name, sent.get(key), received.get(key))
            for key in sorted(sent.keys() | received.keys())
        ]

    def links(self) -> list[Link]:
        """Return, for each other rank with which this rank exchanges messages or stripes (shares of what several server
        ranks need), a send or a receive, and the other's rank."""
        out = {self.proxies[each.peer] for step in self.steps if step.sent for each in step.sent.messages}
        into = {each.peer[1] for step in self.steps if step.received for each in step.received.messages}
        both = {self.proxies[each.peer] for step in self.steps if step.received for each in step.received.stripes}
        sends, receives = sorted(out | both), sorted(into | both)
        return [*((dist.isend, peer) for peer in sends), *((dist.irecv, peer) for peer in receives)]


def _keys(tables: Tables) -> list[tuple[int, ...]]:
    """Return phase, number and cell of each round: the order in which all ranks run the rounds."""
    columns = (tables[f"rounds.{name}"].tolist() for name in ("phase", "number", "cell"))
    return list(zip(*columns, strict=True))


def _local_messages(
    program: TransferProgram, received: Mapping[tuple[int, ...], Round], buffers: Sequence[Tensor]
) -> dict[int, Tensor]:
    """Return, by row, the messages that a trainer rank packs into its own buffers, and the part of the buffer of each.

    Args:
        program: the transfers in which the rank sends.
        received: the rounds in which it receives, by phase, number and cell.
    """
    messages, keys = program.messages, _keys(program.arrays())
    local = {}
    for row in np.flatnonzero(messages.send_at < 0).tolist():
        buffer = buffers[received[keys[messages.round[row]]].buffer]
        local[row] = buffer[messages.receive_at[row] :][: messages.nbytes[row]]
    return local


@dataclass
class _Flight:
    step: ProxyStep
    works: list[dist.Work]
    packed: torch.cuda.Event | None  # on a GPU: everything before it is packed


class ProxyRunner:
    """Runs the rounds of one trainer rank in which it sends what it holds, and receives what the server rank on its GPU
    stores.

    All trainer ranks run their rounds in one order, and in each round the messages before the stripes (shares of what
    several server ranks of a machine need), which their proxies exchange. So all ranks of the first unfinished step
    have started it, and it ends. A proxy whose server rank is gone goes on, without waiting for it.

    Args:
        part: this rank's part of the plan.
        rank: this trainer rank.
        group: process group of all trainer ranks; None if `part.alone`.
        deadline_s: deadline in seconds of a step of the update. A server rank has `_COPY_SHARE` of it to copy a round,
            at most `_COPY_S`; messages between trainer ranks, which may wait for that, have `_MESSAGE_DEADLINES` times
            as long.

    Attributes:
        nbytes: bytes that this rank has sent, or packed for the server rank on its GPU.
    """

    def __init__(self, part: ProxyPart, rank: int, group: dist.ProcessGroup | None, deadline_s: float) -> None:
        self.part, self.rank, self.group = part, rank, group
        self._copy_s = min(_COPY_S, _COPY_SHARE * deadline_s)
        self._message_s = _MESSAGE_DEADLINES * deadline_s
        self.nbytes = 0

    @torch.no_grad()
    def run(self, page: HandoverPage | None, look: Callable[[], str | None], lost: Callable[[str], None]) -> str | None:
        """Run all rounds; return why the server rank on this rank's GPU was given up, or None.

        Args:
            page: counts of rounds for this server rank; None: there is none, or it was given up before.
            look: called while this rank waits for the server rank; returns why it has to be given up, or None.
            lost: called with the reason when this rank gives up the server rank.

        Raises:
            WorkerError: messages between trainer ranks failed.
        """
        why: str | None = None
        flights: deque[_Flight] = deque()
        begun = 0  # rounds that this rank has begun to receive
        rank = self.part.served[1] if self.part.served else None
        with keep_beating(self._message_s):
            for step in self.part.steps:
                while len(flights) > 1:  # the one round that stays in flight uses the other buffer
                    self._end(flights.popleft(), page)
                if step.received is not None:
                    begun += 1
                    if page is not None and why is None:
                        # The buffer of this round is that of the round before the last one.
                        why = wait_for(partial(getattr, page, "copied"), begun - 2, look, self._copy_s)
                        if why is not None:
                            why = f"{step.name}: its rank {rank} has copied {page.copied} rounds: {why}"
                            lost(why)
                flights.append(self._start(step))
                # A round without messages is already there, so the server rank copies it while the next one is packed.
                while flights and not flights[0].works:
                    self._end(flights.popleft(), page)
            while flights:
                self._end(flights.popleft(), page)
        self.nbytes = int(self.part.program.messages.nbytes.sum())
        return why

    def _start(self, step: ProxyStep) -> _Flight:
        """Pack what this rank sends in a round, and start the round's messages; if there are stripes (shares of what
        several server ranks need), wait for them, and start the exchange of stripes."""
        packed = None
        operations: list[dist.P2POp] = []
        if step.sent is not None:
            if step.sent.parts:
                torch._foreach_copy_(step.sent.parts, step.sent.parameters)
                if step.sent.parts[0].is_cuda:
                    packed = torch.cuda.Event()
                    packed.record()
            for each in step.sent.messages:
                operations.append(dist.P2POp(dist.isend, each.data, self.part.proxies[each.peer], self.group))
        if step.received is None:
            return _Flight(step, self._begin(step, operations), packed)
        operations += [dist.P2POp(dist.irecv, each.data, each.peer[1], self.group) for each in step.received.messages]
        works = self._begin(step, operations)
        if step.received.stripe is not None:
            # The exchange sends what the messages have brought.
            self._arrived(_Flight(step, works, packed))
            operations = []
            for each in step.received.stripes:
                other = self.part.proxies[each.peer]
                operations.append(dist.P2POp(dist.isend, step.received.stripe, other, self.group))
                operations.append(dist.P2POp(dist.irecv, each.data, other, self.group))
            works = self._begin(step, operations)
        return _Flight(step, works, packed)

    def _begin(self, step: ProxyStep, operations: list[dist.P2POp]) -> list[dist.Work]:
        try:
            return dist.batch_isend_irecv(operations) if operations else []
        except RuntimeError as error:
            raise self._failed(step, first_line(error)) from error

    def _end(self, flight: _Flight, page: HandoverPage | None) -> None:
        """Wait until a round's bytes are in the buffers, and count it for the server rank."""
        self._arrived(flight)
        if flight.step.received is not None and page is not None:
            page.filled += 1

    def _arrived(self, flight: _Flight) -> None:
        """Wait until a round's messages have arrived and the device has packed what this rank holds itself."""
        end = time.monotonic() + self._message_s
        works, packed, on_device = flight.works, flight.packed, self.part.on_device
        part: Future[None] | None = waited_for(works) if works and not on_device else None
        while works and not ended(works, part, POLL_DEVICE_S if on_device else POLL_S):
            if time.monotonic() > end:
                raise self._failed(flight.step, f"not done within {self._message_s:g} s")
        try:
            if part is not None:
                part.result()
            else:
                check_device(works)
            if packed is not None:
                packed.synchronize()
        except RuntimeError as error:
            raise self._failed(flight.step, first_line(error)) from error

    def _failed(self, step: ProxyStep, why: str) -> WorkerError:
        """Abort the process group, whose messages in flight use the buffers; return the error to raise."""
        if self.group is not None:
            abort(self.group)
        sends = step.sent.messages if step.sent else []
        receives = step.received.messages + step.received.stripes if step.received else []
        others = {self.part.proxies[each.peer] for each in sends}
        others |= {each.peer[1] if each.peer[0] < 0 else self.part.proxies[each.peer] for each in receives}
        where = f"trainer rank {self.rank}, update from shard to shard, {step.name}"
        return WorkerError(f"{where} with trainer ranks {sorted(others)}: {why}")
