"""Scores of responses: built-in rewards, users' functions, and a runner that scores while other work continues."""

# Importing a module of a built-in reward registers the reward.
from megarl.rewards import classifier, exact_match, format, gsm8k, http, judge, math, numeric, reasoning_gym  # noqa: F401
from megarl.rewards.parts import Rewards
from megarl.rewards.registry import REWARDS
from megarl.rewards.runner import reward_metrics

__all__ = ["REWARDS", "Rewards", "reward_metrics"]
