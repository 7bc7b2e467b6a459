"""Means and variances over groups and over all ranks, whitening, and the explained variance of a critic."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from megarl.algorithms.lazy import Tensor, no_grad, torch
from megarl.algorithms.rows import Rows, all_true
from megarl.system.errors import UserError

#: Added to a group's standard deviation before dividing by it.
EPS = 1e-6

#: Adds a small float64 tensor over all ranks that share the mini-batch and returns the total.
AllSum: TypeAlias = "Callable[[Tensor], Tensor]"


def one_rank(values: Tensor) -> Tensor:
    """Return `values`: the `AllSum` of a single process."""
    return values


def group_index(uid: Sequence[Hashable]) -> tuple[Tensor, dict[Hashable, int]]:
    """Number groups in order of appearance; return each sample's group number, int64 [B], and the numbers by name."""
    numbers: dict[Hashable, int] = {}
    return torch.tensor([numbers.setdefault(u, len(numbers)) for u in uid], dtype=torch.int64), numbers


@dataclass(frozen=True)
class GroupStats:
    """Statistics of B scores by group; fully masked samples are excluded from all statistics."""

    index: Tensor  # int64 [B], group number of each sample
    live: Tensor  # bool [B], samples with a valid token
    count: Tensor  # float64 [B], live samples in the sample's group
    mean: Tensor  # float64 [B], mean score of the live samples in the sample's group (0 without any)
    scores: Tensor  # float64 [B], zero for samples that are not live

    @classmethod
    def of(cls, scores: Tensor, live: Tensor, uid: Sequence[Hashable], *, allow_singleton: bool) -> GroupStats:
        """Group `scores` [B] by `uid` (B values); `live`: bool [B]. A group must not be split over ranks."""
        if len(uid) != len(scores):
            raise ValueError(f"the number of uids must be the number of samples, {len(scores)}, got {len(uid)}")
        index, numbers = group_index(uid)
        sizes = torch.bincount(index, minlength=len(numbers))
        if not allow_singleton and bool((sizes == 1).any()):
            singletons = [u for u, number in numbers.items() if sizes[number] == 1]
            raise UserError(
                f"prompt groups with only one sample, which has nothing to be compared with: {len(singletons)}",
                where="algorithm.advantage.allow_singleton",
                found=singletons[0],
                fix="raise rollout.sampling.n to 2 or more, or set allow_singleton: true (their advantage is then 0)",
            )
        index = index.to(scores.device)
        scores = torch.where(live, scores.double(), 0)
        count = _by_group(live.double(), index, len(numbers))
        mean = _by_group(scores, index, len(numbers)) / count.clamp(min=1)
        return cls(index, live, count[index], mean[index], scores)

    @property
    def centred(self) -> Tensor:
        """score - group mean, float64 [B]; zero if the sample is fully masked or the only unmasked one in its group."""
        return torch.where(self.live & (self.count > 1), self.scores - self.mean, 0)

    @property
    def std(self) -> Tensor:
        """Unbiased standard deviation of the scores in the sample's group, float64 [B]; zero for groups with one live
        sample (a sample with a valid token)."""
        return (self.sum(self.centred.square()) / (self.count - 1).clamp(min=1)).sqrt()

    @property
    def standardised(self) -> Tensor:
        """(score - group mean) / (group std + 1e-6), float64 [B]; 0 for the same samples as `centred`."""
        return self.centred / (self.std + EPS)

    def sum(self, values: Tensor) -> Tensor:
        """Return, for each sample, the sum of `values` [B] over its group, float64 [B]."""
        return _by_group(values.double(), self.index, self._size)[self.index]

    def largest(self, values: Tensor, among: Tensor) -> Tensor:
        """Return, for each sample, the largest of `values` [B] in its group where `among` holds, float64 [B]; else
        -inf."""
        chosen = torch.where(among, values.double(), -torch.inf)
        most = chosen.new_full((self._size,), -torch.inf).scatter_reduce(0, self.index, chosen, "amax")
        return most[self.index]

    @property
    def _size(self) -> int:
        return int(self.index.max()) + 1 if len(self.index) else 0


def _by_group(values: Tensor, index: Tensor, n: int) -> Tensor:
    return torch.zeros(n, dtype=values.dtype, device=values.device).index_add_(0, index, values)


def whiten_(
    values: Tensor,
    mask: Tensor,
    rows: Rows,
    all_sum: AllSum = one_rank,
    *,
    out: Tensor | None = None,
) -> Tensor:
    """Compute (x - mean) / sqrt(var + 1e-8) over the valid tokens of all ranks; zero elsewhere.

    The variance is unbiased. With fewer than two valid tokens, all results are zero.

    Args:
        values: padded or packed, contiguous, zero where `mask` is False.
        mask: bool, same shape.
        rows: rows of `mask`.
        all_sum: adds over ranks; every rank must call it.
        out: output tensor, contiguous; None: write to `values`.
    """
    flat, valid, target = values.view(-1), mask.reshape(-1), (values if out is None else out).view(-1)
    blocks = [tokens for *_, tokens in rows.blocks()]
    moments = [_moments(flat[tokens], valid[tokens]) for tokens in blocks]
    counts, means, squares = torch.tensor(moments, dtype=torch.float64).view(-1, 3).unbind(1)
    count, total = all_sum(torch.stack([counts.sum(), counts @ means])).tolist()
    mean = total / max(count, 1)
    around_mean = squares.sum() + counts @ (means - mean).square()
    variance = float(all_sum(around_mean[None])) / max(count - 1, 1)
    scale = 0.0 if count < 2 else (variance + 1e-8) ** -0.5
    for tokens, (n_valid, *_) in zip(blocks, moments, strict=True):
        part = torch.sub(flat[tokens], mean, out=target[tokens]).mul_(scale)
        if n_valid < len(part):
            part.mul_(valid[tokens])
    return values if out is None else out


def _moments(values: Tensor, valid: Tensor) -> tuple[float, float, float]:
    """Return the number of valid values, their mean and the sum of squares around it; other values must be zero."""
    whole = all_true(valid)
    count = len(valid) if whole else int(valid.sum())
    mean = float(values.sum()) / max(count, 1)
    centred = values - mean
    if not whole:
        centred.mul_(valid)
    return count, mean, float(torch.dot(centred, centred))


_NOTHING = 1e-8  # variance that rounding can give equal float32 returns


@no_grad
def explained_variance(values: Tensor, returns: Tensor, mask: Tensor, *, all_sum: AllSum = one_rank) -> float | None:
    """Compute 1 - Var(R - V) / Var(R): 1 for a perfect critic, 0 for a constant one, negative for a worse one.

    Both variances are in float64 over all valid tokens of all ranks together, not averages of per-rank values.

    Args:
        values, returns: float [N] or [B, T], predictions and targets.
        mask: bool, same shape.
        all_sum: adds over ranks.

    Returns:
        The explained share; None if the returns do not vary (variance up to 1e-8).

    >>> all_tokens = torch.ones(4, dtype=torch.bool)
    >>> explained_variance(torch.tensor([0., 0., 1., 1.]), torch.tensor([0., 1., 2., 3.]), all_tokens)
    0.6
    """
    seen = returns[mask].double()
    pairs = torch.stack([seen, seen - values[mask].double()])
    count, *sums = all_sum(torch.cat([pairs.new_tensor([pairs.shape[1]]), pairs.sum(1)]).cpu()).tolist()
    if count == 0:
        return None
    means = pairs.new_tensor(sums) / count
    total, left = (all_sum((pairs - means[:, None]).square().sum(1).cpu()) / count).tolist()
    return 1 - left / total if total > _NOTHING else None
