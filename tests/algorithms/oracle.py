"""The formulas, written as loops over Python floats (float64). No code is shared with the library.

A case is a list of samples; a sample is a list of (values..., valid) per token. None stands for "not valid".
"""

from __future__ import annotations

import math
import statistics


def scores(rewards, mask):
    return [sum(r for r, m in zip(rs, ms, strict=True) if m) for rs, ms in zip(rewards, mask, strict=True)]


def per_token(per_sample, mask):
    return [[a if m else 0.0 for m in ms] for a, ms in zip(per_sample, mask, strict=True)]


def others_in_group(i, uid, mask, *, itself):
    return [j for j in range(len(uid)) if uid[j] == uid[i] and any(mask[j]) and (itself or j != i)]


def grpo(rewards, mask, uid, norm_by_std=True):
    score, out = scores(rewards, mask), []
    for i in range(len(uid)):
        group = [score[j] for j in others_in_group(i, uid, mask, itself=True)]
        if not any(mask[i]) or len(group) < 2:
            out.append(0.0)
            continue
        a = score[i] - statistics.fmean(group)
        out.append(a / (statistics.stdev(group) + 1e-6) if norm_by_std else a)
    return per_token(out, mask)


def rloo(rewards, mask, uid):
    score, out = scores(rewards, mask), []
    for i in range(len(uid)):
        rest = [score[j] for j in others_in_group(i, uid, mask, itself=False)]
        out.append(score[i] - statistics.fmean(rest) if any(mask[i]) and rest else 0.0)
    return per_token(out, mask)


def remax(rewards, mask, greedy):
    return per_token([s - g for s, g in zip(scores(rewards, mask), greedy, strict=True)], mask)


def whiten(rows, mask):
    valid = [x for xs, ms in zip(rows, mask, strict=True) for x, m in zip(xs, ms, strict=True) if m]
    if len(valid) < 2:
        return [[0.0] * len(ms) for ms in mask]
    mean, var = statistics.fmean(valid), statistics.variance(valid)
    return [
        [(x - mean) / math.sqrt(var + 1e-8) if m else 0.0 for x, m in zip(xs, ms, strict=True)]
        for xs, ms in zip(rows, mask, strict=True)
    ]


def reinforce_pp(rewards, mask, gamma):
    out = []
    for rs, ms in zip(rewards, mask, strict=True):
        row, running = [0.0] * len(rs), 0.0
        for t in reversed(range(len(rs))):
            if ms[t]:
                running = rs[t] + gamma * running
                row[t] = running
        out.append(row)
    return whiten(out, mask), out


def reinforce_pp_baseline(rewards, mask, uid):
    return whiten(grpo(rewards, mask, uid, norm_by_std=False), mask)


def gae(rewards, values, mask, gamma, lam):
    advantages, returns = [], []
    for rs, vs, ms in zip(rewards, values, mask, strict=True):
        a_row, r_row, next_value, next_advantage = [0.0] * len(rs), [0.0] * len(rs), 0.0, 0.0
        for t in reversed(range(len(rs))):
            if not ms[t]:
                continue
            delta = rs[t] + gamma * next_value - vs[t]
            next_advantage = delta + gamma * lam * next_advantage
            next_value = vs[t]
            a_row[t], r_row[t] = next_advantage, next_advantage + vs[t]
        advantages.append(a_row)
        returns.append(r_row)
    return whiten(advantages, mask), returns


def ppo_token(logp, old, advantage, low, high, dual):
    r = math.exp(max(-20.0, min(20.0, logp - old)))
    loss = max(-advantage * r, -advantage * max(1 - low, min(1 + high, r)))
    if dual is not None and advantage < 0:
        loss = min(loss, -advantage * dual)
    return loss


def value_token(v, v_old, target, clip):
    plain = (v - target) ** 2
    if clip is None:
        return 0.5 * plain
    return 0.5 * max(plain, (max(v_old - clip, min(v_old + clip, v)) - target) ** 2)


def kl_token(name, logp, ref):
    d = logp - ref
    if name == "kl":
        return d
    if name == "abs":
        return abs(d)
    if name == "mse":
        return d * d / 2
    d = max(-20.0, min(20.0, d))
    return max(-10.0, min(10.0, math.exp(-d) - 1 + d))


def aggregate(mode, losses, mask, norm):
    rows = [[x for x, m in zip(xs, ms, strict=True) if m] for xs, ms in zip(losses, mask, strict=True)]
    rows = [row for row in rows if row]
    if mode == "token-sum":
        return sum(map(sum, rows))
    if not rows:
        return 0.0
    if mode == "token-mean":
        return statistics.fmean(x for row in rows for x in row)
    per_row = {
        "seq-mean-token-mean": statistics.fmean,
        "seq-mean-token-sum": sum,
        "seq-mean-token-sum-norm": lambda row: sum(row) / norm,
    }[mode]
    return statistics.fmean(per_row(row) for row in rows)
