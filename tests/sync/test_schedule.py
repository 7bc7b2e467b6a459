"""The order of what ranks send each other in a weight update, replayed under nccl's rules (tests/sync/nccl_rules.py).

Recorded are the batches of sends and receives of every rank; the broadcasts of every sender are played.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

from megarl.models.weight_table import WeightTable
from megarl.rollout.sglang.api import ServerApi
from megarl.sync.plan import Bucket, holdings, make_plan
from megarl.sync.source import Source
from megarl.sync.transports import distributed
from megarl.sync.transports.distributed import DistributedTransport
from tests.sync.layouts import HERE, config, ranks_of, trainer
from tests.sync.nccl_rules import (
    COLLECTIVE_BLOCKS,
    Batch,
    Event,
    Host,
    Kernel,
    Machine,
    Message,
    Outcome,
    Rank,
    Wait,
    replay,
    run,
)
from tests.sync.receivers import server_receiver


def events_of(plan, held: dict, rank: int, world: int) -> list[Event]:
    """What one rank of an update sends and receives, batch by batch."""
    events: list[Event] = []

    def batch(operations):
        messages = [Message(operation is isend, peer, tensor.nbytes) for operation, tensor, peer, _ in operations]
        number = len(events)
        events.append(Batch("world", tuple(messages), number))
        return [SimpleNamespace(wait=lambda: events.append(Wait(number)))]

    def isend(*_, **__):
        raise AssertionError("a message outside of a batch: nccl makes a communicator for its pair of ranks")

    def irecv(*_, **__):
        isend()

    group = SimpleNamespace(rank=rank, ranks=tuple(range(world)), process_group=None)
    source = Source(held, plan, group, torch.bfloat16)
    routes = list(range(len(plan.routes)))
    rounds = max(len(sent) for route in plan.routes for sent in route.senders.values())
    with patch.multiple(dist, P2POp=lambda *parts: parts, batch_isend_irecv=batch, isend=isend, irecv=irecv):
        for number in range(rounds):
            bucket = source.buckets[number] if number < len(source.buckets) else None
            source.fill(number, routes, None if bucket is None else torch.empty(bucket.nbytes, dtype=torch.uint8))
    return events


def record(sizes: dict, model: str, servers: int = 1) -> dict[Rank, list[Event]]:
    """What every rank sends and receives."""
    ranks, table = trainer(**sizes), WeightTable.of(config(model))
    plan = make_plan(holdings(table, ranks), ranks_of(ranks), [HERE] * servers, bucket_bytes=20_000)
    shapes, recorded = table.shapes(), {}
    for rank in range(len(ranks)):
        held = {
            (name, region): torch.zeros(shapes[name])[tuple(slice(*span) for span in region)]
            for route in plan.routes
            for name, regions in route.givers.items()
            for region, giver in regions
            if giver == rank
        }
        recorded[rank] = events_of(plan, held, rank, len(ranks))
    return recorded


def replayed(events: dict[Rank, list[Event]]) -> Outcome:
    """Under nccl's rules; the communicator of all ranks was made when the run began."""
    return replay(events, {"world": list(events)}, made=["world"])


@pytest.mark.parametrize(
    ("sizes", "model", "servers"),
    [
        ({"tp": 2, "pp": 2, "dp": 2}, "llama", 3),
        ({"tp": 2, "pp": 2, "dp": 4, "ep": 4, "etp": 2}, "qwen3_moe", 1),
        pytest.param({"tp": 2, "pp": 4, "dp": 8, "ep": 4}, "deepseek_v3", 2, marks=pytest.mark.campaign("shards")),
    ],
)
def test_the_batches_of_all_ranks_end(sizes, model, servers):
    ranks = record(sizes, model, servers)
    assert sum(map(len, ranks.values())) > 20
    outcome = replayed(ranks)
    assert (outcome.stuck, outcome.unequal) == ({}, [])
    assert set(map(len, outcome.communicators.values())) <= {1}


def test_a_swapped_order_is_found():
    ranks = record({"tp": 2}, "llama")
    giver = next(rank for rank, events in ranks.items() if len(events) > 1)
    first, second, *rest = ranks[giver]
    extra = Message(sends=True, peer=1 - giver, nbytes=1)
    ranks[giver] = [second, replace(first, messages=(*first.messages, extra)), *rest]
    assert replayed(ranks).stuck


def broadcasts(receivers: int, at_once: int) -> Outcome:
    """Two senders broadcast to each receiver, which serves one after the other, in the worst order."""
    senders = 2
    pairs = [(f"sender {sender}", f"receiver {number}") for sender in range(senders) for number in range(receivers)]
    names = {f"{sender}, {receiver}": (sender, receiver) for sender, receiver in pairs}
    machine = Machine(names, made={*names}, connected={*names})  # in the second bucket
    room = {sender: at_once for sender, _ in pairs}
    arrived: dict[str, set[str]] = {receiver: set() for _, receiver in pairs}

    def broadcast(sender: str, receiver: str, *, sends: bool) -> Host:
        rank, peer = (sender, receiver) if sends else (receiver, sender)
        kernels: list[Kernel] = []
        message = Message(sends, peer, 8)
        yield from machine.issue(rank, Batch(f"{sender}, {receiver}", (message,), blocks=COLLECTIVE_BLOCKS), kernels)
        yield lambda: kernels[0].ended

    def deliver(sender: str, receiver: str) -> Host:
        yield lambda: room[sender] > 0
        room[sender] -= 1
        arrived[receiver].add(sender)
        yield from broadcast(sender, receiver, sends=True)
        room[sender] += 1

    def serve(receiver: str, first: Callable[[set[str]], str]) -> Host:
        for _ in range(senders):
            yield lambda: bool(arrived[receiver])
            sender = first(arrived[receiver])
            arrived[receiver].remove(sender)
            yield from broadcast(sender, receiver, sends=False)

    hosts: dict[Rank, Host] = {}
    for sender, receiver in pairs[:receivers] + pairs[: receivers - 1 : -1]:
        hosts[sender, receiver] = deliver(sender, receiver)
    for place, receiver in enumerate(arrived):  # each prefers the sender whose kernel for it comes late
        hosts[receiver] = serve(receiver, max if place < receivers // 2 else min)
    return run(machine, hosts)


def test_waiting_broadcasts_leave_room_for_those_that_receivers_serve():
    receivers = 4 * distributed._AT_ONCE
    assert broadcasts(receivers, distributed._AT_ONCE).stuck == {}
    assert broadcasts(receivers, receivers).stuck, "as many broadcasts as receivers"


def test_a_sender_has_no_more_broadcasts_under_way_than_fit_on_its_device():
    at_once, release, running, most = distributed._AT_ONCE, threading.Event(), [], []
    full = threading.Semaphore(0)
    sender = DistributedTransport(torch.device("cpu"), 20.0)

    def deliver(receiver, bucket, flat):
        running.append(receiver)
        most.append(len(running))
        full.release()
        assert release.wait(20)
        running.remove(receiver)

    sender._deliver = deliver
    receivers = [server_receiver(ServerApi(f"http://127.0.0.1:{n}", None, f"server {n}")) for n in range(3 * at_once)]
    arguments = [(receiver, 0, Bucket((), 0), torch.empty(0)) for receiver in receivers]
    threads = [threading.Thread(target=sender.deliver, args=each) for each in arguments]
    for thread in threads:
        thread.start()
    for _ in range(at_once):
        assert full.acquire(timeout=20)
    release.set()
    for thread in threads:
        thread.join(20)
    assert len(most) == len(receivers), "all are served"
    assert max(most) == at_once
    assert 24 * at_once <= 108
