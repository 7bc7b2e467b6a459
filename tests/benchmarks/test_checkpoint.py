"""What `megarl bench checkpoint` measures of one rank."""

from __future__ import annotations

import pytest

from megarl.benchmarks import checkpoint
from tests.dist import single_process
from tests.training import cases


def test_a_round_counts_bytes_seconds_and_memory(tmp_path, monkeypatch):
    single_process()
    monkeypatch.setenv("FOLDER", str(tmp_path))
    engine = cases.make_engine("dense")
    row = checkpoint._round(engine)
    parameters = sum(p.numel() for chunk in engine.chunks for p in chunk.parameters())
    assert row["gb_per_rank"] == pytest.approx(12 * parameters / 1e9, rel=0.1)  # fp32 and two moments, a small header
    assert row["gb"] > row["gb_per_rank"]
    assert all(row[name] > 0 for name in ("blocked_s", "writing_s", "verifying_s", "loading_s"))
    assert not list(tmp_path.iterdir())
