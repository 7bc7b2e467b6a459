"""Rollout correction written as loops over Python floats (float64). No code is shared with the library.

A sample is a list of (new log-prob, rollout log-prob) of its valid tokens; batches come as rows of tokens and a mask.
"""

from __future__ import annotations

import math
import statistics


def clamp(x, limit=20.0):
    return max(-limit, min(limit, x))


def rows_of(new, old, mask):
    """The valid tokens of each sample."""
    return [
        [(n, o) for n, o, m in zip(ns, os, ms, strict=True) if m] for ns, os, ms in zip(new, old, mask, strict=True)
    ]


def rho(token):
    return math.exp(clamp(token[0] - token[1]))


def seq_ratio(row):
    return math.exp(clamp(sum(n - o for n, o in row)))


def bounded(ratio, threshold):
    if isinstance(threshold, (list, tuple)):
        return ratio if threshold[0] <= ratio <= threshold[1] else 0.0
    return min(ratio, threshold)


def stat(kind, token):
    log = clamp(token[0] - token[1])
    return {"k1": math.exp(log), "k2": 0.5 * log * log, "k3": math.exp(log) - 1 - log}[kind]


def rule_value(rule, row):
    """Value of a sequence rule on a row with tokens."""
    if rule.level == "seq_max":
        return max(stat(rule.stat, t) for t in row)
    if rule.stat == "k1":
        total = sum(n - o for n, o in row)
        return math.exp(clamp(total if rule.level == "sequence" else total / len(row)))
    values = [stat(rule.stat, t) for t in row]
    return sum(values) if rule.level == "sequence" else statistics.fmean(values)


def bounds(rule):
    lower = rule.lower
    if lower is None:
        derived = rule.stat == "k1" and rule.level != "seq_max" and rule.upper is not None
        lower = 1 / rule.upper if derived else -math.inf
    return lower, math.inf if rule.upper is None else rule.upper


def token_fate(rule, row):
    """For each token of the row: does this rule accept it?"""
    lower, upper = bounds(rule)
    if not row:
        return []
    if rule.level == "token":
        return [lower <= stat(rule.stat, t) <= upper for t in row]
    return [lower <= rule_value(rule, row) <= upper] * len(row)


def accepted(row, rules, veto):
    fates = [token_fate(rule, row) for rule in rules]
    if veto > 0:
        fates.append([all(n - o >= math.log(veto) for n, o in row)] * len(row))
    return [all(fate[t] for fate in fates) for t in range(len(row))]


def token_weights(rows, fates, level, threshold, normalize, over="trained"):
    """Weight of each valid token, zero where it is rejected; and the factor of normalisation."""
    out, items, every = [], [], []
    for row, fate in zip(rows, fates, strict=True):
        whole = bounded(seq_ratio(row), threshold) if row else 0.0
        raw = [{"none": 1.0, "token": bounded(rho(t), threshold), "sequence": whole}[level] for t in row]
        every += raw if level == "token" else [whole] if row else []
        out.append([w if ok else 0.0 for w, ok in zip(raw, fate, strict=True)])
        if level == "token":
            items += [w for w, ok in zip(raw, fate, strict=True) if ok]
        elif any(fate):
            items.append(whole)
    factor = 1.0
    counted = items if over == "trained" else every
    if normalize and level != "none" and sum(counted) > 0:
        factor = statistics.fmean(counted)
    return [[w / factor for w in row] for row in out], factor, items


def gap(rows):
    """The metrics of the distance, by their definitions."""
    rows = [row for row in rows if row]
    tokens = [t for row in rows for t in row]
    ratios = [rho(t) for t in tokens]
    p, q = [math.exp(n) for n, _ in tokens], [math.exp(o) for _, o in tokens]
    mean_new = [statistics.fmean(n for n, _ in row) for row in rows]
    mean_old = [statistics.fmean(o for _, o in row) for row in rows]
    diffs = [o - n for n, o in zip(mean_new, mean_old, strict=True)]
    return {
        "kl": statistics.fmean(o - n for n, o in tokens),
        "k3_kl": statistics.fmean(r - 1 - math.log(r) for r in ratios),
        "chi2_token": statistics.fmean(r * r for r in ratios) - 1,
        "chi2_seq": statistics.fmean(seq_ratio(row) ** 2 for row in rows) - 1,
        "ppl": statistics.fmean(math.exp(-clamp(m)) for m in mean_new),
        "rollout_ppl": statistics.fmean(math.exp(-clamp(m)) for m in mean_old),
        "ppl_ratio": statistics.fmean(math.exp(clamp(o - n)) for n, o in zip(mean_new, mean_old, strict=True)),
        "log_ppl_diff": statistics.fmean(diffs),
        "log_ppl_abs_diff": statistics.fmean(map(abs, diffs)),
        "log_ppl_diff_min": min(diffs),
        "log_ppl_diff_max": max(diffs),
        "ratio_min": min(ratios),
        "ratio_max": max(ratios),
        "ratio_mean": statistics.fmean(ratios),
        "ratio_std": statistics.pstdev(ratios),
        "ess": sum(ratios) ** 2 / (len(ratios) * sum(r * r for r in ratios)),
        "logp_diff_max": max(abs(n - o) for n, o in tokens),
        "prob_corr": _correlation(p, q),
    }


def _correlation(p, q):
    """None where one of them is constant, as far as float64 tells."""
    return statistics.correlation(p, q) if min(statistics.pvariance(p), statistics.pvariance(q)) > 1e-12 else None


def weight_metrics(items, truncated):
    return {
        "is_weight_min": min(items),
        "is_weight_max": max(items),
        "is_weight_mean": statistics.fmean(items),
        "is_weight_std": statistics.pstdev(items),
        "is_ess": sum(items) ** 2 / (len(items) * sum(w * w for w in items)) if any(items) else 0.0,
        "is_truncated": sum(truncated) / len(truncated),
    }
