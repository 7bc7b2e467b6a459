"""Environments, which answer a policy that acts in turns."""

from megarl.envs.protocol import Action, Environment, EnvSettings, Observation, Step

__all__ = ["Action", "EnvSettings", "Environment", "Observation", "Step"]
