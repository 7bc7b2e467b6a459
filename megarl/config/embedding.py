"""What scores of robots' episodes compare them by."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from megarl.config.base import Section


class EmbeddingSettings(Section):
    """The mapping `robot.reward.embedding`."""

    name: Literal["state"] = Field("state", description="state: the robot's states along the episode")
    points: int = Field(8, ge=1, description="states of an episode that are compared, evenly spread over its calls")
    end_weight: float = Field(
        1.0, ge=0, description="what the last state counts once more, beside the mean over all points; 0: nothing"
    )
