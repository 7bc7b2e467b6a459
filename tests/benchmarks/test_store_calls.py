"""What `megarl.benchmarks.store_calls` measures of the core and its journal."""

from __future__ import annotations

import pytest

from megarl.benchmarks import store_calls as store


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store, "WORKERS", 3)
    monkeypatch.setattr(store, "GROUPS", 7)
    monkeypatch.setattr(store, "EVENTS", 100)


def test_all_workers_go_through_all_steps_and_nothing_is_left() -> None:
    result = store.measure_core()
    assert result["kb_held_after_10_more_steps"] < 10
    assert {"dealt_cpu_s_per_step", "tokens_cpu_s_per_step"} < result.keys()


def test_a_store_is_opened_again_with_all_calls() -> None:
    result = store.measure_replay()
    assert result["replay_s"] > 0
    assert 0.01 < result["journal_mb"] < 0.1
