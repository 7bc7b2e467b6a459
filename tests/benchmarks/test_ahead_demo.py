"""The comparison of synchronous and asynchronous runs: what it makes of the lines of runs."""

import xml.etree.ElementTree as ElementTree

from megarl.benchmarks import ahead_demo
from megarl.benchmarks.curves import curves
from megarl.config.load import load_config


def lines(end: float, *ages: float) -> list[dict]:
    train = [
        {"step": step, "rollout_corr/staleness_mean": age, "rollout_corr/staleness_max": 2 * age}
        for step, age in enumerate(ages, 1)
    ]
    train[-1]["val/acc"] = end
    return [{"step": 0, "val/acc": 0.25}, *train]


def test_a_run_in_numbers():
    found = ahead_demo.summary(lines(0.75, 0.5, 1.5))
    assert found == {"accuracy": [(0, 0.25), (2, 0.75)], "staleness_mean": 1.0, "staleness_max": 3.0}


def test_a_synchronous_run_has_no_old_tokens():
    found = ahead_demo.summary([{"step": 0, "val/acc": 0.25}, {"step": 1, "val/acc": 0.5}])
    assert (found["staleness_mean"], found["staleness_max"]) == (0.0, 0.0)


def test_table_and_curves_show_every_run():
    runs = [ahead_demo.summary(lines(end, 1.0)) for end in (0.5, 0.75)]
    assert "| asynchronous | 25.0% | 62.5% | 50.0%, 75.0% | 62.5% | 1.0, 2 |" in ahead_demo.table(
        {"asynchronous": runs}
    )
    picture = ElementTree.fromstring(curves({"asynchronous": [run["accuracy"] for run in runs]}))
    strokes = [one.get("stroke") for one in picture.iter() if one.get("stroke-width")]
    assert len(strokes) == 2
    assert len(set(strokes)) == 1


def test_both_arms_are_valid_recipes():
    for recipe in ahead_demo.ARMS.values():
        config = load_config(recipe, [*ahead_demo.COMMON, "model.path=somewhere"])
        assert config.rollout.engine == "sglang"
    assert config.async_.partial
