"""`megarl bench plan`: its cases can be run and planned, and its tables say what was measured."""

from __future__ import annotations

import json
import re
from pathlib import Path
from types import SimpleNamespace

import pytest

from megarl.benchmarks import plan_truth
from megarl.benchmarks.plan_truth import LAYOUTS, RECIPE, SIZES, empty_of, fullest, settings_of
from megarl.checks.recipe import check_config
from megarl.config.load import load_config
from megarl.system.errors import UserError
from megarl.system.machine import this_machine

RESULT = json.loads((Path(plan_truth.__file__).parent / "results" / "plan-2x-amd-epyc.json").read_text())
DOCS = (Path(__file__).parents[2] / "docs" / "planning.md").read_text()


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
    with pytest.raises(UserError, match="unknown case"):
        plan_truth.run(SimpleNamespace(json=tmp_path / "plan.json", sizes=None, layouts="tp3", kind="memory"))


def test_times_without_rates_are_planned_with_those_of_now(tmp_path, monkeypatch):
    """A file of before rates were kept; measured again they may only become better."""
    file, rates = tmp_path / "plan.json", iter([[2e11, 1e11, 2e10], [3e11, 5e10, 2e10]])
    timed = {"wall_s": 3.0, "cpu_s": 2.0, "phases": {}, "others_share": 0.0}
    file.write_text(json.dumps(result(timed=timed)))
    monkeypatch.setattr("megarl.planning.hardware.measure_cores", lambda: next(rates))
    monkeypatch.setattr(plan_truth, "timed", lambda settings: timed)
    for layouts in ("tp2", "1"):
        assert plan_truth.run(SimpleNamespace(json=file, sizes="10M", layouts=layouts, kind="seconds")) == 0
    found = json.loads(file.read_text())
    assert found["rates"] == [3e11, 1e11, 2e10]
    assert {name: case["planned"]["step_s"] > 0 for name, case in found["cases"].items()} == {
        "10M tp2": True,
        "10M 1": True,
    }


@pytest.mark.parametrize("size", SIZES)
def test_the_planner_says_what_was_measured(size):
    """The acceptance of the planner, with the measurements that are kept: a fifth of seconds, a tenth of memory."""
    far = []
    for layout in LAYOUTS:
        case, settings = RESULT["cases"][f"{size} {layout}"], settings_of(size, layout)
        said = plan_truth.planned(settings, RESULT["rates"], RESULT["machine"]["cores"])
        step = said["step_s"] / case["timed"]["wall_s"]
        more = case["resident"] - RESULT["empty"][str(LAYOUTS[layout][0])]
        memory = fullest(load_config(RECIPE, settings))[1] / more
        if abs(step - 1) > plan_truth.SECONDS_WITHIN or abs(memory - 1) > plan_truth.MEMORY_WITHIN:
            far.append((layout, step, memory))
        for kind, ratio in (("memory", memory), ("seconds", step)):
            least, most = re.findall(rf"--kind {kind}`.* ([0-9.]+) to ([0-9.]+) \|", DOCS)[0]
            assert float(least) <= round(ratio, 2) <= float(most), (layout, kind, ratio)
    assert far == []
