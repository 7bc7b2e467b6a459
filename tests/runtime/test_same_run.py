"""The same recipe under every launcher and layout: the same numbers."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from tests.runtime import harness

pytestmark = [pytest.mark.procs, pytest.mark.timeout(900)]


@pytest.fixture(scope="module")
def recipe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return harness.write_recipe(tmp_path_factory.mktemp("recipe"))


@pytest.fixture(scope="module")
def local(recipe: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[int, dict[str, float]]:
    return harness.run(recipe, tmp_path_factory.mktemp("local"))


@pytest.mark.parametrize("launcher", ["torchrun", "ray"])
def test_launchers_give_the_same_metrics(recipe, local, tmp_path, launcher):
    assert harness.run(recipe, tmp_path, launcher=launcher) == local


@pytest.mark.parametrize(
    "layout",
    [
        ["cluster.nproc=1"],
        ["actor.parallel.tp=2", "actor.parallel.sp=true"],
        ["actor.parallel.pp=2", "actor.parallel.vpp=2"],
        ["actor.parallel.cp=2"],
        ["actor.mini_batch_size=4", "actor.engine.micro_batch_tokens=200", "actor.engine.offload=true"],
    ],
    ids=["single", "tp2-sp", "pp2-vpp2", "cp2", "micro-batches-offload"],
)
def test_layouts_give_the_same_metrics(recipe, local, tmp_path, layout):
    other = harness.run(recipe, tmp_path, *layout)
    assert other.keys() == local.keys()
    for step, numbers in local.items():
        assert other[step].keys() == numbers.keys()
        for name, value in numbers.items():
            # Four updates at a large learning rate on float32 sums in another order: rounding grows to about 1e-5.
            assert math.isclose(other[step][name], value, rel_tol=1e-3, abs_tol=1e-5), (step, name)
