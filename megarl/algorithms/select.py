"""Selection of tokens of the mini-batch over all ranks: the k smallest keys, values within a mean; random keys."""

from __future__ import annotations

from megarl.algorithms.lazy import Tensor, torch
from megarl.algorithms.rows import Rows
from megarl.algorithms.stats import AllSum, one_rank

_DIGIT = 8
_LARGEST = 2**63 - 1


def smallest(keys: Tensor, among: Tensor, count: int, all_sum: AllSum = one_rank) -> Tensor:
    """Select the candidates whose keys are among the `count` smallest of all ranks: bool in the shape of `keys`.

    Equal keys are selected together, so the result does not depend on their order. The search takes eight sums over
    ranks for any number of tokens.

    Args:
        keys: int64, not negative.
        among: bool, same shape, the candidates.
        count: number to choose over all ranks, at least 1; if there are fewer candidates, all are chosen.
        all_sum: adds over ranks; every rank must call it.

    >>> smallest(torch.tensor([5, 1, 9, 3]), torch.tensor([True, True, True, False]), 2)
    tensor([ True,  True, False, False])
    """
    left, prefix, candidates = count, 0, keys[among]
    for shift in range(56, -1, -_DIGIT):
        digits = (candidates >> shift) & 255
        histogram = all_sum(torch.bincount(digits, minlength=256).double().cpu())
        below = histogram.cumsum(0)
        if float(below[-1]) < left:
            return among  # fewer than `count` candidates exist: all ranks see this in the first round, and return here
        digit = int((below < left).sum())
        left -= int(below[digit] - histogram[digit])
        prefix = prefix << _DIGIT | digit
        candidates = candidates[digits == digit]
    return among & (keys <= prefix)


def within_mean(values: Tensor, among: Tensor, limit: float, all_sum: AllSum = one_rank) -> Tensor:
    """Select the largest set of the smallest candidates, over all ranks, whose mean is at most `limit`: bool in the
    shape of `values`.

    Equal values are selected together. The search takes at most eight sums over ranks for any number of tokens.

    Args:
        values: float, not negative.
        among: bool, same shape, the candidates.
        all_sum: adds over ranks; every rank must call it.

    >>> within_mean(torch.tensor([0.0, 4.0, 1.0, 9.0]), torch.tensor([True, True, True, False]), 1.0)
    tensor([ True, False,  True, False])
    """
    keys = values.double().view(torch.int64)  # the bits of positive floats, as integers, have the same order
    prefix, count, total = 0, 0.0, 0.0
    candidates, numbers = keys[among], values.double()[among]
    for shift in range(56, -1, -_DIGIT):
        digits = (candidates >> shift) & 255
        bins = [torch.bincount(digits, weights, minlength=256) for weights in (torch.ones_like(numbers), numbers)]
        counts, totals = all_sum(torch.stack(bins).cpu()).cumsum(1)
        fits = total + totals <= limit * (count + counts)
        # the first digit at which the mean of the values up to and including this digit's is above the limit
        digit = int(fits.long().cumprod(0).sum())
        if digit == 256:
            return among & ((keys >> shift) <= (prefix << _DIGIT | 255))
        if digit:
            count, total = count + float(counts[digit - 1]), total + float(totals[digit - 1])
        prefix = prefix << _DIGIT | digit
        candidates, numbers = candidates[digits == digit], numbers[digits == digit]
    return among & (keys < prefix)


def descending(values: Tensor) -> Tensor:
    """Return int64 keys that order positive float values from the largest to the smallest."""
    # The bits of positive floats, as integers, have the same order.
    return _LARGEST - values.double().view(torch.int64)


def random_keys(seeds: Tensor, rows: Rows) -> Tensor:
    """Return a random key for every token, int64 [N], which depends only on its sequence's seed and its position.

    The same token of the same sample gets the same key in any split of the mini-batch.

    Args:
        seeds: int64 [B].
        rows: B sequences.
    """
    start = rows.expand(rows.offsets[:-1])
    x = rows.expand(seeds) + (torch.arange(len(start), device=seeds.device) - start) * -0x61C8864680B583EB
    # SplitMix64; multiplication wraps, and the masks turn arithmetic shifts into logical ones.
    x = (x ^ ((x >> 30) & 0x3FFFFFFFF)) * -0x40A7B892E31B1A47
    x = (x ^ ((x >> 27) & 0x1FFFFFFFFF)) * -0x6B2FB644ECCEEE15
    return (x ^ ((x >> 31) & 0x1FFFFFFFF)) & _LARGEST
