"""The order of what ranks send each other in a weight update, replayed under nccl's rules.

Recorded are the batches of sends and receives of every rank, and the broadcasts of every sender. Under nccl a rank runs
its batches one after the other, a batch ends when all its messages have their other side in a batch that runs, and a
message outside of a batch would make a communicator for its pair of ranks. A broadcast that waits for its receiver
keeps 24 multiprocessors of the sender's device.
"""

from __future__ import annotations

import threading
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
from tests.sync.receivers import server_receiver

Message = tuple[str, int, int]  # "isend" or "irecv", the other rank, bytes


def batches_of(plan, held: dict, rank: int, world: int) -> list[list[Message]]:
    """What one rank of an update sends and receives, batch by batch."""
    recorded: list[list[Message]] = []

    def batch(messages):
        recorded.append([(operation.__name__, peer, tensor.nbytes) for operation, tensor, peer, _ in messages])
        return []

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
    return recorded


def record(sizes: dict, model: str, servers: int = 1) -> list[list[list[Message]]]:
    """The batches of every rank."""
    ranks, table = trainer(**sizes), WeightTable.of(config(model))
    plan = make_plan(holdings(table, ranks), ranks_of(ranks), [HERE] * servers, bucket_bytes=20_000)
    shapes, recorded = table.shapes(), []
    for rank in range(len(ranks)):
        held = {
            (name, region): torch.zeros(shapes[name])[tuple(slice(*span) for span in region)]
            for route in plan.routes
            for name, regions in route.givers.items()
            for region, giver in regions
            if giver == rank
        }
        recorded.append(batches_of(plan, held, rank, len(ranks)))
    return recorded


def replay(ranks: list[list[list[Message]]]) -> list[int]:
    """Run all batches; the ranks that never end."""
    at, left = [0] * len(ranks), [list(batches[0]) if batches else [] for batches in ranks]
    moved = True
    while moved:
        moved = False
        for rank, messages in enumerate(left):
            for message in list(messages):
                kind, peer, size = message
                other = ("irecv" if kind == "isend" else "isend", rank, size)
                # messages of a pair of ranks meet in order
                first = next((m for m in messages if m[:2] == (kind, peer)), None)
                theirs = next((m for m in left[peer] if m[:2] == other[:2]), None)
                if first is message and theirs == other:
                    messages.remove(message)
                    left[peer].remove(other)
                    moved = True
        for rank, batches in enumerate(ranks):
            while not left[rank] and at[rank] < len(batches):
                at[rank] += 1
                left[rank] = list(batches[at[rank]]) if at[rank] < len(batches) else []
                moved = True
    return [rank for rank, batches in enumerate(ranks) if at[rank] < len(batches)]


@pytest.mark.parametrize(
    ("sizes", "model", "servers"),
    [({"tp": 2, "pp": 2, "dp": 2}, "llama", 3), ({"tp": 2, "pp": 2, "dp": 4, "ep": 4, "etp": 2}, "qwen3_moe", 1)],
)
def test_the_batches_of_all_ranks_end(sizes, model, servers):
    ranks = record(sizes, model, servers)
    assert sum(map(len, ranks)) > 20
    assert replay(ranks) == []


def test_a_swapped_order_is_found():
    ranks = record({"tp": 2}, "llama")
    giver = next(rank for rank, batches in enumerate(ranks) if len(batches) > 1)
    ranks[giver][0], ranks[giver][1] = ranks[giver][1], ranks[giver][0] + [("isend", 1 - giver, 1)]
    assert replay(ranks)


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
