"""Checks of groups that finish one by one (`async.order=as_ready`) against engine, layout, model and staleness."""

from __future__ import annotations

from megarl.artifacts.facts import ModelFacts
from megarl.checks.checklist import Checklist
from megarl.config.run import RunConfig
from megarl.dag.ahead import KEY, ORDER, experts_problems
from megarl.dag.placement import Placement
from megarl.dag.stage import Role
from megarl.planning.shards import layout_key
from megarl.system.errors import count


def check_async(config: RunConfig, placement: Placement, facts: ModelFacts | None, checks: Checklist) -> None:
    """Check the settings that `megarl.dag.ahead`, which checks graphs and teams, does not see.

    Args:
        facts: sizes of the policy; None: unknown here.
    """
    checks = checks.of("async")
    lag, steps = config.async_.max_staleness, config.trainer.steps
    if lag == 0:
        return
    if not config.async_.in_order and config.rollout.engine == "embedded":
        _check_engine(config, placement, facts, checks)
    sampling = config.algorithm.dynamic_sampling
    if not config.async_.in_order and sampling.enabled and sampling.surplus == "drop":
        checks.warn(
            "algorithm.dynamic_sampling.surplus",
            "this has no effect: groups that no step has used yet always wait for the next step",
            found="drop",
            fix=f"set algorithm.dynamic_sampling.surplus=keep, or {ORDER}=in_order {KEY}=0",
        )
    if not config.async_.in_order and sampling.enabled and sampling.short == "fill":
        checks.fail(
            "algorithm.dynamic_sampling.short",
            "with order=as_ready there are no rounds after which a step could be filled",
            found="fill",
            allowed="fail",
            fix=f"set algorithm.dynamic_sampling.short=fail, or {ORDER}=in_order {KEY}=0",
        )
    if lag >= steps:
        checks.warn(
            KEY,
            f"no sample of a run of {count(steps, 'step')} can be more than {count(steps - 1, 'step')} off-policy",
            found=lag,
            fix=f"set a lower {KEY}, or trainer.steps above {lag}",
        )


def _check_engine(config: RunConfig, placement: Placement, facts: ModelFacts | None, checks: Checklist) -> None:
    """Check an embedded engine with context parallelism: it generates in rounds, so that no group finishes early."""
    team = placement.of_role(Role.ROLLOUT)
    assert team is not None, "every run generates samples"
    if team.parallel.cp > 1:
        key = f"{layout_key(config, Role.ROLLOUT, team)}.cp"
        checks.fail(
            key,
            "context-parallel ranks of an embedded engine share the prompts of a step and finish them together, so no "
            "group is ready before the others",
            found=team.parallel.cp,
            allowed=f"1 with {ORDER}=as_ready",
            fix="give the rollout a layout with cp 1 (rollout.parallel), or set "
            f"{ORDER}=in_order {KEY}=1, or rollout.engine=sglang",
        )
    if facts is not None and facts.is_moe:
        for problem in experts_problems(config):
            checks.from_error(problem)
