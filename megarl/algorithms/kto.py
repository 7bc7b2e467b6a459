"""The KTO loss (arXiv 2402.01306) on examples that are labelled desirable or undesirable.

    r  = (log pi - log ref)(response), a sum over its tokens
    z  = max(0, mean of r over mismatched responses)        the baseline, without gradient; see `baseline`

    desirable     desirable_weight   (1 - sigmoid(beta (r - z)))
    undesirable   undesirable_weight (1 - sigmoid(beta (z - r)))

The loss is a mean over the examples of a mini-batch. z estimates the KL divergence of the policy from the reference:
each prompt is paired with the response of the example before it, so that both sets hold the same responses.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from megarl.algorithms.preference import log_ratios, rounding
from megarl.system.metrics import Metrics

if TYPE_CHECKING:
    from megarl.algorithms.preference import Responses
    from megarl.config.training import PreferenceConfig


@dataclass(frozen=True)
class Counts:
    """Numbers of desirable and undesirable examples in a mini-batch, over all ranks."""

    desirable: float
    undesirable: float

    @property
    def all(self) -> float:
        """Number of examples."""
        return self.desirable + self.undesirable


def baseline(total: float, examples: float) -> float:
    """Return KTO's baseline z: the mean log-ratio of policy and reference over prompts with other prompts' responses,
    at least 0. `total` and `examples` are the sum and number of these log-ratios over all ranks."""
    return max(0.0, total / examples)


def kto_loss(
    logp: Tensor,
    responses: Responses,
    labels: Tensor,
    z: float,
    settings: PreferenceConfig,
    counts: Counts,
    dtype: torch.dtype = torch.float32,
) -> tuple[Tensor, Metrics]:
    """Return the part of the mini-batch's loss that comes from this rank's examples, and their metrics.

    Args:
        logp: float [N], log-probs of the policy, differentiable.
        labels: bool [B], whether each example is desirable.
        z: the mini-batch's `baseline`.
        counts: examples of the mini-batch, over which the loss is a mean.
        dtype: the model's dtype. If an example's log-ratio differs from z only by this dtype's rounding, the example
            does not count as accurate.
    """
    response_logp, ratios = log_ratios(logp, responses)
    gains = torch.where(labels, ratios - z, z - ratios)
    of_label = ratios.new_tensor([settings.undesirable_weight, settings.desirable_weight])
    losses = of_label[labels.long()] * (1 - torch.sigmoid(settings.beta * gains))
    metrics = Metrics()
    metrics.mean("preference/loss", float(losses.detach().double().sum()), len(losses))
    metrics.mean("rewards/accuracies", float((gains.detach() > rounding(logp, responses, dtype)).sum()), len(gains))
    rewards = (settings.beta * ratios).detach().double()
    for name, examples in (("chosen", labels), ("rejected", ~labels)):
        if count := int(examples.sum()):
            metrics.mean(f"rewards/{name}", float(rewards[examples].sum()), count)
            metrics.mean(f"logps/{name}", float(response_logp.detach().double()[examples].sum()), count)
    # the margin is a difference of two means over the mini-batch, so it needs examples of both kinds
    if counts.desirable and counts.undesirable:
        shares = rewards.new_tensor([-counts.all / counts.undesirable, counts.all / counts.desirable])
        metrics.mean("rewards/margins", float((rewards * shares[labels.long()]).sum()), len(rewards))
    return losses.sum() / counts.all, metrics
