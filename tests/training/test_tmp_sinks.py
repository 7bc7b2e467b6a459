import pytest
from tests.dist import run_distributed
from tests.training.test_layouts import _all_cases, _reference

TWO = [
    ("sinks", {"tp": 2, "sp": True}, {"recompute": "full"}),
    ("sinks", {"tp": 2, "sp": True, "etp": 1}, {}),
    ("sinks", {"tp": 2, "sp": True, "ep": 2}, {}),
    ("sinks", {"ep": 2}, {"distributed_optimizer": False}),
    ("sinks", {"cp": 2, "ep": 2}, {}),
    ("sinks", {"cp": 2}, {"recompute": "selective"}),
    ("sinks", {"pp": 2}, {"recompute": "selective"}),
    ("sinks", {"pp": 2, "vpp": 2}, {"recompute": ["moe"]}),
]
FOUR = [
    ("sinks", {"tp": 2, "sp": True, "ep": 2, "etp": 2}, {}),
    ("sinks", {"tp": 2, "pp": 2, "sp": True}, {}),
    ("sinks", {"tp": 2, "cp": 2, "sp": True}, {}),
]

@pytest.fixture(scope="module")
def reference() -> dict:
    return run_distributed(_reference, 1, 120, TWO + FOUR)[0]

@pytest.mark.procs
@pytest.mark.parametrize(("processes", "layouts"), [(2, TWO), (4, FOUR)])
def test_layout(processes, layouts, reference):
    ranks = run_distributed(_all_cases, processes, 420, layouts, reference)
    for number, case in enumerate(layouts):
        worst = {key: max(rank[number][key] for rank in ranks) for key in ranks[0][number]}
        print(case, {key: f"{value:.1e}" for key, value in worst.items()})
