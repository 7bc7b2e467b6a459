"""Settings of runs that only GPUs can make: the checks before a start accept them."""

from __future__ import annotations

from importlib.util import find_spec

import pytest

from megarl.certificate.harness import SECTIONS
from megarl.certificate.runs import RECIPE, gpu_count
from megarl.certificate.sections import layouts, servers, steps
from megarl.checks.planned import refuse_plan
from megarl.config.load import find_recipe, load_config
from megarl.recipes.build import build_task_graph
from megarl.recipes.components import COMPONENTS
from megarl.runtime.validate import validates
from tests.forked import forked_scorers


def accept(overrides: list[str]) -> None:
    with forked_scorers():  # what imports the reward, to see its arguments
        config = load_config(find_recipe(RECIPE), overrides, components=COMPONENTS)
    refuse_plan(config, build_task_graph(config))


@pytest.mark.parametrize(("engine", "gpus", "tp"), [("embedded", 8, 2), ("sglang", 1, 1)])
def test_steps_of_every_model(engine, gpus, tp):
    for model in steps.MODELS:
        accept(steps.on_gpus(model, engine, gpus, tp, 80))


@pytest.mark.parametrize("overrides", [steps.on_cpu(), steps.on_gpus(steps.MODELS[0], "embedded", 1, 1, 80)])
def test_no_step_that_is_measured_validates(overrides):
    config = load_config(find_recipe(RECIPE), overrides)
    assert not any(validates(config, step) for step in range(1, config.trainer.steps + 1))


@pytest.mark.parametrize("gpus", [0, 1, 2, 8])
def test_servers_of_every_placement(gpus):
    for colocated in (True, False):
        for transport in servers.TRANSPORTS:
            accept(servers.settings(gpus, transport, colocated=colocated))


def test_every_kind_of_parallelism_is_among_the_layouts_of_eight_devices():
    found = dict(layouts.layouts_of(8))
    for sizes in ("dp only", "tp 2", "tp 2 sp True", "pp 2 vpp 2", "cp 2", "ep 8", "ep 2 etp 2", "tp 2 pp 2 cp 2"):
        assert f"mixture {sizes}" in found, sizes
    assert "dense ep 2" not in found
    assert [name for name, _ in layouts.layouts_of(1)] == ["dense", "mixture"]
    assert len(dict(layouts.layouts_of(3))) == 2  # nothing but data parallelism divides three


def test_devices_that_are_hidden_do_not_count(monkeypatch):
    monkeypatch.setattr("megarl.certificate.runs.nvidia_devices", lambda: 8)
    for text, count in (("2,3", 2), ("", 0), (None, 8)):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", text) if text is not None else monkeypatch.delenv(
            "CUDA_VISIBLE_DEVICES"
        )
        assert gpu_count() == count


def test_sections_have_names_of_their_own_and_deadlines():
    assert len({one.name for one in SECTIONS}) == len(SECTIONS)
    assert all(find_spec(f"megarl.certificate.sections.{one.name}") for one in SECTIONS)
    assert all(one.title and 0 < one.cpu_deadline_s <= 600 for one in SECTIONS)
    (of_steps,) = (one.deadline_s for one in SECTIONS if one.name == "steps")
    assert of_steps > 2 * len(steps.MODELS) * steps.RUN_S
