"""The recipe's section `async`. `megarl.dag.ahead` checks its keys against each other and against the teams."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, NonNegativeInt

from megarl.config.base import Section

PolicyReference = Annotated[str, Field(pattern=r"^\S+:[A-Za-z_][\w.]*$", examples=["file.py:Class", "pkg.mod:Class"])]


class AsyncConfig(Section):
    """Generation that runs ahead of training."""

    max_staleness: NonNegativeInt = Field(
        0,
        description="k: samples of step t were begun with the weights after step t - 1 - k or later; 0 waits for every "
        "step; more needs the rollout in a team of its own",
    )
    order: Literal["in_order", "as_ready"] | PolicyReference = Field(
        "in_order",
        description="in_order: step t is generated with exactly the weights after step t - 1 - k, so that 1 generates "
        "a step while the one before it is trained; as_ready: k is 1 or more, and a step trains on the groups that are "
        "finished first, in any order; file.py:Class or pkg.mod:Class: a policy of your own, which chooses among "
        "finished groups",
    )
    partial: bool = Field(
        False,
        description="true: new weights interrupt samples, which go on with them; needs as_ready. false: a sample ends "
        "with the weights that it was begun with",
    )

    @property
    def in_order(self) -> bool:
        """Whether whole steps are generated one after the other; else a step is formed of groups that are ready."""
        return self.order == "in_order"
