"""Where samples come from, and how new weights get there: the engine's family answers both.

    cold start, weights loaded --> open_rollout --> publish(step) --> generate, train --> publish(step) --> ...

A recipe changes from one engine to another with `rollout.engine`; the stages see a `RolloutEngine` either way. The cold
start evaluates on the trainer's own parameters with every engine, and servers start after it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from megarl.dag.stage import Role
from megarl.rollout.families import family_of

if TYPE_CHECKING:
    from megarl.runtime.rank_state import RankState


def open_rollout(c: RankState) -> None:
    """Open the engine that generates samples, as the recipe names it. Every team calls; collective over its ranks.

    The engine has no usable weights before the first `publish`.
    """
    generates, trains, family = c.team.holds(Role.ROLLOUT), c.team.holds(Role.ACTOR), family_of(c.config)
    if generates:
        opens = family.open if trains else family.open_receiver
        c.rollout.engine, c.link = opens(c, c.rollout.engine)
        c.rollout.link = c.link
    elif trains and c.team.generates_elsewhere:
        c.link = family.open_sender(c)


def publish(c: RankState, version: int) -> None:
    """Generate with the actor's weights as they are now from here on, as `version`; nothing where nothing is generated.

    Every team calls; collective over its ranks. A rollout's team that does not train waits for the weights.
    """
    c.link.publish(version)
