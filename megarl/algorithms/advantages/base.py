"""Common parts of all advantage estimators: the registry, the result type, and steps of those that compare scores.

An estimator is `fn(fields and settings by name) -> Estimate`; its parameters name the batch fields and settings that it
reads. Most read

    token_rewards     float [N] or [B, T]
    mask              bool, same shape: valid tokens
    uid               B group names; a group is not split over ranks
    offsets           int64 [B + 1] for the packed form [N]
    allow_singleton   accept groups of one sample, with A = 0; otherwise such a group raises a UserError
    all_sum           adds a small tensor over ranks
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from pydantic import Field

from megarl.algorithms.lazy import Tensor, torch
from megarl.algorithms.registry import Registry, Settings, Spec
from megarl.algorithms.rows import Rows
from megarl.algorithms.stats import GroupStats
from megarl.algorithms.user_code import check_tokens, form, misfit

ADVANTAGES = Registry("advantage estimator", "algorithm.advantage.name", Spec)


class GroupSettings(Settings):
    """Settings of an estimator that compares the samples of a prompt with each other."""

    allow_singleton: bool = Field(False, description="accept groups of one sample (advantage 0)")


class NormSettings(GroupSettings):
    """Settings of an estimator that may divide score differences by the group's standard deviation."""

    norm_by_std: bool = Field(True, description="divide by the group's standard deviation; false gives Dr. GRPO")


class Estimate(NamedTuple):
    """The result of an estimator, two tensors in the shape of the mask, zero where the mask is False."""

    advantages: Tensor  # weight of each token's log-prob gradient
    returns: Tensor  # regression target of a critic; estimators without a critic may repeat their advantages


def checked_estimate(
    function: Callable[..., Any], result: Any, fields: Mapping[str, Any], given: Iterable[Any]
) -> Estimate:
    """Check the return value of an estimator and return it as an `Estimate`.

    Args:
        fields: batch fields, with `mask`.
        given: the arguments that the estimator was called with.
    """
    mask, offsets, inputs = fields["mask"], fields.get("offsets"), list(given)
    if not (isinstance(result, tuple | list) and len(result) == 2):
        raise misfit(
            ADVANTAGES.kind,
            function,
            "does not return a pair (advantages, returns)",
            found=form(result),
            allowed=f"Estimate(advantages, returns), two floating tensors of shape {list(mask.shape)}",
            fix="return Estimate(advantages, advantages) where no critic is trained",
        )
    estimate = Estimate(*result)
    for noun, value in estimate._asdict().items():
        per_sample = None if offsets is None else len(offsets) - 1
        check_tokens(ADVANTAGES.kind, function, noun, value, mask, inputs=inputs, per_sample=per_sample)
    return estimate


def score_groups(
    token_rewards: Tensor, mask: Tensor, uid: Sequence[Hashable], offsets: Tensor | None, allow_singleton: bool
) -> tuple[Rows, GroupStats]:
    """Return the layout of the samples in `mask`, and mean and deviation of the scores in each group.

    A sample's score is the sum of its valid token rewards.
    """
    rows = Rows.of(mask, offsets)
    return rows, GroupStats.of(*rows.masked_sum(token_rewards, mask), uid, allow_singleton=allow_singleton)


def for_all_tokens(per_sample: Tensor, rows: Rows, mask: Tensor, token_rewards: Tensor) -> Estimate:
    """Give each valid token the advantage of its sample, `per_sample` [B]. The result has the dtype of the token
    rewards, but at least float32."""
    dtype = torch.promote_types(token_rewards.dtype, torch.float32)
    advantages = rows.spread(per_sample.to(dtype), mask)
    return Estimate(advantages, advantages)
