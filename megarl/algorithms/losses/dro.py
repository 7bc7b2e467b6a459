"""Quadratic penalty on the log-ratio (DRO)."""

from __future__ import annotations

from pydantic import Field, PositiveFloat

from megarl.algorithms.lazy import Tensor
from megarl.algorithms.losses.base import POLICY_LOSSES, LossInputs
from megarl.algorithms.registry import Settings
from megarl.system.metrics import Metrics


class QuadraticSettings(Settings):
    """The weight of DRO's quadratic penalty on the log-ratio of the new and the old policy."""

    quadratic_coef: PositiveFloat = Field(0.05, description="weight of the squared log-ratio")


@POLICY_LOSSES.register("dro", settings=QuadraticSettings)
def dro(
    logp: Tensor,
    old_logp: Tensor,
    advantages: Tensor,
    mask: Tensor,
    cfg: QuadraticSettings,
    *,
    offsets: Tensor | None = None,
) -> tuple[Tensor, Metrics]:
    """Compute -(A logp - quadratic_coef / 2 (logp - old_logp)^2).

    This off-policy objective has no ratio; its optimum moves the log-prob by A / quadratic_coef. The papers define it
    for whole responses, with the square of the summed log-ratio; here, as in Tinker, it applies per token.

    Source: Offline Regularised RL for LLM Alignment (arXiv 2405.19107) and Kimi k1.5 (arXiv 2501.12599); per token:
    tinker-docs.thinkingmachines.ai/tinker/losses/dro. Arguments and result: see `losses.base`.
    """
    p = LossInputs.of(logp, old_logp, advantages, mask)
    return 0.5 * cfg.quadratic_coef * p.difference.square() - p.advantages * p.logp, p.metrics()
