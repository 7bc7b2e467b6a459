"""Which prompt groups carry a signal (DAPO's dynamic sampling, accuracy bounds)."""

from __future__ import annotations

from collections.abc import Hashable, Sequence

import torch
from torch import Tensor


def group_filter(
    metric: Tensor, uid: Sequence[Hashable], *, low: float | None = None, high: float | None = None
) -> Tensor:
    """bool [B]: samples whose group's metric varies, and whose group mean is inside [low, high].

    Variation is tested on the values themselves (for a 0/1 metric: 0 < successes < G), never on a rounded variance.

    Args:
        metric: float [B], usually the score.
        uid: B group names.
        low: smallest group mean to keep; None: no bound.
        high: largest group mean to keep; None: no bound.

    Source: DAPO (arXiv 2503.14476), section 3.2.

    >>> group_filter(torch.tensor([1.0, 1.0, 0.0, 1.0]), ["a", "a", "b", "b"]).tolist()
    [False, False, True, True]
    """
    numbers: dict[Hashable, int] = {}
    index = torch.tensor([numbers.setdefault(u, len(numbers)) for u in uid], dtype=torch.int64, device=metric.device)
    values = metric.double()
    least = values.new_zeros(len(numbers)).scatter_reduce(0, index, values, "amin", include_self=False)
    most = values.new_zeros(len(numbers)).scatter_reduce(0, index, values, "amax", include_self=False)
    keep = least < most
    if low is not None or high is not None:
        mean = values.new_zeros(len(numbers)).scatter_reduce(0, index, values, "mean", include_self=False)
        keep &= (mean >= (-torch.inf if low is None else low)) & (mean <= (torch.inf if high is None else high))
    return keep[index]


def success_histogram(metric: Tensor, uid: Sequence[Hashable]) -> dict[str, int]:
    """Number of groups by mean metric, for the message of a run that finds no group with a signal.

    >>> success_histogram(torch.tensor([1.0, 1.0, 0.0, 1.0]), ["a", "a", "b", "b"])
    {'0': 0, '0..1': 1, '1': 1}
    """
    totals: dict[Hashable, list[float]] = {}
    for u, value in zip(uid, metric.tolist(), strict=True):
        totals.setdefault(u, []).append(value)
    means = [sum(values) / len(values) for values in totals.values()]
    return {
        "0": sum(mean <= 0 for mean in means),
        "0..1": sum(0 < mean < 1 for mean in means),
        "1": sum(mean >= 1 for mean in means),
    }
