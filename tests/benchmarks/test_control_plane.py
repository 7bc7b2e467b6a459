"""What bookkeeping costs, on the code that a run uses."""

from __future__ import annotations

import pytest

from megarl.benchmarks.control_plane import (
    Scale,
    end_of_generation,
    heartbeats,
    metrics,
    planned,
    samples_of_replica,
    store_calls,
)


def test_each_part_is_measured_at_the_size_of_the_run(tmp_path):
    scale = Scale(ranks=64)
    rows = [*heartbeats(scale, tmp_path), *end_of_generation(scale), *store_calls(scale), *metrics(scale)]
    rows += samples_of_replica(scale)
    assert all(row.seconds > 0 for row in rows)
    workers = {"a thread of one rank", "every rank", "a replica", "a replica's first rank", "a replica's other ranks"}
    assert {row.who for row in rows} == workers | {"launcher", "store's thread", "buffer"}


@pytest.mark.campaign("servers")
def test_no_part_takes_more_than_a_hundredth_of_a_step_at_1024_ranks():
    assert {row.part: row.seconds for row in planned(Scale()) if not row.once and row.seconds > 0.6} == {}
