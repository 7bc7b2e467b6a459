"""Checks of `data.curriculum`: its pools, and whether the run scores prompts where they are drawn."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping

from megarl.checks.checklist import Checklist
from megarl.config.data import UNSEEN, PoolConfig
from megarl.config.run import RunConfig
from megarl.dag.graph import TaskGraph
from megarl.dag.placement import Placement
from megarl.dag.stage import Role
from megarl.runtime.stages.curriculum import curriculum

KEY = "data.curriculum"


def check_curriculum(
    config: RunConfig, graph: TaskGraph | None, placement: Placement | None, checks: Checklist
) -> None:
    """Check the pools, the order of the samples, and that a node of the graph records the scores."""
    if config.data.curriculum is None:
        return
    _check_pools(config.data.curriculum.pools, checks)
    if not config.async_.in_order:
        checks.fail(
            KEY,
            "with async.order=as_ready the scores that are known when a prompt begins depend on the machine's speed, "
            "so a resumed run would not draw the same prompts",
            found=f"async.order: {config.async_.order}",
            allowed="async.order: in_order",
            fix="set async.order=in_order, or data.curriculum=null",
        )
    if graph is not None and not any(node.func is curriculum for node in graph):
        checks.fail(
            KEY,
            f"no node of the {config.algorithm.pipeline_name} pipeline records how prompts scored, so all rows would "
            "stay unseen",
            found=f"nodes {', '.join(graph.order())}",
            allowed="grpo, ppo, dapo, or a pipeline of yours with megarl.runtime.stages.curriculum:curriculum",
            fix="add the nodes with megarl.recipes.grpo.add_reward, or set data.curriculum=null",
        )
    apart = placement is not None and placement.of_role(Role.ROLLOUT) is not placement.of_role(Role.ACTOR)
    if config.reward.of_model is not None and apart:
        checks.fail(
            KEY,
            "the team that draws the prompts has no scores: the reward model of this run scores in another team",
            found=f"the reward {config.reward.described}",
            allowed="rewards of functions, or actor and rollout in one team",
            fix="put actor and rollout into one team, or set data.curriculum=null",
        )


def _check_pools(pools: Mapping[str, PoolConfig], checks: Checklist) -> None:
    bounds = [math.inf if pool.up_to is None else pool.up_to for pool in pools.values()]
    shown = {name: pool.up_to for name, pool in pools.items()}
    if not bounds or bounds[-1] != math.inf:
        checks.fail(
            f"{KEY}.pools",
            "rows whose average is above all bounds are in no pool" if bounds else "there are no pools",
            found=shown,
            allowed="pools by rising up_to, the last one with up_to: null",
            fix="add a last pool without up_to, such as pools: {hard: {up_to: 0.2}, medium: {up_to: 0.8}, easy: {}}",
        )
    elif bounds != sorted(set(bounds)):
        checks.fail(
            f"{KEY}.pools",
            "the bounds of the pools do not rise from pool to pool, so a pool would be empty",
            found=shown,
            allowed="pools by rising up_to, the last one with up_to: null",
            fix="sort the pools by up_to",
        )
    elif bad := [name for name in pools if name == UNSEEN or not re.fullmatch(r"[\w-]+", name)]:
        checks.fail(
            f"{KEY}.pools",
            "a pool's name becomes part of metric names, which do not allow this name",
            found=bad[0],
            allowed=f"letters, digits, _ and -, but not {UNSEEN}, which stands for rows without a score",
            fix="rename the pool",
        )
    elif not any(pool.weight for pool in pools.values()):
        checks.fail(
            f"{KEY}.pools",
            "every pool has weight 0, so no prompt could be drawn a second time",
            found={name: pool.weight for name, pool in pools.items()},
            allowed="at least one weight above 0",
            fix="give a pool a weight above 0",
        )
    else:
        checks.ok(f"{len(pools)} pools: {', '.join(f'{name} weight {pool.weight:g}' for name, pool in pools.items())}")
