"""How tools/golden.py compares two runs."""

from __future__ import annotations

import math

import pytest

from tools.golden import compare, differences, measures_the_machine, new_metrics

BASE = [
    {"step": 1, "stage": "sft", "time": 1.0, "loss": 0.5, "timing_s/step": 2.0},
    {"step": 1, "stage": "train", "time": 2.0, "loss": 0.25, "perf/total_tokens": 7, "perf/mfu": 0.1},
    {"step": 2, "stage": "train", "time": 3.0, "loss": math.nan, "val/acc": 0.0},
]


def test_runs_that_differ_only_in_time_and_in_new_metrics_are_the_same():
    now = [line | {"time": 9.0} for line in BASE]
    now[1] |= {"perf/mfu": 0.7, "turns/mean": 1.0, "timing_s/env": 0.1}
    assert compare(BASE, now) is None
    assert new_metrics(BASE, now) == ["turns/mean"]


@pytest.mark.parametrize(
    ("line", "changes", "message"),
    [
        (1, {"loss": 0.25000000000000006}, "train step 1: loss: 0.25 in the base, 0.25000000000000006 now"),
        (1, {"perf/total_tokens": 8}, "train step 1: perf/total_tokens: 7 in the base, 8 now"),
        (2, {"val/acc": -0.0}, "train step 2: val/acc: 0.0 in the base, -0.0 now"),
        (2, {"loss": None}, "train step 2: loss: nan in the base, None now"),
        (2, {"step": 3}, "train step 2: step: 2 in the base, 3 now"),
    ],
)
def test_the_first_difference_is_named(line, changes, message):
    now = [dict(line) for line in BASE]
    now[line] |= changes
    assert str(compare(BASE, now)) == message


def test_a_metric_or_a_line_that_is_missing_is_a_difference():
    assert str(compare(BASE, [*BASE[:2], {"step": 2, "stage": "train", "loss": math.nan}])) == (
        "train step 2: val/acc: 0.0 in the base, None now"
    )
    assert str(compare(BASE, BASE[:2])) == "train step 2: number of lines: 3 in the base, 2 now"


def test_the_size_of_differences_tells_rounding_from_a_defect():
    now = [dict(line) for line in BASE]
    now[0] |= {"loss": 0.5 + 1e-7}
    now[1] |= {"perf/total_tokens": 14, "time": 9.0}
    now[2] |= {"loss": 1.0}
    sizes = differences(BASE, now)
    assert list(sizes) == ["sft step 1", "train step 1", "train step 2"]
    assert list(sizes.values()) == [pytest.approx(1e-7), 1.0, math.inf]


def test_what_measures_the_machine():
    assert all(
        map(measures_the_machine, ("time", "timing_s/step", "perf/throughput", "perf/max_memory_gb", "perf/mfu"))
    )
    assert not any(map(measures_the_machine, ("perf/flops", "perf/generated_tokens", "actor/pg_loss", "timing")))
