"""Opening of the engine that generates samples, and publishing of weights to it.

    cold start, weights loaded --> open_rollout --> publish(step) --> generate, train --> publish(step) --> ...

`rollout.engine` chooses the engine; stages use a `RolloutEngine` in any case. The cold start always evaluates with the
embedded engine on the trainer's parameters, and servers start after it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from megarl.dag.stage import Role
from megarl.rollout.families import family_of
from megarl.runtime.policy_engines import open_policies

if TYPE_CHECKING:
    from megarl.runtime.rank_state import RankState


def open_rollout(c: RankState) -> None:
    """Open the engine `rollout.engine`, or this team's links that send weights to it.

    Every team calls this; collective over its ranks. The engine has no usable weights before the first `publish`.
    """
    generates, trains, family = c.team.holds(Role.ROLLOUT), c.team.holds(Role.ACTOR), family_of(c.config)
    if generates:
        opens = family.open if trains else family.open_receiver
        c.rollout.engine, c.link = opens(c, c.rollout.engine)
    elif trains and c.team.generates_elsewhere:
        c.link = family.open_sender(c)
    open_policies(c)
    if generates:
        c.rollout.link = c.link


def publish(c: RankState, version: int) -> None:
    """Publish the current weights of the policies' models to the rollout engine as weight version `version`.

    Every team calls this; collective over its ranks. The rollout's team waits for weights that other teams train, and a
    team that neither trains a policy nor generates does nothing.
    """
    c.link.publish(version)
