"""What all ranks have NCCL do in an update from shard to shard, recorded from the code that trainer and servers run.

Each rank's part runs by itself, with process groups that only write down what they are given. So what a rank does must
not depend on when others answer; it does not, as long as none is gone.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist

from megarl.sync.sender import SyncReport
from megarl.sync.shards import exchange, transfer
from megarl.sync.shards.handover import PAGE_BYTES, HandoverPage
from megarl.sync.shards.plan import UpdatePlan
from megarl.sync.shards.proxies import ProxyBuffers, ProxyPart, ProxyRunner
from tests.sync.nccl_rules import Await, Batch, Copy, Event, Join, Message, Rank, Span, Tell, Wait
from tests.sync.test_loader import load_module

shards = load_module("megarl_shards")


def span(tensor: torch.Tensor) -> Span:
    return tensor.data_ptr(), tensor.data_ptr() + tensor.nbytes


def extent(view: torch.Tensor) -> Span:
    last = sum((size - 1) * step for size, step in zip(view.shape, view.stride(), strict=True))
    return view.data_ptr(), view.data_ptr() + (last + 1) * view.itemsize


@dataclass
class Recorder:
    """Events of every rank, and the members of every communicator in the order of their numbers in it."""

    events: dict[Rank, list[Event]] = field(default_factory=dict)
    members: dict[str, list[Rank]] = field(default_factory=dict)

    @contextlib.contextmanager
    def rank(self, rank: Rank) -> Iterator[list[Event]]:
        """What is done in this block is done by `rank`."""
        mine = self.events.setdefault(rank, [])
        parts = [
            patch.multiple(
                dist,
                P2POp=lambda *operation: operation,
                isend="send",
                irecv="receive",
                batch_isend_irecv=self._batch(mine, rank),
            ),
            patch.object(
                torch,
                "_foreach_copy_",
                lambda to, of: mine.append(Copy(tuple(map(extent, of)), tuple(map(extent, to)))),
            ),
        ]
        for module in (exchange, shards.exchange):
            parts.append(
                patch.multiple(
                    module, _new_process_group_helper=self._group(mine, rank), _world=SimpleNamespace(pg_group_ranks={})
                )
            )
        with contextlib.ExitStack() as stack:
            for part in parts:
                stack.enter_context(part)
            yield mine

    def _group(self, mine: list[Event], rank: Rank) -> Callable[..., tuple[Any, None]]:
        def make(size: int, number: int, *_: Any, group_name: str, **__: Any) -> tuple[Any, None]:
            self.members.setdefault(group_name, [None] * size)[number] = rank
            connects = SimpleNamespace(eager_connect_single_device=lambda _: mine.append(Join(group_name)))
            return _Group(group_name, connects), None

        return make

    def _batch(self, mine: list[Event], rank: Rank) -> Callable[..., list[Any]]:
        def batch(operations: Sequence[tuple[str, torch.Tensor, int, _Group]]) -> list[Any]:
            comm = operations[0][3].name
            messages = tuple(
                Message(kind == "send", (comm, peer), data.nbytes, span(data)) for kind, data, peer, _ in operations
            )
            number = sum(isinstance(event, Batch) for event in mine)
            mine.append(Batch(comm, messages, number))
            return [SimpleNamespace(wait=lambda: mine.append(Wait(number)))]

        return batch

    def resolved(self) -> dict[Rank, list[Event]]:
        """The events, with ranks in place of numbers in a communicator."""
        return {
            rank: [
                replace(
                    event, messages=tuple(replace(m, peer=self.members[m.peer[0]][m.peer[1]]) for m in event.messages)
                )
                if isinstance(event, Batch)
                else event
                for event in events
            ]
            for rank, events in self.events.items()
        }


@dataclass(eq=False)
class _Group:
    name: str
    backend: Any

    def _get_backend(self, _: torch.device) -> Any:
        return self.backend


def parameters_of(storage: Any) -> list[torch.Tensor]:
    columns = storage.parameters.shapes.tolist(), storage.parameters.dtypes.tolist()
    return [torch.zeros(shape, dtype=getattr(torch, dtype)) for shape, dtype in zip(*columns, strict=True)]


def ready_key(server: int, rank: int) -> str:
    return f"ready/{server}/{rank}"


def record(plan: UpdatePlan, trainer: Sequence[Any]) -> Recorder:
    """Record an update by `plan`; `trainer`: storages of the trainer's ranks."""
    ranks = [len(server.ranks) for server in plan.servers]
    cells, cell_of = transfer._cells(plan, ranks, "cells", [f"server {number}" for number in range(len(ranks))])
    recorder = Recorder()
    for number, storage in enumerate(trainer):
        with recorder.rank(f"trainer {number}") as events:
            _send(plan, cells, number, parameters_of(storage), events)
    for receiver in plan.receivers:
        who = receiver.server, receiver.rank
        with recorder.rank(f"server {who[0]}.{who[1]}") as events:
            _receive(plan, cells, cell_of[who[0]], who, events)
    return recorder


def record_proxies(plan: UpdatePlan, trainer: Sequence[Any]) -> Recorder:
    """Record an update of servers on the trainer's GPUs; `trainer`: storages of the trainer's ranks."""
    recorder = Recorder()
    for number, storage in enumerate(trainer):
        with recorder.rank(f"trainer {number}"):
            _pass_on(plan, number, parameters_of(storage))
    return recorder


def _pass_on(plan: UpdatePlan, rank: int, parameters: list[torch.Tensor]) -> None:
    numbers = {place: number for number, place in enumerate(plan.places)}
    served = {(each.server, each.rank): numbers[each.place] for each in plan.receivers}
    part = ProxyPart(plan, rank, served, parameters, ProxyBuffers(torch.device("cpu")), "plan")
    sending: Any = transfer.ShardTransfer.__new__(transfer.ShardTransfer)
    sending.world, sending.prefix, sending.timeout_s = SimpleNamespace(rank=rank, size=len(plan.places)), "run", 60.0
    sending._updates, sending._proxy_group, sending._backend, sending._device = 1, None, "nccl", torch.device("cpu")
    sending._store = SimpleNamespace(connection=dist.HashStore())
    sending._join_proxies(part)
    page = HandoverPage(torch.zeros(PAGE_BYTES, dtype=torch.uint8))
    page.copied = len(part.steps)  # the server rank is always done
    assert ProxyRunner(part, rank, sending._proxy_group, 60.0).run(page, lambda: None, lambda why: None) is None
    assert page.filled == sum(step.received is not None for step in part.steps)


def _send(plan: UpdatePlan, cells: dict, rank: int, parameters: list[torch.Tensor], events: list[Event]) -> None:
    program = plan.program(sender=rank)
    rounds = exchange.rounds_of_sender(program.arrays(), parameters, plan.tensors.dtypes.tolist())

    def wait_ready(cell: int, *_: Any) -> None:
        servers = cells[cell].servers.items()
        events.append(Await(tuple(ready_key(server, number) for server, ranks in servers for number in range(ranks))))

    sending: Any = transfer.ShardTransfer.__new__(transfer.ShardTransfer)
    sending.world, sending.timeout_s, sending._groups = SimpleNamespace(rank=rank), 60.0, {}
    sending._backend, sending._device = "nccl", torch.device("cpu")
    sending._store = SimpleNamespace(connection=dist.HashStore())
    watch = SimpleNamespace(wait_ready=wait_ready, look=lambda _: None, give_up=None)
    lost = sending._rounds(SimpleNamespace(rounds=rounds, cells=cells), watch, SyncReport(1, "shards"))
    assert not lost, lost


class _Store:
    """The trainer's store, as a server's rank uses it."""

    def __init__(self, program: bytes, events: list[Event]) -> None:
        self._program, self._events = program, events

    def clone(self) -> _Store:
        return self

    def get(self, key: str) -> bytes:
        return b"1" if key.endswith("/update") else self._program

    def check(self, _: list[str]) -> bool:
        return False

    def compare_set(self, _: str, __: str, why: str) -> None:
        raise AssertionError(why)

    def set(self, key: str, _: str) -> None:
        if "/ready/" in key:
            self._events.append(Tell(key[key.index("ready/") :]))


def _receive(plan: UpdatePlan, cells: dict, cell: int, who: tuple[int, int], events: list[Event]) -> None:
    storage = plan.servers[who[0]].ranks[who[1]]
    names, dtypes, parameters = storage.parameters.names.tolist(), plan.tensors.dtypes.tolist(), parameters_of(storage)
    model = torch.nn.Module()
    header = {"prefix": "run", "version": 1, "server": who[0], "rank": who[1], "program": "plan", "cell": cell}
    header |= {"group": cells[cell].to_json(), "backend": "nccl", "hashed": False, "proxied": False, "timeout_s": 60.0}
    store = _Store(plan.program(receiver=who).encode(), events)
    with (
        patch.multiple(
            shards,
            _DESCRIBED={
                model: SimpleNamespace(
                    names=names, parameters=parameters, dtypes=dtypes, zeros=[], check=lambda _: None
                )
            },
            _GROUPS={},
            _ROUNDS={},
            _store=lambda _: store,
            _beating=lambda *_: contextlib.nullcontext(),
            derive=lambda _: None,
        ),
        patch.object(shards.exchange, "PrefixStore", lambda *_: None),
    ):
        shards.receive(model, [(json.dumps(header), torch.empty(0, dtype=torch.uint8))])
