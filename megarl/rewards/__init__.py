"""Scores of responses: included scorers, users' functions, and the runner that overlaps them with other work."""

from megarl.rewards.registry import scorer_names
from megarl.rewards.runner import RewardHandle, RewardRunner, build_reward, reward_metrics

__all__ = ["RewardHandle", "RewardRunner", "build_reward", "reward_metrics", "scorer_names"]
