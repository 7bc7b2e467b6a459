"""Sums from which the metrics of rollout correction are exact over micro-batches and ranks.

Blocks of tokens add to `Moments`; `bag` turns the moments into plain sums, minima and maxima of a `Metrics`, which
merge as all metrics do; `metrics.finish` computes the named metrics from the merged sums.
"""

from __future__ import annotations

import torch
from torch import Tensor

from megarl.algorithms.correction.ratios import LIMIT, Ratios
from megarl.system.metrics import Metrics

RAW = "_rollout_corr/"


class Moments:
    """Named float64 totals (`sum`), minima (`low`) and maxima (`high`), kept on the device until `bag`."""

    def __init__(self) -> None:
        self._sums: dict[str, list[Tensor]] = {}
        self._lows: dict[str, list[Tensor]] = {}
        self._highs: dict[str, list[Tensor]] = {}

    def sum(self, name: str, value: Tensor) -> None:
        """Add a scalar to a total."""
        self._sums.setdefault(name, []).append(value)

    def low(self, name: str, value: Tensor) -> None:
        """Keep the smallest scalar."""
        self._lows.setdefault(name, []).append(value)

    def high(self, name: str, value: Tensor) -> None:
        """Keep the largest scalar."""
        self._highs.setdefault(name, []).append(value)

    def bag(self) -> Metrics:
        """Return all sums, minima and maxima as `Metrics`, with one transfer from the device."""
        parts: list[Tensor] = []
        for scalars, reduce in ((self._sums, torch.sum), (self._lows, torch.amin), (self._highs, torch.amax)):
            parts += [reduce(torch.stack(values).double(), 0) for values in scalars.values()]
        numbers = iter(torch.stack(parts).tolist() if parts else [])
        metrics = Metrics()
        for kind, scalars in (("sum", self._sums), ("min", self._lows), ("max", self._highs)):
            for name in scalars:
                getattr(metrics, kind)(f"{RAW}{kind}/{name}", next(numbers))
        return metrics


def add_gap(moments: Moments, ratios: Ratios, logp: Tensor, rollout_logp: Tensor) -> None:
    """Add the statistics of the gap between two policies on the tokens of `ratios`; log-probs are flat [N].

    Sums are of rho - 1, not of rho: near rho = 1, the usual case, the metrics are differences of nearly equal sums.
    """
    if len(ratios.raw) == 0:
        return
    excess, mask = ratios.excess, ratios.mask
    hidden = ~mask
    moments.sum("tokens", ratios.count.sum())
    moments.sum("log", ratios.total.sum())
    moments.sum("excess", excess.sum())
    moments.sum("excess2", torch.dot(excess, excess))
    moments.sum("k3", (excess - ratios.log).sum())
    moments.low("excess", excess.masked_fill(hidden, torch.inf).amin())
    moments.high("excess", excess.masked_fill(hidden, -torch.inf).amax())
    moments.high("difference", ratios.raw.abs().amax())
    new, old = logp.masked_fill(hidden, -torch.inf), rollout_logp.masked_fill(hidden, -torch.inf)
    p, q = new.exp(), old.exp()
    for name, x in (("p", p), ("q", q)):
        moments.sum(name, x.sum())
        moments.sum(f"{name}2", torch.dot(x, x))
    p -= q
    moments.sum("pq2", torch.dot(p, p))
    _add_rows(moments, ratios, ratios.mean_of(old.masked_fill_(hidden, 0)))


def _add_rows(moments: Moments, ratios: Ratios, rollout_mean: Tensor) -> None:
    """Add perplexities and ratios of whole rows; `rollout_mean` [B] is the mean rollout log-prob."""
    live, difference = ratios.live, ratios.total / ratios.count.clamp(min=1)
    excess = ratios.total.clamp(-LIMIT, LIMIT).expm1()
    moments.sum("rows", live.sum())
    moments.sum("row_excess", (2 * excess + excess.square()).sum())
    moments.sum("row_log", difference.sum())
    moments.sum("row_abs_log", difference.abs().sum())
    if len(live):
        moments.low("row_log", difference.masked_fill(~live, torch.inf).amin())
        moments.high("row_log", difference.masked_fill(~live, -torch.inf).amax())
    moments.sum("row_ratio", (torch.exp(-difference.clamp(-LIMIT, LIMIT)) * live).sum())
    for name, mean in (("ppl", rollout_mean + difference), ("rollout_ppl", rollout_mean)):
        # Bound the exponent: a text that the model finds impossible has no finite perplexity.
        moments.sum(name, (torch.exp(-mean.clamp(-LIMIT, LIMIT)) * live).sum())


def add_weights(moments: Moments, weights: Tensor, where: Tensor, truncated: Tensor) -> None:
    """Add importance weights [K] of tokens or sequences, of which `where` (bool [K]) are trained on."""
    if len(weights) == 0:
        return
    excess = (weights - 1).masked_fill_(~where, 0)
    moments.sum("items", where.sum())
    moments.sum("weight", excess.sum())
    moments.sum("weight2", torch.dot(excess, excess))
    moments.sum("truncated", (truncated & where).sum())
    moments.low("weight", weights.masked_fill(~where, torch.inf).amin())
    moments.high("weight", weights.masked_fill(~where, -torch.inf).amax())
