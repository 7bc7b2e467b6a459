"""Generation that runs ahead, against what the engine and the model can do, and in the plan."""

from __future__ import annotations

import pytest

from megarl.artifacts.facts import ModelFacts
from megarl.checks.dry_run import make_plan
from megarl.checks.recipe import check_config
from megarl.config.load import load_config
from tests.half_step import HALF_STEP

APART = (
    "cluster.nproc=3",
    "placement.teams={train: {roles: [actor], devices: 1}, draw: {roles: [rollout], devices: 2}}",
)
AHEAD = (*APART, "async.max_staleness=1")
READY = (*APART, "async={max_staleness: 2, order: as_ready}")
CP = ("rollout.parallel={cp: 2}",)
MOE = ModelFacts("test", "qwen3_moe", 4, 64, 4, 2, 16, 96, 32, 256, False, experts=4, experts_per_token=2)


def test_a_dense_model_on_whole_replicas_may_be_drawn_as_it_gets_ready(failures):
    assert failures(*READY, "data.batch_size=32") == []
    assert failures(*READY, "rollout.parallel={tp: 2}") == []


def test_what_generates_nothing_cannot_run_ahead():
    config = load_config("dpo_quickstart", ["async.max_staleness=1"])
    (check,) = [check for check in check_config(config).items if check.key == "async.max_staleness"]
    assert check.status == "fail"
    assert "this recipe generates no samples" in check.message


def test_context_parallel_ranks_end_together(failures):
    (check,) = failures(*READY, *CP)
    assert check.key == "rollout.parallel.cp"
    assert "no group is ready before the others" in check.message
    assert failures(*AHEAD, *CP) == []


@pytest.mark.parametrize(("keys", "refused"), [(AHEAD, False), (READY, True)])
def test_experts_of_an_embedded_engine_decode_in_rounds(config_of, keys, refused):
    checked = check_config(config_of(*keys), hf=MOE)
    found = [check for check in checked.items if check.status == "fail"]
    assert [check.key for check in found] == (["async.order"] if refused else [])
    if refused:
        assert "as_ready with a mixture of experts" in str(found[0].problem())
        served = config_of(*keys, "rollout.engine=sglang", "rollout.sglang.urls=[http://127.0.0.1:1]")
        assert "async.order" not in [c.key for c in check_config(served, hf=MOE).items if c.status == "fail"]


@pytest.mark.parametrize("keys", [AHEAD, READY])
def test_old_samples_without_a_correction_are_warned_of(warned, keys):
    assert "async.max_staleness" in [check.key for check in warned(*keys)]
    assert "async.max_staleness" not in [c.key for c in warned(*keys, "rollout_correction.preset=decoupled_token_is")]


@pytest.mark.parametrize(("steps", "useless"), [(2, True), (3, False)])
def test_staleness_that_a_short_run_cannot_have_is_warned_of(warned, steps, useless):
    (check, *others) = [
        check
        for check in warned(*READY, "rollout_correction.preset=decoupled_token_is", f"trainer.steps={steps}")
        if check.key == "async.max_staleness"
    ] or [None]
    assert (check is not None, others) == (useless, [])
    if useless:
        assert "more than 1 step off-policy" in check.message


def test_the_plan_says_how_far_ahead_the_rollout_is(config_of):
    def plan(*overrides):
        return make_plan(config_of(*overrides), "ray").text

    ready = plan(*READY, "data.batch_size=10")
    assert "async: as_ready, at most 2 steps stale; at most (1 + 2) * 10 = 30 groups" in ready
    assert "(4 steps of samples)" in ready
    assert "embedded engine bf16, weights up to 2 steps old -> trainer bf16" in ready
    assert "async: in_order, 1 step stale" in plan(*AHEAD)
    assert "async: in_order, not stale" in plan(*APART)
    assert "async: " not in plan("cluster.nproc=2")


DAPO = ("algorithm.pipeline=dapo", "algorithm.dynamic_sampling.enabled=true", "rollout_correction.preset=pg_is")


@pytest.mark.parametrize(("surplus", "useless"), [("drop", True), ("keep", False)])
def test_groups_that_wait_for_a_step_are_not_dropped(warned, surplus, useless):
    found = [check.key for check in warned(*READY, *DAPO, f"algorithm.dynamic_sampling.surplus={surplus}")]
    assert ("algorithm.dynamic_sampling.surplus" in found) == useless


def test_steps_that_are_drawn_as_ready_cannot_be_filled(failures):
    (check,) = failures(*READY, *DAPO, "algorithm.dynamic_sampling.short=fill")
    assert check.key == "algorithm.dynamic_sampling.short"


def test_a_policy_of_a_user_is_in_the_plan_or_refused(config_of, failures, tmp_path):
    own = (*APART, f"async={{max_staleness: 2, order: '{HALF_STEP}'}}")
    assert failures(*own, "data.batch_size=32") == []
    assert (
        "async: HalfStep, at most 2 steps stale; at most (1 + 2) * 10"
        in make_plan(config_of(*own, "data.batch_size=10"), "ray").text
    )
    (tmp_path / "own.py").write_text("class Policy: ...")
    (check,) = failures(*APART, f"async={{max_staleness: 2, order: '{tmp_path / 'own.py'}:Policy'}}")
    assert check.key == "async.order"
    assert "derive it from AsReady" in str(check.problem())
