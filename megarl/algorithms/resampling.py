"""Resampling (PF-PPO): the batch is sampled from itself, to prefer samples with a trustworthy reward.

    weights = chosen.function(scores, ...)            # one per sample of the whole batch
    copies = resampled(weights, seed)                 # copies of each sample; they add up to the batch

A sample with two copies counts twice in the loss and in the loss's divisor (`megarl.algorithms.aggregation`): the same
as training on both copies, at the cost of one.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from pydantic import Field, NonNegativeFloat

from megarl.algorithms.lazy import Tensor, torch
from megarl.algorithms.registry import Registry, Settings, Spec
from megarl.algorithms.user_code import form, located, misfit

if TYPE_CHECKING:
    from megarl.config.base import ComponentSection

#: fn(scores float64 [B], *, its settings) -> weights [B], not negative
RESAMPLING = Registry("resampling", "algorithm.resampling.name", Spec, by_name=True)


class PowerSettings(Settings):
    """The power of its score with which a sample is weighted in resampling."""

    power: NonNegativeFloat = Field(2.0, description="exponent of abs(score)")


@RESAMPLING.register("none")
def none(scores: Tensor) -> Tensor:
    """Return equal weights of all samples; pipelines omit the resampling node in this case."""
    return torch.ones_like(scores)


@RESAMPLING.register("pow", settings=PowerSettings)
def pow_(scores: Tensor, *, power: float) -> Tensor:
    """Return the sampling weights abs(score) ** power.

    >>> pow_(torch.tensor([-2.0, 0.5]), power=2.0)
    tensor([4.0000, 0.2500])
    """
    return scores.abs().pow(power)


@RESAMPLING.register("max_min")
def max_min(scores: Tensor) -> Tensor:
    """Return 1 for the largest and the smallest score of the batch, 0 for all others.

    >>> max_min(torch.tensor([0.0, 0.5, 1.0, 1.0]))
    tensor([1., 0., 1., 1.])
    """
    return ((scores == scores.max()) | (scores == scores.min())).to(scores.dtype)


@RESAMPLING.register("max_random")
def max_random(scores: Tensor) -> Tensor:
    """Return 0.4 for the largest score of the batch, 0.1 for all other scores.

    >>> max_random(torch.tensor([0.0, 1.0]))
    tensor([0.1000, 0.4000])
    """
    return torch.full_like(scores, 0.1).masked_fill(scores == scores.max(), 0.4)


def resampled(section: ComponentSection, scores: Tensor, seed: int) -> Tensor:
    """Return how often each sample is chosen in B random choices, int64 [B], for B samples.

    Choices are independent and with replacement, with probabilities proportional to the weights plus 1e-8: if all
    weights are 0, all samples are equally likely.

    Args:
        section: `algorithm.resampling`.
        scores: float [B] of all unmasked samples of the batch, in an order that does not depend on ranks.
        seed: seed of the random choices.

    Source: PF-PPO (arXiv 2409.06957); the weights are those of verl's `pf_ppo`.
    """
    import numpy as np

    if not len(scores):
        return torch.zeros(0, dtype=torch.int64)
    chosen = RESAMPLING.choose(section)
    with located(RESAMPLING.kind, chosen.function):
        weights = chosen.function(scores.double(), **chosen.own)
    fits = isinstance(weights, torch.Tensor) and weights.shape == scores.shape
    if not fits or not bool((weights.isfinite() & (weights >= 0)).all()):
        numbers = f": {weights.tolist()[:8]}" if isinstance(weights, torch.Tensor) else ""
        raise misfit(
            RESAMPLING.kind,
            chosen.function,
            "does not return one finite, non-negative weight per sample",
            found=form(weights) + numbers,
            allowed=f"a tensor of {len(scores)} non-negative numbers",
            fix="return, for example, scores.abs()",
        )
    share = weights.double().numpy() + 1e-8
    counts = np.random.Generator(np.random.PCG64(seed)).multinomial(len(scores), share / share.sum())
    return torch.from_numpy(counts)
