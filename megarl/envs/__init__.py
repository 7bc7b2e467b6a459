"""Environments, which answer a policy that acts in turns."""

from megarl.envs.protocol import Action, Environment, EnvSettings, Observation, Step
from megarl.envs.several import Ask, EpisodeRewards, SeveralPolicies

__all__ = ["Action", "Ask", "EnvSettings", "Environment", "EpisodeRewards", "Observation", "SeveralPolicies", "Step"]
