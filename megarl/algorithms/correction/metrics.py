"""Metrics of rollout correction, exact over micro-batches and ranks.

Blocks of tokens add to `Moments`; `bag` turns the moments into plain sums, minima and maxima of a `Metrics`, which
merge as all metrics do; `finish` computes the named metrics from the merged sums.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from megarl.algorithms.correction.ratios import LIMIT, Ratios
from megarl.system.metrics import Metrics

NAME = "rollout_corr/"
RAW = "_rollout_corr/"


class Moments:
    """Named float64 totals (`sum`), minima (`low`) and maxima (`high`), kept on the device until `bag` returns them."""

    def __init__(self) -> None:
        self._sums: dict[str, list[Tensor]] = {}
        self._lows: dict[str, list[Tensor]] = {}
        self._highs: dict[str, list[Tensor]] = {}

    def sum(self, name: str, value: Tensor) -> None:
        """Add a scalar to the total `name`."""
        self._sums.setdefault(name, []).append(value)

    def low(self, name: str, value: Tensor) -> None:
        """Update the minimum `name` with a scalar."""
        self._lows.setdefault(name, []).append(value)

    def high(self, name: str, value: Tensor) -> None:
        """Update the maximum `name` with a scalar."""
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
    """Add the statistics of whole samples: perplexities and ratios. `rollout_mean`: [B], mean rollout log-prob of each
    sample's tokens."""
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
    """Add importance weights [K] of tokens or sequences; `where` (bool [K]) marks those that are trained on."""
    if len(weights) == 0:
        return
    excess = (weights - 1).masked_fill_(~where, 0)
    moments.sum("items", where.sum())
    moments.sum("weight", excess.sum())
    moments.sum("weight2", torch.dot(excess, excess))
    moments.sum("truncated", (truncated & where).sum())
    moments.low("weight", weights.masked_fill(~where, torch.inf).amin())
    moments.high("weight", weights.masked_fill(~where, -torch.inf).amax())


def finish(metrics: Metrics) -> Metrics:
    """Replace the raw sums in `metrics`, merged over micro-batches and ranks, by the named metrics `rollout_corr/...`.

    rho = pi / pi_rollout is a token's ratio of the policy's and the rollout's probabilities.

    | metric | formula, over valid tokens unless noted |
    |---|---|
    | kl | E[log pi_rollout - log pi] |
    | k3_kl | E[rho - 1 - log rho] |
    | chi2_token, chi2_seq | E[rho^2] - 1; over sequences with their whole ratio |
    | ppl, rollout_ppl | mean over sequences of exp(-mean log-prob) |
    | ppl_ratio, log_ppl_diff | mean over sequences of exp(d) and d, d = mean(log pi_rollout - log pi) |
    | log_ppl_abs_diff, log_ppl_diff_min, log_ppl_diff_max | mean over sequences of abs(d); smallest and largest d |
    | ratio_min, ratio_mean, ratio_max, ratio_std | of rho |
    | ess | (sum rho)^2 / (n sum rho^2), 1 is best |
    | logp_diff_max | max of abs(log pi - log pi_rollout), not clamped |
    | prob_corr | Pearson correlation of pi and pi_rollout; omitted where one of them is the same at all tokens |
    | is_weight_min, _mean, _max, _std, is_ess, is_truncated | weights of trained items, before normalisation |
    | is_batch_norm | the factor that weights were divided by |
    | rejected, rejected_seqs | share of tokens; of sequences that lost every token |
    | rejected/NAME | share of tokens that the rule NAME rejects |

    Returns:
        The same `metrics`; without a valid token nothing is added.
    """
    raw: dict[str, dict[str, float]] = {"sum": {}, "min": {}, "max": {}}
    for name in [name for name in metrics if name.startswith(RAW)]:
        kind, value, _ = metrics.pop(name)
        raw[kind][name.removeprefix(f"{RAW}{kind}/")] = value
    total, low, high = raw["sum"], raw["min"], raw["max"]
    if total.get("tokens"):
        _gap(metrics, total, low, high)
        _rejection(metrics, total)
    if total.get("items"):
        _weights(metrics, total, low, high)
    return metrics


def _gap(metrics: Metrics, total: dict[str, float], low: dict[str, float], high: dict[str, float]) -> None:
    n, rows = total["tokens"], total["rows"]
    mean, square = total["excess"] / n, total["excess2"] / n
    second = 1 + 2 * mean + square
    numbers = {
        "kl": -total["log"] / n,
        "k3_kl": total["k3"] / n,
        "chi2_token": 2 * mean + square,
        "chi2_seq": total["row_excess"] / rows,
        "ppl": total["ppl"] / rows,
        "rollout_ppl": total["rollout_ppl"] / rows,
        "ppl_ratio": total["row_ratio"] / rows,
        "log_ppl_diff": -total["row_log"] / rows,
        "log_ppl_abs_diff": total["row_abs_log"] / rows,
        "ratio_mean": 1 + mean,
        "ratio_std": math.sqrt(max(square - mean * mean, 0.0)),
        "ess": (1 + mean) ** 2 / second if second else 0.0,
    }
    if (correlation := _correlation(total, n)) is not None:
        numbers["prob_corr"] = correlation
    for name, value in numbers.items():
        metrics.mean(NAME + name, value, 1)
    metrics.min(NAME + "ratio_min", 1 + low["excess"])
    metrics.max(NAME + "ratio_max", 1 + high["excess"])
    metrics.max(NAME + "logp_diff_max", high["difference"])
    metrics.min(NAME + "log_ppl_diff_min", -high["row_log"])
    metrics.max(NAME + "log_ppl_diff_max", -low["row_log"])


def _correlation(total: dict[str, float], n: float) -> float | None:
    """Return Pearson's correlation from E[p^2], E[q^2], E[(p - q)^2]; None if p or q is constant.

    cov(p, q) = (var p + var q - var(p - q)) / 2. Rounding errors of the variances enter only to second order, so that 1
    - 1e-6 can be distinguished from 1.
    """
    p, q = total["p"] / n, total["q"] / n
    var_p, var_q = max(total["p2"] / n - p * p, 0.0), max(total["q2"] / n - q * q, 0.0)
    var_diff = max(total["pq2"] / n - (p - q) ** 2, 0.0)
    if min(var_p, var_q) <= 1e-12:
        return None
    return min(1.0, (var_p + var_q - var_diff) / (2 * math.sqrt(var_p * var_q)))


def _weights(metrics: Metrics, total: dict[str, float], low: dict[str, float], high: dict[str, float]) -> None:
    n = total["items"]
    excess, square = total["weight"] / n, total["weight2"] / n
    mean, second = 1 + excess, 1 + 2 * excess + square
    metrics.mean(NAME + "is_weight_mean", mean, 1)
    metrics.mean(NAME + "is_weight_std", math.sqrt(max(square - excess * excess, 0.0)), 1)
    metrics.mean(NAME + "is_ess", mean * mean / second if second > 0 else 0.0, 1)
    metrics.mean(NAME + "is_truncated", total["truncated"] / n, 1)
    metrics.min(NAME + "is_weight_min", low["weight"])
    metrics.max(NAME + "is_weight_max", high["weight"])


def _rejection(metrics: Metrics, total: dict[str, float]) -> None:
    if "rejected" not in total:
        return
    metrics.mean(NAME + "rejected", total["rejected"] / total["tokens"], 1)
    metrics.mean(NAME + "rejected_seqs", total["rejected_rows"] / total["rows"], 1)
    for name, value in total.items():
        if name.startswith("rejected/"):
            metrics.mean(NAME + name, value / total["tokens"], 1)


def staleness(version: Tensor, tokens: Tensor, now: int, buckets: int) -> Metrics:
    """Return the histogram of how many versions each token's weights lag, with mean and maximum.

    `staleness/0`, `staleness/1`, ... are shares of tokens.

    Args:
        version: int64 [R], versions of weights.
        tokens: int64 [R], trained tokens that each version generated.
        now: version of the weights that are trained next.
        buckets: number of ages; the last one also counts everything older.
    """
    metrics = Metrics()
    if bool((version > now).any()):
        raise ValueError(f"a token's weight version {int(version.max())} is newer than the trainer's, {now}")
    version, tokens = version[tokens > 0], tokens[tokens > 0]
    if len(version) == 0:
        return metrics
    age, count = now - version, tokens.double()
    everything = float(count.sum())
    for bucket in range(buckets):
        last = bucket == buckets - 1
        share = float(count[(age >= bucket) if last else (age == bucket)].sum())
        metrics.mean(f"{NAME}staleness/{bucket}{'_or_more' if last else ''}", share, everything)
    metrics.mean(NAME + "staleness_mean", float((age * count).sum()), everything)
    metrics.max(NAME + "staleness_max", float(age.max()))
    return metrics
