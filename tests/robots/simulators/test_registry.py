"""Which simulators there are."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

import megarl.robots.simulators
from megarl.robots.envs import SimulatorSettings
from megarl.robots.simulators.batched import BatchedSimulator
from megarl.robots.simulators.protocol import Simulator
from megarl.robots.simulators.registry import BATCHED, SIMULATORS, is_known, measures_progress, simulator_class

FOLDER = Path(megarl.robots.simulators.__file__).parent


@pytest.mark.parametrize(("known", "kind"), [(SIMULATORS, Simulator), (BATCHED, BatchedSimulator)])
def test_every_simulator_of_the_folder_has_a_name(known, kind) -> None:
    found = {
        f"{file.stem}:{node.name}"
        for file in FOLDER.glob("*.py")
        for node in ast.parse(file.read_text()).body
        if isinstance(node, ast.ClassDef) and any(getattr(base, "id", "") == kind.__name__ for base in node.bases)
    }
    assert set(known.values()) == found


@pytest.mark.parametrize("name", sorted(SIMULATORS | BATCHED))
def test_the_simulators_that_measure_progress_are_those_whose_files_compute_it(name: str) -> None:
    for module in {table[name].partition(":")[0] for table in (SIMULATORS, BATCHED) if name in table}:
        nodes = list(ast.walk(ast.parse((FOLDER / f"{module}.py").read_text())))
        names = {getattr(node, kind, None) for node in nodes for kind in ("name", "arg", "id")}
        assert ("progress" in names) == measures_progress(name)


def test_a_users_simulator_is_named_by_its_file_or_module() -> None:
    assert is_known("my_robot.py:MyRobot")
    assert is_known("my_package.robots:MyRobot")
    assert not is_known("my_robot.py")
    assert not is_known(":MyRobot")


def test_an_earlier_module_name_is_answered_by_the_present_one(tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text("from megarl.simulators.protocol import Simulator\n")
    with pytest.raises(LookupError, match=r"import megarl\.robots\.simulators, which was called megarl\.simulators"):
        simulator_class(f"{file}:Mine")


def test_a_simulators_own_keys_lie_beside_those_of_all() -> None:
    assert SimulatorSettings.model_validate({"name": "a.py:B", "size": 64, "workers": 2}).own == {"size": 64}
