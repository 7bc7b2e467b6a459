"""Ranks that work on their own meet when one calls, or when all parties are idle."""

from __future__ import annotations

import threading
import time
from types import SimpleNamespace
from typing import Any

import pytest
import torch.distributed as dist

from megarl.system import tracing
from megarl.system.comm import WorkerGroup, team_world
from megarl.system.errors import WorkerError
from megarl.system.meetings import Meetings
from megarl.system.store import SharedStore


def test_a_rank_alone_meets_as_soon_as_it_is_idle_or_calls():
    meetings = Meetings(WorkerGroup.alone())
    assert not meetings.is_called()
    assert meetings.await_call()
    meetings.begin()
    assert not meetings.is_called()
    meetings.call()
    assert meetings.is_called()


def alike(store: SharedStore, rank: int) -> Meetings:
    """One party's view of the same meetings of two, each of one rank."""
    world: Any = SimpleNamespace(
        size=2, rank=rank, ranks=(0, 1), name="the world", deadline_s=60.0, store=lambda: store
    )
    meetings = Meetings(world, rank, 2)
    meetings._prefix = "meetings/same"
    return meetings


def test_meetings_leave_no_keys_and_a_closed_one_no_thread():
    keys, callbacks, threads = dist.HashStore(), len(tracing._on_change), threading.active_count()
    store = SharedStore(keys, "rank 0 of the world", "60 s")
    parties, counts = [alike(store, rank) for rank in (0, 1)], []
    for _ in range(5):
        assert [party.await_call() for party in parties] == [False, True]
        assert parties[0].is_called() or parties[0].await_call()
        for party in parties:
            party.begin()
        counts.append(keys.num_keys())
    assert len(set(counts[1:])) == 1, counts
    for party in parties:
        party.close()
    assert len(tracing._on_change) == callbacks
    _until(lambda: threading.active_count() == threads)


def _until(condition: Any) -> None:
    end = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < end


def _meet() -> dict[str, Any]:
    """Rank 2 belongs to the party of rank 1. First rank 2 calls, then both parties are idle, then rank 1 is stuck."""
    world = team_world(60)
    meetings = Meetings(world, (0, 1, None)[world.rank], 2)
    quiet = meetings.is_called()
    world.barrier()
    if world.rank == 2:
        meetings.call()
    else:
        _until(meetings.await_call if world.rank == 0 else meetings.is_called)
    met = [world.all_gather_json(world.rank)]
    meetings.begin()
    after = meetings.is_called()
    world.barrier()
    if world.rank < 2:
        _until(meetings.await_call)
    met.append(world.all_gather_json(world.rank))
    meetings.begin()
    return {"met": met, "quiet": [quiet, after], "stuck": _stuck(world, meetings)}


def _stuck(world: WorkerGroup, meetings: Meetings) -> str:
    """What rank 0 raises, which is idle while rank 1 makes no progress in its phase."""
    meetings._watch.every_s = 0.05
    with tracing.phase("probe"):
        world.barrier()
        text = ""
        if world.rank == 0:
            world.deadline_s = 0.2
            with pytest.raises(WorkerError) as found:
                _until(meetings.await_call)
            text = str(found.value)
        world.barrier()
    return text


@pytest.mark.procs
def test_parties_meet_on_a_call_or_when_idle_and_a_stuck_one_is_named():
    from tests.dist import run_distributed

    results = run_distributed(_meet, 3, 120)
    for result in results:
        assert result["met"] == [[0, 1, 2]] * 2
        assert result["quiet"] == [False, False]
    assert results[0]["stuck"].startswith(
        "rank 0 of the world timed out waiting in phase probe: no progress for 0.2 s (cluster.timeout_s) of rank 1 in "
    )
