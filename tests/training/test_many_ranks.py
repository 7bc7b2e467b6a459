"""Layouts of 32 ranks against the single process (campaign), with several groups of each kind, of several ranks each.

What is compared, and how closely, is as in tests/training/test_layouts.py.
"""

from __future__ import annotations

import pytest

from tests.dist import run_distributed
from tests.training import cases, test_layouts

RANKS = 32
NAME = "moe for many ranks"
cases.MODELS[NAME] = cases.MODELS["moe"] | {"num_experts": 8, "num_hidden_layers": 4}
LAYOUTS = [
    (NAME, {"pp": 4, "ep": 8}, {}),
    (NAME, {"tp": 2, "cp": 2, "pp": 2, "ep": 2, "sp": True}, {"overlap_grad_reduce": True}),
]


def compared(layouts: list, reference: dict) -> list[dict[str, float]]:
    return test_layouts._all_cases(layouts, reference)


def in_one_process(layouts: list) -> dict:
    return test_layouts._reference(layouts)


@pytest.mark.campaign("teams")
@pytest.mark.procs
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("layout", LAYOUTS, ids=["pp 4, ep 8", "tp 2, cp 2, pp 2, ep 2"])
def test_32_ranks_equal_the_single_process(layout):
    reference = run_distributed(in_one_process, 1, 240, [layout])[0]
    ranks = run_distributed(compared, RANKS, 900, [layout], reference)
    worst = {key: max(rank[0][key] for rank in ranks) for key in ranks[0][0]}
    print(layout, {key: f"{value:.1e}" for key, value in worst.items()})
    assert max(worst["logp"], worst["entropy"]) < 5e-6, worst
    assert max(value for key, value in worst.items() if key.startswith("step")) < 2e-6, worst
    assert worst["weights"] < 2e-6, worst
