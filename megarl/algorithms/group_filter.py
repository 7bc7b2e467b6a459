"""Filters of samples and prompt groups: groups that carry a signal, accuracy bounds, responses that ended."""

from __future__ import annotations

import math
from collections.abc import Hashable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from pydantic import Field

from megarl.algorithms.lazy import Tensor, torch
from megarl.algorithms.registry import Registry, Settings, Spec
from megarl.algorithms.stats import group_index
from megarl.algorithms.user_code import form, located, misfit
from megarl.system.errors import ConfigError

if TYPE_CHECKING:
    from megarl.config.base import ComponentSection

#: Fields that every filter may name as parameters.
OFFERED = ("mask", "offsets", "live")
#: fn(score, uid, *, named fields of OFFERED, the fields that it reads, its settings) -> bool [B], which samples are
#: kept
FILTERS = Registry("sample filter", "algorithm.filter.name", Spec, by_name=True)


class BoundsSettings(Settings):
    """Bounds on the mean score of a kept group, and whether responses that a limit cut are left out."""

    low: float | None = Field(None, description="smallest mean score of a group that is kept; null: no bound")
    high: float | None = Field(None, description="largest mean score of a group that is kept; null: no bound")
    truncated: bool = Field(False, description="leave out responses that a limit of tokens or seconds cut")

    def problems(self, path: str) -> list[ConfigError]:
        """Return an error if `low` is above `high`."""
        if self.low is None or self.high is None or self.low <= self.high:
            return []
        return [
            ConfigError(
                f"no group has a mean score between {self.low} and {self.high}",
                where=f"{path}.low",
                found=self.low,
                allowed=f"number up to {self.high}",
                fix="swap low and high",
            )
        ]


def live_rows(mask: Tensor, offsets: Tensor) -> Tensor:
    """Return which samples have a trained token, bool [B]; an episode whose environment failed has none.

    Args:
        mask: bool [N].
        offsets: int64 [B + 1].

    >>> live_rows(torch.tensor([False, True, False]), torch.tensor([0, 2, 3])).tolist()
    [True, False]
    """
    before = torch.cat([offsets.new_zeros(1), mask.cumsum(0)])
    return before[offsets[1:]] > before[offsets[:-1]]


def group_filter(metric: Tensor, uid: Sequence[Hashable], *, live: Tensor | None = None) -> Tensor:
    """Return which samples belong to a group whose metric varies, bool [B] (DAPO's dynamic sampling).

    Variation is tested on the values themselves (for a 0/1 metric: 0 < successes < G), never on a rounded variance.

    Args:
        metric: float [B], usually the score.
        uid: B group names.
        live: bool [B], samples whose metric counts; None: all.

    Source: DAPO (arXiv 2503.14476), section 3.2.

    >>> group_filter(torch.tensor([1.0, 1.0, 0.0, 1.0]), ["a", "a", "b", "b"]).tolist()
    [False, False, True, True]
    """
    index, groups = _numbers(uid, metric)
    values = metric.double()
    low = values if live is None else values.masked_fill(~live, math.inf)
    high = values if live is None else values.masked_fill(~live, -math.inf)
    least = values.new_zeros(groups).scatter_reduce(0, index, low, "amin", include_self=False)
    most = values.new_zeros(groups).scatter_reduce(0, index, high, "amax", include_self=False)
    return (least < most)[index]


def accuracy_filter(
    metric: Tensor,
    uid: Sequence[Hashable],
    *,
    low: float | None = None,
    high: float | None = None,
    live: Tensor | None = None,
) -> Tensor:
    """Return which samples belong to a group with low <= mean metric <= high, bool [B].

    Sums are compared with bound * group size, up to rounding errors: 7 successes of 10 are not below 0.7.

    Args:
        metric: float [B], usually the score.
        uid: B group names.
        low: smallest group mean to keep; None: no bound.
        high: largest group mean to keep; None: no bound.
        live: bool [B], samples whose metric counts; None: all. A group without such a sample is kept.

    >>> accuracy_filter(torch.tensor([1.0, 1.0, 0.0, 1.0]), ["a", "a", "b", "b"], high=0.9).tolist()
    [False, False, True, True]
    """
    index, groups = _numbers(uid, metric)
    values = metric.double() if live is None else metric.double().masked_fill(~live, 0.0)
    total = metric.new_zeros(groups, dtype=torch.float64).index_add_(0, index, values)
    size = torch.bincount(index if live is None else index[live], minlength=groups).double()
    slack = 1e-9 * size
    keep = torch.ones(groups, dtype=torch.bool, device=metric.device)
    if low is not None:
        keep &= total >= low * size - slack
    if high is not None:
        keep &= total <= high * size + slack
    return keep[index]


def informative_groups(
    metric: Tensor,
    uid: Sequence[Hashable],
    *,
    low: float | None = None,
    high: float | None = None,
    live: Tensor | None = None,
) -> Tensor:
    """Return which samples dynamic sampling keeps, bool [B]: by `accuracy_filter` if a bound is set, else
    `group_filter`.

    A group without a sample that counts is dropped in either case. Source of the bounds: SimpleVLA-RL (arXiv
    2509.09674), where both are inclusive.

    Args:
        metric: float [B], usually the score.
        uid: B group names.
        low, high: smallest and largest group mean to keep; None: no bound.
        live: bool [B], samples whose metric counts; None: all.
    """
    if low is None and high is None:
        return group_filter(metric, uid, live=live)
    keep = accuracy_filter(metric, uid, low=low, high=high, live=live)
    return keep if live is None else keep & _any_in_group(live, uid)


def uncut_groups(
    finish_step: Tensor, max_steps: Tensor, uid: Sequence[Hashable], *, live: Tensor | None = None
) -> Tensor:
    """Return which samples belong to a group where no episode used all its environment steps, successful or not.

    Args:
        finish_step: int [B], environment steps that each episode executed.
        max_steps: int [B], limit of each episode's environment steps.
        uid: B group names.
        live: bool [B], samples that count; None: all.

    >>> uncut_groups(torch.tensor([5, 9, 9, 3]), torch.tensor([9, 9, 10, 10]), ["a", "a", "b", "b"]).tolist()
    [False, False, True, True]
    """
    cut = finish_step >= max_steps
    return ~_any_in_group(cut if live is None else cut & live, uid)


@FILTERS.register("bounds", settings=BoundsSettings, reads=("finish_reason",))
def bounds(
    score: Tensor,
    uid: Sequence[Hashable],
    *,
    live: Tensor | None,
    finish_reason: Sequence[str],
    low: float | None,
    high: float | None,
    truncated: bool,
) -> Tensor:
    """Return which samples `accuracy_filter` and, with `truncated`, `truncated_filter` keep, bool [B]."""
    keep = accuracy_filter(score, uid, low=low, high=high, live=live)
    return keep & truncated_filter(finish_reason) if truncated else keep


def kept_samples(
    section: ComponentSection, score: Tensor, uid: Sequence[Hashable], fields: Mapping[str, Any]
) -> Tensor:
    """Return which samples the filter of `algorithm.filter` keeps, bool [B].

    Args:
        section: names the filter and gives its settings.
        score: float [B].
        uid: B group names.
        fields: `mask` (bool [N]), `offsets` (int64 [B + 1]) and `live` (bool [B] or None), which the filter gets if its
            parameters name them, and the fields that the filter declares.
    """
    chosen = FILTERS.choose(section)
    named = FILTERS.parameters(section.component)
    given = {key: value for key, value in fields.items() if key not in OFFERED or key in named}
    with located(FILTERS.kind, chosen.function):
        keep = chosen.function(score, uid, **given, **chosen.own)
    is_tensor = isinstance(keep, torch.Tensor)
    if not (is_tensor and keep.dtype == torch.bool and keep.shape == score.shape):
        raise misfit(
            FILTERS.kind,
            chosen.function,
            "does not return one bool per sample",
            found=form(keep),
            allowed=f"a bool tensor of shape {list(score.shape)}",
            fix="return one true or false per sample, for example offsets.diff() >= 2",
        )
    return keep


def truncated_filter(finish_reason: Sequence[str]) -> Tensor:
    """Return which responses ended by themselves ("stop"), not at a limit of tokens or seconds, bool [B].

    Source: DAPO (arXiv 2503.14476), overlong filtering.
    """
    return torch.tensor([reason == "stop" for reason in finish_reason], dtype=torch.bool)


def _numbers(uid: Sequence[Hashable], like: Tensor) -> tuple[Tensor, int]:
    """Return the group number of each sample on the device of `like`, and the number of groups."""
    index, numbers = group_index(uid)
    return index.to(like.device), len(numbers)


def _any_in_group(flags: Tensor, uid: Sequence[Hashable]) -> Tensor:
    """Return, for each sample, whether any sample of its group is flagged; bool [B]."""
    index, groups = _numbers(uid, flags)
    return torch.bincount(index[flags], minlength=groups)[index] > 0


def score_histogram(groups: Sequence[Sequence[float]]) -> dict[str, int]:
    """Count the groups whose samples all have the lowest score, lie in between, or all have the highest.

    The error for a run with too few informative groups shows these counts.

    Args:
        groups: the scores of each group's samples; at least one group.

    >>> score_histogram([[-1.0, -1.0], [-1.0, 1.0], [1.0, 1.0], [1.0, 1.0]])
    {'all -1': 1, 'between': 1, 'all 1': 2}
    """
    lowest, highest = min(map(min, groups)), max(map(max, groups))
    bottom, top = f"all {lowest:.6g}", f"all {highest:.6g}"
    counts = {bottom: 0, "between": 0, top: 0}
    for scores in groups:
        counts[bottom if max(scores) == lowest else top if min(scores) == highest else "between"] += 1
    return counts
