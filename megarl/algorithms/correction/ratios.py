"""The ratio of two policies on the same tokens, on which all of rollout correction is built, and importance weights."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from megarl.algorithms.rows import Rows, at_least_float32

LIMIT = 20.0


@dataclass(frozen=True)
class Ratios:
    """log rho of N tokens in B rows, rho = pi / pi_rollout, without gradient."""

    rows: Rows
    mask: Tensor  # bool [N], tokens that count
    raw: Tensor  # float [N], log pi - log pi_rollout, not clamped; zero where the mask is False

    @classmethod
    @torch.no_grad()
    def of(cls, logp: Tensor, rollout_logp: Tensor, mask: Tensor, offsets: Tensor | None = None) -> Ratios:
        """Build from log-probs [N] with offsets int64 [B + 1], or [B, T]. Values hidden by the mask (bool, same shape)
        are not read.

        >>> mask = torch.tensor([[True, True, False]])
        >>> r = Ratios.of(torch.tensor([[-1.0, -2.0, 5.0]]), torch.tensor([[-1.5, -1.0, float("nan")]]), mask)
        >>> r.raw.tolist(), r.total.tolist(), r.count.tolist()
        ([0.5, -1.0, 0.0], [-0.5], [2.0])
        """
        rows, flat = Rows.of(mask, offsets), mask.reshape(-1)
        difference = (at_least_float32(logp) - at_least_float32(rollout_logp)).reshape(-1)
        return cls(rows, flat, difference.masked_fill_(~flat, 0))

    @cached_property
    def log(self) -> Tensor:
        """log rho [N], clamped to +-LIMIT."""
        return self.raw.clamp(-LIMIT, LIMIT)

    @cached_property
    def excess(self) -> Tensor:
        """rho - 1 [N], without cancellation near rho = 1."""
        return self.log.expm1()

    @cached_property
    def rho(self) -> Tensor:
        """The probability ratio rho of each token, [N]; 1 where the mask is False."""
        return self.excess + 1

    @cached_property
    def count(self) -> Tensor:
        """Number of valid tokens of each row [B], as floats in the dtype of the log-ratios."""
        return self.rows.counts(self.mask).to(self.raw.dtype)

    @cached_property
    def live(self) -> Tensor:
        """Whether each row has a valid token, bool [B]."""
        return self.count > 0

    @cached_property
    def total(self) -> Tensor:
        """Sum of log rho of each row, not clamped, [B]."""
        return self.rows.sum(self.raw)

    def mean_of(self, values: Tensor) -> Tensor:
        """Return the mean of `values` [N] (zero where masked) over each row's valid tokens, [B]; 0 for rows without
        valid tokens.
        """
        return self.rows.sum(values) / self.count.clamp(min=1)

    def max_of(self, values: Tensor) -> Tensor:
        """Return the largest valid value of each row, [B]; -inf for rows without valid tokens."""
        values = values.masked_fill(~self.mask, -torch.inf)
        if self.rows.width is not None:
            values = torch.nn.functional.pad(values.view(len(self.rows), self.rows.width), (0, 1), value=-torch.inf)
            return values.amax(1)
        if len(values) == 0:
            return values.new_full((len(self.rows),), -torch.inf)
        return torch.segment_reduce(values, "max", offsets=self.rows.offsets, initial=-torch.inf)


Threshold = float | Sequence[float]


def importance_weights(ratios: Ratios, level: str, threshold: Threshold) -> Tensor:
    """Return the importance weight of each token (level "token", [N]) or row ("sequence", [B]); 0 where masked.

    token: w_t = min(rho_t, C). sequence: w = min(exp(sum log rho), C). With `[low, high]` for C the weight is the ratio
    where it lies inside, and 0 outside. Sums are clamped to +-20 before the exponential.

    Raises:
        ValueError: level is neither token nor sequence.

    Source: truncated importance sampling (Ionides 2008, and "Your efficient RL framework secretly brings you
    off-policy RL training", Yao et al. 2025); two-sided: IcePop (Ring-1T report, arXiv 2510.18855).

    >>> import torch
    >>> r = Ratios.of(torch.log(torch.tensor([[0.5, 4.0]])), torch.zeros(1, 2), torch.ones(1, 2, dtype=torch.bool))
    >>> importance_weights(r, "token", 3.0).tolist(), importance_weights(r, "sequence", 3.0).tolist()
    ([0.5, 3.0], [2.0])
    >>> importance_weights(r, "token", [0.2, 3.0]).tolist()
    [0.5, 0.0]
    """
    if level not in ("token", "sequence"):
        raise ValueError(f"invalid level of importance weights: must be token or sequence, got {level!r}")
    tokens = level == "token"
    ratio = ratios.rho if tokens else ratios.total.clamp(-LIMIT, LIMIT).exp()
    return bounded(ratio, threshold).masked_fill(~(ratios.mask if tokens else ratios.live), 0)


def bounded(ratio: Tensor, threshold: Threshold) -> Tensor:
    """Return the ratio bounded by a threshold: min(ratio, threshold); for [low, high] the ratio inside, 0 outside."""
    if isinstance(threshold, Sequence):
        return ratio.masked_fill(is_truncated(ratio, threshold), 0)
    return ratio.clamp(max=threshold)


def is_truncated(ratio: Tensor, threshold: Threshold) -> Tensor:
    """Return which ratios lie outside of `threshold`, where `bounded` changes them; bool, same shape."""
    if isinstance(threshold, Sequence):
        low, high = threshold
        return (ratio < low) | (ratio > high)
    return ratio > threshold
