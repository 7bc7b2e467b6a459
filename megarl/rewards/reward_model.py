"""The reward that a model of the run gives (section `reward_model`): no function, a node of the task graph."""

from __future__ import annotations

from megarl.algorithms.registry import Settings
from megarl.config.data import BY_MODEL
from megarl.rewards.registry import REWARDS
from megarl.rewards.scoring import Sample


@REWARDS.register(BY_MODEL, settings=Settings)
def reward_model(sample: Sample) -> float:
    """Stand for the score that the nodes `model_score` and `total_reward` make: it is never called."""
    raise AssertionError("the reward model's part has no runner")
