"""A store that several threads use, and that names rank and phase when it is gone."""

from __future__ import annotations

import threading
from datetime import timedelta

import pytest
import torch.distributed as dist

from megarl.runtime.health import failure_of
from megarl.system.errors import WorkerError
from megarl.system.store import SharedStore
from megarl.system.tracing import phase


def served(seconds: float) -> tuple[dist.TCPStore, SharedStore]:
    """A store that this process serves, and another connection to it."""
    limit = timedelta(seconds=seconds)
    server = dist.TCPStore("127.0.0.1", 0, None, True, limit, wait_for_workers=False)
    client = dist.TCPStore("127.0.0.1", server.port, None, False, limit, wait_for_workers=False)
    return server, SharedStore(client, "rank 3 of the world", f"{seconds:g} s, cluster.timeout_s")


def test_a_thread_that_waits_for_a_key_does_not_hold_up_another_one():
    _server, store = served(5)
    values: list[bytes] = []
    waiting = threading.Thread(target=lambda: values.append(store.get("late")), daemon=True)
    waiting.start()
    for _ in range(50):  # meanwhile the other thread begins to wait
        store.add("looks", 1)
    store.set("late", "value")
    waiting.join(30)
    assert values == [b"value"]


def test_a_store_that_is_gone_is_an_error_with_rank_and_phase():
    server, store = served(20)
    store.set("a", "b")
    del server
    calls = (lambda: store.get("a"), lambda: store.add("a", 1), lambda: store.has("a", 1), lambda: store.check(["a"]))
    for call in calls:
        with phase("probe"), pytest.raises(WorkerError) as raised:
            call()
        assert str(raised.value).startswith("rank 3 of the world: the connection was closed to the store in rank 0")
        assert "in phase probe" in str(raised.value)
        assert failure_of(raised.value, 3).peer_lost, "never the cause if another rank has an error"


def test_a_key_that_never_comes_is_an_error_with_rank_phase_and_deadline():
    _server, store = served(0.2)
    assert not store.has("never", 0.05)
    with phase("probe"), pytest.raises(WorkerError) as raised:
        store.get("never")
    text = "rank 3 of the world timed out waiting for never in the store, in phase probe (deadline 0.2 s, cluster.time"
    assert str(raised.value).startswith(text)


def test_waits_without_the_key_print_nothing_and_a_late_key_is_seen(capfd):
    _server, store = served(5)
    assert not store.has("late", 0.1)
    threading.Timer(0.1, lambda: store.set("late", "value")).start()
    assert store.has("late", 5)
    assert capfd.readouterr().err == ""
