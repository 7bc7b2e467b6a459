"""The reward that the role `reward_model` computes: not a function, but a node of the task graph."""

from __future__ import annotations

from megarl.algorithms.registry import Settings
from megarl.config.data import BY_MODEL
from megarl.rewards.registry import REWARDS
from megarl.rewards.scoring import Sample


@REWARDS.register(BY_MODEL, settings=Settings)
def reward_model(sample: Sample) -> float:
    """Placeholder that is never called: the nodes `model_score` and `total_reward` compute this score."""
    raise AssertionError("the reward model's part has no runner")
