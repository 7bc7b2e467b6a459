"""The reward that a model of the run gives (section `reward_model`): no function, a node of the task graph."""

from __future__ import annotations

from megarl.algorithms.registry import Settings
from megarl.config.data import BY_MODEL
from megarl.errors import ConfigError
from megarl.rewards.registry import REWARDS
from megarl.rewards.scoring import Sample


@REWARDS.register(BY_MODEL, settings=Settings)
def reward_model(sample: Sample) -> float:
    """Refuse to be called: the score comes from the nodes `model_score` and `total_reward`.

    Raises:
        ConfigError: always; the pipeline lacks these nodes.
    """
    raise ConfigError(
        "the model's score is made by a node of the task graph, and something asks for it as a function",
        where="reward.name",
        found=BY_MODEL,
        fix="add the nodes in a pipeline of your own by megarl.recipes.grpo.add_reward",
    )
