"""Divergences between the distributions of a teacher and the policy.

A divergence is a sum over tokens; the registered function returns its terms. The tokens are the whole vocabulary, or
the teacher's k most likely ones. In the second case `tail` sets how all other tokens count: as one more token
(`bucket`), not at all after both models are renormalised (`renormalise`), or not at all (`ignore`).
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Literal

from pydantic import Field, PositiveInt

from megarl.algorithms.kl import KL, full
from megarl.algorithms.lazy import Tensor, torch
from megarl.algorithms.registry import Settings
from megarl.algorithms.user_code import check_tokens, located

if TYPE_CHECKING:
    from megarl.algorithms.registry import Chosen
    from megarl.config.base import ComponentSection

#: Log-prob of an empty tail: its exponential is 0 in every dtype, and products with it are finite.
EMPTY = -1e4


class DivergenceSettings(Settings):
    """The tokens over which the distributions of teacher and policy are compared."""

    topk: PositiveInt | None = Field(
        64,
        description="the teacher's likeliest tokens, which are compared; null: the whole vocabulary",
    )
    tail: Literal["bucket", "renormalise", "ignore"] = Field(
        "bucket",
        description="all other tokens. bucket: counted as one; renormalise: left out, and the probabilities of the "
        "likeliest divided by their sum; ignore: left out, and a negative sum counts 0",
    )
    log_prob_min_clamp: float | None = Field(
        None, lt=0, description="lower bound of both models' log-probs, as -10; null: none"
    )


class JSDSettings(DivergenceSettings):
    """The settings of the generalised Jensen-Shannon divergence of teacher and policy."""

    beta: float = Field(
        0.5, ge=0, le=1, description="share of the teacher in the mixture; 0: forward_kl, 1: reverse_kl, as in TRL"
    )


class ForwardTopKSettings(DivergenceSettings):
    """The settings of the divergence `forward_kl_topk`, which is `forward_kl` with verl's defaults."""

    topk: PositiveInt | None = Field(32, description="as for forward_kl")
    tail: Literal["bucket", "renormalise", "ignore"] = Field("ignore", description="as for forward_kl")


def chosen_divergence(section: ComponentSection) -> Chosen | None:
    """Return the divergence that the section names, or None for an estimator that uses the sampled token only."""
    chosen = KL.choose(section, "algorithm.distillation")
    if not chosen.spec.distributions:
        return None
    assert isinstance(chosen.settings, DivergenceSettings), "registered with distributions=True"
    return chosen


@KL.register("forward_kl", settings=DivergenceSettings, distributions=True)
def forward_kl(teacher: Tensor, policy: Tensor) -> Tensor:
    """Return the terms p (log p - log q) of KL(teacher || policy).

    Args:
        teacher: float [..., K], log p of each token.
        policy: same shape, log q, differentiable.

    >>> import torch
    >>> p, q = torch.tensor([0.5, 0.5]).log(), torch.tensor([0.25, 0.75]).log()
    >>> round(float(forward_kl(p, q).sum()), 4), round(float(reverse_kl(p, q).sum()), 4)
    (0.1438, 0.1308)
    """
    return teacher.exp() * (teacher - policy)


@KL.register("forward_kl_topk", settings=ForwardTopKSettings, distributions=True)
def forward_kl_topk(teacher: Tensor, policy: Tensor) -> Tensor:
    """Return `forward_kl` with the defaults of verl's estimator `forward_kl_topk`."""
    return forward_kl(teacher, policy)


@KL.register("reverse_kl", settings=DivergenceSettings, distributions=True)
def reverse_kl(teacher: Tensor, policy: Tensor) -> Tensor:
    """Return q (log q - log p) of each token of the vocabulary, with the policy's q and the teacher's p: the terms of
    KL(policy || teacher). `teacher` is log p and `policy` is log q, float [..., K].
    """
    return full(teacher, policy)


@KL.register("jsd", settings=JSDSettings, distributions=True)
def jsd(teacher: Tensor, policy: Tensor, *, beta: float) -> Tensor:
    """Return the terms beta p log(p / m) + (1 - beta) q log(q / m), with m = beta p + (1 - beta) q.

    At beta 0 and 1 these terms would be zero: return those of the forward and of the reverse KL instead, as TRL's GKD.
    Source: GKD (arXiv 2306.13649).

    Args:
        teacher: float [..., K], log p of each token.
        policy: same shape, log q, differentiable.
    """
    if beta == 0:
        return forward_kl(teacher, policy)
    if beta == 1:
        return reverse_kl(teacher, policy)
    mixture = torch.logaddexp(teacher + math.log(beta), policy + math.log1p(-beta))
    return beta * forward_kl(teacher, mixture) + (1 - beta) * forward_kl(policy, mixture)


def divergence(chosen: Chosen, teacher: Tensor, policy: Tensor) -> Tensor:
    """Sum a divergence's terms over the teacher's most likely tokens and the tail, [N].

    Args:
        chosen: from `chosen_divergence`.
        teacher: float [N, K + 1], log-probs of the K tokens, and of all others together.
        policy: same shape and tokens, differentiable.
    """
    settings: DivergenceSettings = chosen.settings
    if settings.tail != "bucket":
        teacher, policy = teacher[:, :-1], policy[:, :-1]
    if settings.tail == "renormalise":
        teacher, policy = teacher.log_softmax(1), policy.log_softmax(1)
    total = terms(chosen, teacher, policy).sum(1)
    return total.clamp(min=0) if settings.tail == "ignore" else total


def terms(chosen: Chosen, teacher: Tensor, policy: Tensor) -> Tensor:
    """Return the divergence's terms from both models' log-probs [N, K] of the same tokens; first raise them to
    `log_prob_min_clamp` if it is set."""
    settings = chosen.settings.model_dump(exclude=set(DivergenceSettings.model_fields))
    floor = chosen.settings.log_prob_min_clamp
    if floor is not None:
        teacher, policy = teacher.clamp(min=floor), policy.clamp(min=floor)
    with located(KL.kind, chosen.function):
        result = chosen.function(teacher, policy, **settings)
    check_tokens(KL.kind, chosen.function, "term", result, policy, inputs=(teacher, policy))
    return result
