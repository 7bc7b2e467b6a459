"""Checks of groups that finish one by one (`async.order=as_ready`) against engine, layout, model and staleness."""

from __future__ import annotations

from megarl.artifacts.facts import ModelFacts
from megarl.checks.checklist import Checklist
from megarl.config.run import RunConfig
from megarl.dag.ahead import KEY, ORDER
from megarl.dag.placement import Placement
from megarl.dag.stage import Role
from megarl.rollout.families import family_of
from megarl.system.errors import count


def check_async(config: RunConfig, placement: Placement, facts: ModelFacts | None, checks: Checklist) -> None:
    """Check further settings of `async`; `megarl.dag.ahead` checks those that depend on the graph and its teams."""
    checks = checks.of("async")
    lag, steps = config.async_.max_staleness, config.trainer.steps
    if lag == 0:
        return
    team = placement.of_role(Role.ROLLOUT)
    if not config.async_.in_order and team is not None:
        family_of(config).check_as_ready(config, team, facts, checks)
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
    if lag >= steps and "trainer" not in config.uncounted:
        checks.warn(
            KEY,
            f"no sample of a run of {count(steps, 'step')} can be more than {count(steps - 1, 'step')} off-policy",
            found=lag,
            fix=f"set a lower {KEY}, or trainer.steps above {lag}",
        )
