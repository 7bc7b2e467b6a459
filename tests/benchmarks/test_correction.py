"""The comparison of corrections: what it makes of the lines of runs."""

import xml.etree.ElementTree as ElementTree

from megarl.benchmarks import correction_demo
from megarl.benchmarks.curves import curves
from megarl.config.load import load_config


def lines(end: float, **more: float) -> list[dict]:
    gap = {f"rollout_corr/{name}": value for name, value in {"k3_kl": 0.01, "ess": 0.9, "staleness_mean": 4.0}.items()}
    same = {"critic/score/mean": 0.5, **gap, **more}
    train = [{"step": step, "actor/grad_norm": float(step), **same} for step in range(1, 5)]
    train[1]["val/acc"], train[3]["val/acc"] = 0.45, end
    return [{"step": 0, "val/acc": 0.4}, *train]


def test_an_arm_in_numbers():
    arm = correction_demo.summary(lines(0.8, **{"rollout_corr/rejected": 0.25}))
    assert arm["accuracy"] == {0: 0.4, 2: 0.45, 4: 0.8}
    assert (arm["k3_kl"], arm["rejected"], arm["grad_norm_max"]) == (0.01, 0.25, 4.0)


def test_table_and_curves_show_every_arm():
    arms = {"disabled": correction_demo.summary(lines(0.8)), "pg_is": correction_demo.summary(lines(0.7))}
    table = correction_demo.table(arms).splitlines()
    assert table[2].startswith("| disabled | 40.0% | 45.0% | 80.0% | 0.500 |")
    assert table[3].startswith("| pg_is | 40.0% | 45.0% | 70.0% |")
    text = "".join(
        ElementTree.fromstring(curves({name: [correction_demo.points(arm)] for name, arm in arms.items()})).itertext()
    )
    assert "disabled" in text
    assert "pg_is" in text


def test_every_arm_is_a_valid_recipe():
    for settings in correction_demo.ARMS.values():
        assert load_config(correction_demo.RECIPE, settings).model.dtype == "fp32"
