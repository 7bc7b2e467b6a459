"""The first worker of a team reports the progress of all to the buffer."""

from __future__ import annotations

import threading
from collections import deque
from types import SimpleNamespace
from typing import Any

import pytest
import torch.distributed as dist

from megarl.disaggregated.buffer.client import BufferClient
from megarl.disaggregated.buffer.progress import Ping
from megarl.disaggregated.buffer.team_progress import TeamProgress
from megarl.system.store import SharedStore


def shared() -> SharedStore:
    return SharedStore(dist.HashStore(), "rank 0 of the world", "60 s, cluster.timeout_s")


def test_only_what_is_new_is_reported_and_nobody_is_waited_for():
    store = shared()
    first, second, _ = (TeamProgress(store, rank, 3) for rank in range(3))
    pings = [Ping(changes, "step", 1, "") for changes in range(3)]
    first.write(pings[0])
    assert first.news() == {0: pings[0]}
    second.write(pings[1])
    assert first.news() == {1: pings[1]}
    second.write(pings[2])
    first.write(pings[0])
    assert first.news() == {1: pings[2]}
    assert first.news() == {}


def test_the_buffer_gets_one_call_per_team(monkeypatch: pytest.MonkeyPatch):
    calls: list[tuple[Any, ...]] = []
    monkeypatch.setattr(BufferClient, "_call", lambda client, awaited, *call: calls.append((client.rank, *call)))
    store, clients = shared(), []
    for rank in (3, 2, 1, 0):
        client = BufferClient.__new__(BufferClient)
        client.team, client.rank, client._changes, client._waits_for = "train", rank, 7 + rank, ""
        client._slice_s = client._every_s = 5.0
        client._changing, client._serial, client._start = threading.Lock(), 0, 0
        client._deadline_s, client._together, client._store = 600.0, None, None
        world: Any = SimpleNamespace(size=4, rank=rank, store=lambda: store)
        client.join_team(world)
        clients.append(client)
    for client in clients:
        client._ping()
        client.done(4)
    [(rank, method, team, pings), done] = calls
    assert (rank, method, team) == (0, "ping", "train")
    assert {rank: ping.changes for rank, ping in pings.items()} == {rank: 7 + rank for rank in range(4)}
    assert done[1:3] == ("change", "train")
    assert done[-2:] == ("done", ["train", None, 4])
    assert not store.check(["done/4"]), "the store does not grow with the steps"


def test_the_first_worker_passes_messages_on_and_a_late_one_is_looked_for_in_the_buffer(
    monkeypatch: pytest.MonkeyPatch,
):
    reads: list[tuple[int, str]] = []
    monkeypatch.setattr(
        BufferClient, "read", lambda client, name: reads.append((client.rank, name)) or f"text of {name}"
    )
    store = shared()
    first, second = (BufferClient.__new__(BufferClient) for _ in range(2))
    for rank, client in enumerate((first, second)):
        client.team, client.rank, client._store, client._passed_on = "train", rank, store, deque()
        client._waits_for, client._every_s, client._slice_s, client._deadline_s = "", 0.05, 0.05, 0.1
    assert [client.read_together("a") for client in (first, second)] == ["text of a"] * 2
    assert reads == [(0, "a")]
    assert second.read_together("b") == "text of b"
    assert reads == [(0, "a"), (1, "b")]
    monkeypatch.setattr("megarl.disaggregated.buffer.client._PASSED_ON", 1)
    first.read_together("c")
    assert not store.check(["mail/a"])
