"""`megarl bench plan`: its cases can be run and planned, and its tables say what was measured."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from megarl.benchmarks import plan_truth
from megarl.benchmarks.plan_truth import LAYOUTS, RECIPE, SIZES, empty_of, fullest, settings_of
from megarl.checks.recipe import check_config
from megarl.config.load import load_config
from megarl.errors import UserError
from megarl.machine import this_machine


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_case_is_a_recipe_that_runs(layout):
    config = load_config(RECIPE, settings_of("10M", layout))
    items = check_config(config, launcher="local", job="train", machine=this_machine()).items
    assert [item.message for item in items if item.status == "fail"] == []
    assert config.cluster.nproc == LAYOUTS[layout][0]


def test_sizes_are_what_their_names_say():
    for name in SIZES:
        terms = fullest(load_config(RECIPE, settings_of(name, "1")))[2]
        assert terms["actor parameters"] / 4e6 == pytest.approx(float(name.removesuffix("M")), rel=0.25)


def test_an_empty_process_has_next_to_no_model():
    assert fullest(load_config(RECIPE, empty_of(2)))[1] < 5e6


def result(**case):
    return {"empty": {"2": 400e6}, "machine": {"cores": 2}, "cases": {"10M tp2": case}}


def test_memory_is_what_comes_on_top_of_an_empty_process():
    rows = plan_truth.memory_rows(result(resident=600e6, estimate={"bytes": 190e6}))
    assert rows == [("10M", "tp2", 200e6, 190e6)]
    assert "1 of 1" in plan_truth.memory_table(result(resident=600e6, estimate={"bytes": 190e6})).caption
    assert "0 of 1" in plan_truth.memory_table(result(resident=600e6, estimate={"bytes": 150e6})).caption


def test_cpu_seconds_are_those_of_all_processes_over_their_cores():
    timed = {"wall_s": 3.0, "cpu_s": 2.0, "phases": {}, "others_share": 0.5}
    found = result(timed=timed, planned={"step_s": 1.1, "phases": {}})
    assert plan_truth.seconds_rows(found) == [("10M", "tp2", 3.0, 1.0, 1.1, 0.5)]
    assert plan_truth.memory_rows(found) == []
    assert "clock: 0 of 1; of CPU-seconds: 1" in plan_truth.seconds_table(found).caption


def test_what_was_measured_is_not_measured_again(tmp_path, monkeypatch, capsys):
    asked = []
    monkeypatch.setattr(plan_truth, "resident", lambda settings: asked.append(settings) or 1e9 * len(asked))
    arguments = SimpleNamespace(json=tmp_path / "plan.json", sizes="10M", layouts="1,tp2", kind="memory")
    assert plan_truth.run(arguments) == 0
    assert len(asked) == 4  # two cases, and empty processes of both numbers
    plan_truth.run(arguments)
    assert len(asked) == 4
    assert "tp2" in capsys.readouterr().out


def test_an_unknown_layout_is_refused(tmp_path):
    with pytest.raises(UserError, match="there is no such case"):
        plan_truth.run(SimpleNamespace(json=tmp_path / "plan.json", sizes=None, layouts="tp3", kind="memory"))
