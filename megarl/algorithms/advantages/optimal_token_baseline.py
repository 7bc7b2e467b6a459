"""Advantage against a minimum-variance baseline for every token position."""

from __future__ import annotations

from collections.abc import Hashable, Sequence

from pydantic import Field

from megarl.algorithms.advantages.base import ADVANTAGES, Estimate, GroupSettings, score_groups
from megarl.algorithms.lazy import Tensor, no_grad, torch
from megarl.algorithms.rows import Rows, at_least_float32
from megarl.algorithms.scan import over_valid, suffix_sum
from megarl.algorithms.stats import GroupStats
from megarl.system.errors import ConfigError


class BaselineSettings(GroupSettings):
    """Settings of the optimal token baseline."""

    is_weighted: bool = Field(
        False, description="multiply the squared gradient norms by the squared weights of rollout_correction"
    )


@ADVANTAGES.register("optimal_token_baseline", settings=BaselineSettings)
@no_grad
def optimal_token_baseline(
    token_rewards: Tensor,
    old_logp: Tensor,
    sum_pi_squared: Tensor,
    mask: Tensor,
    uid: Sequence[Hashable],
    *,
    offsets: Tensor | None = None,
    is_weights: Tensor | None = None,
    allow_singleton: bool = False,
    is_weighted: bool = False,
) -> Estimate:
    """Compute A_t = G_t - B_t with B_t = sum W_t G_t / sum W_t over the group's samples with a valid token at position
    t.

    G_t is the sum of rewards from t on. W_t is the sum up to t of w = 1 - 2 pi(y) + sum_v pi(v)^2, the squared norm of
    the gradient of log pi(y) with respect to the logits. Positions count from the start of the response. At a position
    that only one sample of the group reaches, A_t is exactly 0: the tail of the longest response learns nothing.

    Rollout correction multiplies a token's loss, and so its gradient, by an importance weight. `is_weighted`
    multiplies w by the square of this weight, so that B_t has the least variance for the corrected gradient.

    Args:
        old_logp: same shape, log pi(y) of the sampled tokens.
        sum_pi_squared: same shape, sum over the vocabulary of pi(v)^2.
        is_weights: same shape as the mask, factors of the policy loss; needed with `is_weighted`.

    Source: Weaver and Tao's optimal baseline (UAI 2001) per position, with the gradient proxy of arXiv 2602.07078.
    Arguments and result: see `advantages.base`.
    """
    rows, groups = score_groups(token_rewards, mask, uid, offsets, allow_singleton)
    start = rows.expand(rows.offsets[:-1])
    place = torch.arange(len(start), device=mask.device) - start
    inputs = [token_rewards, old_logp, sum_pi_squared, *_squared(is_weights, is_weighted)]
    returns, weight, _ = _returns_and_weights(rows, mask, inputs)
    return _subtract_baseline(rows, groups, mask, returns, weight, place)


@ADVANTAGES.register("tir_optimal_token_baseline", settings=BaselineSettings)
@no_grad
def tir_optimal_token_baseline(
    token_rewards: Tensor,
    old_logp: Tensor,
    sum_pi_squared: Tensor,
    mask: Tensor,
    uid: Sequence[Hashable],
    *,
    offsets: Tensor | None = None,
    is_weights: Tensor | None = None,
    allow_singleton: bool = False,
    is_weighted: bool = False,
) -> Estimate:
    """Compute `optimal_token_baseline` with positions counted over valid tokens only, for responses with tool output.

    The k-th token that the policy wrote in one sample is compared with the k-th token in another sample, whatever text
    tools returned before. Arguments and source as for `optimal_token_baseline`; without holes in the mask both
    estimators are equal.
    """
    rows, groups = score_groups(token_rewards, mask, uid, offsets, allow_singleton)
    inputs = [token_rewards, old_logp, sum_pi_squared, *_squared(is_weights, is_weighted)]
    returns, weight, place = _returns_and_weights(rows, mask, inputs)
    return _subtract_baseline(rows, groups, mask, returns, weight, place.reshape(-1).long())


def _squared(is_weights: Tensor | None, wanted: bool) -> list[Tensor]:
    """Return a list with the squared importance weights, or an empty list if the baseline does not use them."""
    if not wanted:
        return []
    if is_weights is None:
        raise ConfigError(
            "is_weighted needs importance weights, but rollout_correction computes none",
            where="algorithm.advantage.is_weighted",
            found=True,
            allowed="false, or true with rollout_correction.is_level: token or sequence",
            fix="set a preset of rollout_correction, for example decoupled_token_is",
        )
    return [at_least_float32(is_weights).square()]


def _returns_and_weights(rows: Rows, mask: Tensor, inputs: list[Tensor]) -> list[Tensor]:
    """Return rewards to go, summed gradient proxies w, and positions among the valid tokens, in the shape of `mask`.

    `inputs`: token rewards, log-probs, sums of squared probabilities, and optionally squared importance weights.
    """

    def dense(rewards: Tensor, logp: Tensor, squares: Tensor, *more: Tensor) -> list[Tensor]:
        *weights, prefix = more
        # The first factor is at least (1 - pi)^2, so it must not become negative by rounding.
        proxy = (1 - 2 * logp.exp() + squares).clamp(min=0) * prefix
        for weight in weights:
            proxy = proxy * weight
        places = torch.arange(prefix.shape[1], device=prefix.device).to(rewards.dtype).expand_as(rewards)
        return [suffix_sum(rewards, 1.0), proxy.cumsum(1), places * prefix]

    return over_valid(dense, rows, mask, inputs, 3)


def _subtract_baseline(
    rows: Rows, groups: GroupStats, mask: Tensor, returns: Tensor, weight: Tensor, place: Tensor
) -> Estimate:
    """Subtract from the returns their weighted mean over the valid tokens of the same group and position.

    `weight` has the shape of the mask; `place` int64 [N] is the position of each token.
    """
    valid = mask.reshape(-1)
    width = int(place.max()) + 1 if len(place) else 1
    slot = (rows.expand(groups.index) * width + place)[valid]
    g, w = returns.reshape(-1)[valid].double(), weight.reshape(-1)[valid].double()
    size = (int(groups.index.max()) + 1 if len(groups.index) else 0) * width
    sums = torch.zeros(2, size, dtype=torch.float64, device=mask.device)
    sums[0].index_add_(0, slot, w * g)
    sums[1].index_add_(0, slot, w)
    # With all weights zero the clamp makes the baseline 0; these tokens have no gradient, so any value is right.
    baseline = sums[0] / sums[1].clamp(min=torch.finfo(torch.float64).tiny)
    advantages = torch.zeros_like(returns)
    advantages.view(-1)[valid] = (g - baseline[slot]).to(returns.dtype)
    return Estimate(advantages, returns)
