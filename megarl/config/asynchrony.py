"""How far generation runs ahead of training."""

from __future__ import annotations

from pydantic import Field, NonNegativeInt

from megarl.config.base import Section


class AsyncConfig(Section):
    """Generation that does not wait for training."""

    max_staleness: NonNegativeInt = Field(
        0,
        description="0 or 1: step t is drawn with exactly the weights after step t - 1 - max_staleness, so that 1 "
        "draws a step while the one before it is trained; it needs the rollout in a team of its own",
    )
