"""Policy losses by name, the critic's loss, and the objective that joins the terms."""

from megarl.algorithms.losses.actor import actor_loss
from megarl.algorithms.losses.base import POLICY_LOSSES
from megarl.algorithms.losses.ppo import ppo
from megarl.algorithms.losses.value import value_loss

__all__ = ["POLICY_LOSSES", "actor_loss", "ppo", "value_loss"]
