"""Checks of rounds of generation: what `rollout.oversample` and `rollout.round_prompts` do not go with."""

from __future__ import annotations

from megarl.checks.checklist import Checklist
from megarl.checks.conflicts import Conflict, refuse_conflicts
from megarl.config.run import RunConfig
from megarl.config.task import SECTIONS
from megarl.dag.ahead import ROLLOUT_STAGE
from megarl.dag.graph import TaskGraph
from megarl.dag.placement import Placement
from megarl.dag.stage import Role

KEY, CARRY, ROUND = "rollout.oversample", "rollout.carry_steps", "rollout.round_prompts"


def check_oversampling(
    config: RunConfig, graph: TaskGraph | None, placement: Placement | None, checks: Checklist
) -> None:
    """Check `rollout.round_prompts`, and the teams, task graph and settings of a run with `rollout.oversample` above 1
    (more prompt groups in flight than a round of generation completes)."""
    _check_round(config, checks)
    if not config.rollout.oversamples:
        return
    refuse_conflicts(_conflicts(config), KEY, f"{KEY}=1", checks)
    team = None if placement is None else placement.of_role(Role.ROLLOUT)
    if team is not None and Role.ACTOR not in team.roles:
        checks.fail(
            KEY,
            "groups are left unfinished at the end of a step of the actor's team, but another team generates",
            found=f"{config.rollout.oversample:g} with the rollout in the team {team.name}",
            allowed="1, or actor and rollout in one team",
            fix=f"set {KEY}=1, or put actor and rollout into one team; a rollout in a team of its own continues "
            "unfinished groups with async.order=as_ready async.max_staleness=1 async.partial=true",
        )
    first = None if graph is None else graph[graph.order()[0]]
    if first is not None and first.func_name != ROLLOUT_STAGE:
        checks.fail(
            KEY,
            "a group that continues in a later step begins again with its prompt from the data, so no node may change "
            "prompts before they are generated from",
            found=f"the first node {first.id!r} of the {config.algorithm.pipeline_name} pipeline",
            allowed=f"1, or a pipeline whose first node is {ROLLOUT_STAGE}",
            fix=f"set {KEY}=1, or move {first.id!r} after the rollout",
        )
    if config.rollout.carries and not config.rollout_correction.resolved().active:
        checks.warn(
            CARRY,
            "groups that are carried on have tokens of older weights than those that are trained, and nothing corrects "
            "for that",
            found=config.rollout.carry_steps,
            fix="set a preset of rollout_correction, for example decoupled_token_is, or rollout.carry_steps=0",
        )


def _check_round(config: RunConfig, checks: Checklist) -> None:
    """Check that `rollout.round_prompts` is not above a batch and that dynamic sampling repeats smaller rounds."""
    size, batch = config.rollout.round_prompts, config.data.batch_size
    if size is None:
        return
    if size > batch:
        checks.fail(
            ROUND,
            "a round would generate more groups than a step trains on",
            found=size,
            allowed=f"up to data.batch_size, {batch}",
            fix=f"set {ROUND}={batch} or less, or rollout.oversample to have more groups in flight",
        )
    elif not (config.algorithm.dynamic_sampling.enabled and config.async_.in_order):
        checks.fail(
            ROUND,
            "only dynamic sampling generates further rounds until the batch is full, so every step would be too small",
            found=f"{size}, with {batch} prompts in a batch",
            allowed="null, or algorithm.dynamic_sampling.enabled=true with async.order=in_order",
            fix=f"set {ROUND}=null; or use algorithm.pipeline=dapo algorithm.dynamic_sampling.enabled=true, whose low, "
            "high and drop_cut also filter groups",
        )


def _conflicts(config: RunConfig) -> list[Conflict]:
    """Return the settings that cannot be combined with `rollout.oversample` above 1, each with the reason."""
    rollout = config.rollout
    minimum = rollout.sampling.min_new_tokens
    return [
        Conflict(
            *(", ".join(SECTIONS), "a section", not config.task.writes_text, "null"),
            "the episodes of a step are played together",
        ),
        Conflict(
            *("policies", list(config.policies), bool(config.policies), "{}"),
            "episodes of several policies are not interrupted",
        ),
        Conflict(
            *("data.curriculum", "a section", config.data.curriculum is not None, "null"),
            "the scores that decide the next draw come in the order in which groups are complete",
        ),
        Conflict(
            *("rollout.stale_steps", rollout.stale_steps, rollout.stale_steps > 0, "0"),
            "a sample that continues would change between older weights",
        ),
        Conflict(
            *("rollout.sampling.min_new_tokens", minimum, rollout.carries and minimum > 0, "0"),
            "it would count from 0 again in every sample that is carried on",
        ),
    ]
