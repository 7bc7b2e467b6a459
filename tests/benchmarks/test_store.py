"""What `megarl.benchmarks.store` measures of the core."""

from __future__ import annotations

import pytest

from megarl.benchmarks import store


def test_all_workers_go_through_all_steps_and_nothing_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store, "WORKERS", 3)
    monkeypatch.setattr(store, "GROUPS", 7)
    result = store.measure_core()
    assert result["kb_held_after_10_more_steps"] < 10
    assert {"dealt_cpu_s_per_step", "tokens_cpu_s_per_step"} < result.keys()
