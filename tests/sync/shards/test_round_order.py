"""What trainer and servers have nccl do in an update from shard to shard ends under its rules.

The rules are those of tests/sync/nccl_rules.py. What is replayed is recorded from the code that they run, then changed
in the ways in which it could go wrong.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megarl.sync.shards.exchange import RoundFailed, connect
from tests.sync.layouts import trainer
from tests.sync.nccl_rules import Batch, Event, Join, Message, Rank, Wait, overlaps, replay
from tests.sync.shards.recorded import Recorder, record, record_proxies
from tests.sync.shards.test_shard_plan import SMALL, colocated, plan_of
from tests.sync.shards.walk import job

SHARDS = pytest.mark.campaign("shards")
#: Model, layout of the trainer, layout of the servers. Servers of one machine that exchange stripes share a cell.
CASES = {
    16: ("qwen3_moe", {"pp": 2, "ep": 2, "dp": 4}, {"tp": 2, "servers": 4, "gpus": 4}),
    24: ("qwen3_moe", {"pp": 2, "ep": 4, "dp": 4}, {"tp": 4, "ep": 2, "servers": 4, "gpus": 8}),
    48: ("qwen3_moe", {"tp": 2, "pp": 2, "ep": 4, "dp": 4}, {"tp": 2, "servers": 16, "gpus": 8}),
    64: ("deepseek_v3", {"pp": 4, "ep": 4, "dp": 8}, {"tp": 4, "ep": 4, "attention_dp": 4, "servers": 8}),
}
Events = dict[Rank, list[Event]]


@cache
def recorded(ranks: int) -> tuple[Recorder, Events]:
    model, layout, servers = CASES[ranks]
    made = job(model, trainer(**layout), **servers)
    recorder = record(plan_of(made, SMALL), made.trainer)
    return recorder, recorder.resolved()


@pytest.mark.parametrize("ranks", [16, *(pytest.param(ranks, marks=SHARDS) for ranks in (24, 48, 64))])
def test_an_update_ends(ranks):
    recorder, events = recorded(ranks)
    outcome = replay(events, recorder.members)
    assert len(events) == ranks
    assert (outcome.stuck, outcome.unequal) == ({}, [])
    assert {rank: found for rank, part in events.items() if (found := overlaps(part))} == {}
    cells = sum("machine" not in comm for comm in recorder.members)
    assert 2 <= max(map(len, outcome.communicators.values())) <= max(cells, 2)


def test_an_update_of_servers_on_the_trainers_gpus_ends():
    made, plan = colocated()
    recorder = record_proxies(plan, made.trainer)
    events = recorder.resolved()
    outcome = replay(events, recorder.members)
    assert (outcome.stuck, outcome.unequal) == ({}, [])
    assert {rank: found for rank, part in events.items() if (found := overlaps(part))} == {}
    assert {rank: len(comms) for rank, comms in outcome.communicators.items()} == dict.fromkeys(events, 1)


def without_connecting(events: Events, rank: Rank) -> Events:
    """The first round of a rank makes the communicator, and connects this rank with those of its messages."""
    changed = without_links(events, rank)
    return {other: [event for event in part if not isinstance(event, Join)] for other, part in changed.items()}


def without_links(events: Events, rank: Rank) -> Events:
    """Pairs of ranks connect in their first round."""
    changed = {}
    for other, part in events.items():
        links = {following.number for event, following in itertools.pairwise(part) if isinstance(event, Join)}
        changed[other] = [event for event in part if getattr(event, "number", None) not in links]
    return changed


def swapped(events: Events, rank: Rank) -> Events:
    """One rank has two of its rounds with the same rank in the other order."""
    for sender, part in events.items():
        sent = [(place, event) for place, event in enumerate(part) if isinstance(event, Batch)]
        for (first, one), (second, other) in itertools.combinations(sent, 2):
            sizes = [{each.peer: each.nbytes for each in batch.messages} for batch in (one, other)]
            both = sizes[0].keys() & sizes[1].keys()
            if one.comm == other.comm and any(16 < sizes[0][peer] != sizes[1][peer] for peer in both):
                changed = list(part)
                changed[first], changed[second] = other, one
                return events | {sender: changed}
    raise AssertionError("no two rounds to swap")


def with_own_collective(events: Events, rank: Rank) -> Events:
    """Two trainer ranks have an operation of their own, one before the rounds and the other after them."""
    other = next(other for other in events if str(other).startswith("trainer") and other != rank)
    first, second = (
        Batch("trainer's own", (Message(True, peer, 8), Message(False, peer, 8)), -1) for peer in (other, rank)
    )
    start = next(place for place, event in enumerate(events[rank]) if isinstance(event, Join))
    part = events[rank]
    return events | {rank: [*part[:start], first, *part[start:]], other: [*events[other], second]}


@pytest.mark.parametrize(
    ("change", "ranks"),
    [(without_connecting, 16), (swapped, 16), (with_own_collective, 16), pytest.param(without_links, 24, marks=SHARDS)],
)
def test_what_does_not_end_is_found(change: Callable[[Events, Rank], Events], ranks: int):
    recorder, events = recorded(ranks)
    members = recorder.members | {"trainer's own": ["trainer 0", "trainer 1"]}
    outcome = replay(change(events, "trainer 0"), members)
    assert outcome.stuck or outcome.unequal


def test_a_buffer_that_is_used_too_early_is_found():
    _, events = recorded(16)
    for rank in ("trainer 0", "server 0.0"):
        part = events[rank]
        last = max(place for place, event in enumerate(part) if isinstance(event, Wait) and place < len(part) // 2)
        assert overlaps(part[:last] + part[last + 1 :])


def test_messages_outside_of_a_batch_make_a_communicator_for_each_pair():
    recorder, events = recorded(16)
    apart: Events = {}
    members = dict(recorder.members)
    for rank, part in events.items():
        apart[rank] = []
        for event in part:
            messages = event.messages if isinstance(event, Batch) else ()
            names = {message.peer: " ".join(sorted(map(str, (rank, message.peer)))) for message in messages}
            members |= {name: [rank, peer] for peer, name in names.items()}
            apart[rank] += [replace(event, comm=names[m.peer], messages=(m,)) for m in messages] or [event]
    limit = max(map(len, replay(events, recorder.members).communicators.values()))
    assert max(map(len, replay(apart, members).communicators.values())) > 2 * limit


def test_the_wait_for_a_rank_that_never_connects_has_a_deadline():
    others = threading.Event()
    backend = SimpleNamespace(eager_connect_single_device=lambda _: others.wait(20))
    group: Any = SimpleNamespace(_get_backend=lambda _: backend)
    with pytest.raises(RuntimeError, match=r"connecting the ranks of a group: not done within 0\.05 s"):
        connect(group, [], torch.device("cpu"), 0.05, lambda: None)
    with pytest.raises(RoundFailed, match="rank 1 is gone"):
        connect(group, [], torch.device("cpu"), 20.0, lambda: "rank 1 is gone")
    others.set()
