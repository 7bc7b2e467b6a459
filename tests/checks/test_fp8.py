"""Warnings of FP8 formats whose scales are lost when a run resumes."""

from __future__ import annotations

from megarl.checks.checklist import Checklist
from megarl.checks.fp8 import check_fp8
from megarl.checks.recipe import check_config
from megarl.config.load import load_config
from megarl.dag.stage import Role


def test_a_dry_run_warns_that_delayed_scales_are_not_in_checkpoints():
    checks = check_config(load_config("grpo_quickstart", ["actor.engine.fp8=delayed"])).items
    [check] = [check for check in checks if check.key == "actor.engine.fp8" and check.status == "warn"]
    assert "begins with scales of 1" in check.message
    assert "set actor.engine.fp8 to blockwise or mxfp8" in str(check.problem())


def test_only_trained_models_and_delayed_scales_are_warned_of():
    models = (
        "models={own: {train: true, engine: {fp8: delayed}}, kept: {path: m, train: false, engine: {fp8: delayed}}}"
    )
    config = load_config("grpo_quickstart", ["critic.engine.fp8=delayed", "actor.engine.fp8=blockwise", models])
    for roles, keys in (
        (None, ["models.own.engine.fp8"]),
        ({Role.CRITIC}, ["critic.engine.fp8", "models.own.engine.fp8"]),
    ):
        checks = Checklist(name="fp8")
        check_fp8(config, roles, checks)
        assert [check.key for check in checks.items] == keys
