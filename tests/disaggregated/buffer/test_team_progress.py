"""The first worker of a team reports the progress of all to the buffer."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch.distributed as dist

from megarl.disaggregated.buffer.client import BufferClient
from megarl.disaggregated.buffer.progress import Ping
from megarl.disaggregated.buffer.team_progress import TeamProgress


def test_only_what_is_new_is_reported_and_nobody_is_waited_for():
    store = dist.HashStore()
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
    store, clients = dist.HashStore(), []
    for rank in (3, 2, 1, 0):
        client = BufferClient.__new__(BufferClient)
        client.team, client.rank, client._changes, client._waits_for = "train", rank, 7 + rank, ""
        client._slice_s = client._every_s = 5.0
        client._deadline_s, client._together = 600.0, None
        world: Any = SimpleNamespace(size=4, rank=rank, store=lambda: store)
        client.join_team(world)
        clients.append(client)
    for client in clients:
        client._ping()
    [(rank, method, team, pings)] = calls
    assert (rank, method, team) == (0, "ping", "train")
    assert {rank: ping.changes for rank, ping in pings.items()} == {rank: 7 + rank for rank in range(4)}
