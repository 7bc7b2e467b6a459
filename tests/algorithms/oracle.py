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


def maxrl(rewards, mask, uid):
    score, out = scores(rewards, mask), []
    for i in range(len(uid)):
        group = [score[j] for j in others_in_group(i, uid, mask, itself=True)]
        usable = any(mask[i]) and len(group) > 1 and sum(group) > 0
        out.append((score[i] - statistics.fmean(group)) / statistics.fmean(group) if usable else 0.0)
    return per_token(out, mask)


def gigpo(rewards, keys, mask, uid, gamma):
    """The first token of a row begins a turn, and every token with a key; a turn's state is its key, 0 is no state."""
    returns, where = {}, {}
    for i, ms in enumerate(mask):
        starts = [t for t in range(len(ms)) if t == 0 or keys[i][t] != 0]
        for turn, start in enumerate(starts):
            where |= {(i, t): (i, turn) for t in range(start, [*starts, len(ms)][turn + 1])}
        later = 0.0
        for turn in reversed(range(len(starts))):
            later = sum(r for t, r in enumerate(rewards[i]) if ms[t] and where[i, t] == (i, turn)) + gamma * later
            returns[i, turn] = (later, (uid[i], keys[i][starts[turn]]) if keys[i][starts[turn]] else (i, turn))
    out = grpo(rewards, mask, uid, norm_by_std=False)
    for (i, t), turn in where.items():
        peers = [r for (j, _), (r, state) in returns.items() if state == returns[turn][1] and any(mask[j])]
        if mask[i][t] and len(peers) > 1:
            out[i][t] += returns[turn][0] - statistics.fmean(peers)
    return out


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


def live(mask):
    return [i for i, ms in enumerate(mask) if any(ms)]


def grpo_passk(rewards, mask, uid, norm_by_std=True):
    score, out = scores(rewards, mask), []
    for i in range(len(uid)):
        rest = [score[j] for j in others_in_group(i, uid, mask, itself=False)]
        if not any(mask[i]) or not rest or score[i] <= max(rest):
            out.append(0.0)
            continue
        lead = score[i] - max(rest)
        out.append(lead / (statistics.stdev([score[i], *rest]) + 1e-6) if norm_by_std else lead)
    return per_token(out, mask)


def opo(rewards, mask, uid):
    score, out = scores(rewards, mask), []
    for i in range(len(uid)):
        group = others_in_group(i, uid, mask, itself=True)
        if not any(mask[i]) or len(group) < 2:
            out.append(0.0)
            continue
        lengths = [sum(mask[j]) for j in group]
        baseline = sum(n * score[j] for n, j in zip(lengths, group, strict=True)) / sum(lengths)
        out.append(score[i] - baseline)
    return per_token(out, mask)


def gpg(rewards, mask, uid):
    score = scores(rewards, mask)
    groups = {i: [score[j] for j in others_in_group(i, uid, mask, itself=True)] for i in live(mask)}
    signal = [i for i, group in groups.items() if max(group) > min(group)]
    out = [0.0] * len(uid)
    for i in signal:
        out[i] = (score[i] - statistics.fmean(groups[i])) * len(groups) / len(signal)
    return per_token(out, mask)


def gdpo(parts, weights, mask, uid):
    total = [[0.0] * len(ms) for ms in mask]
    for k, weight in enumerate(weights):
        column = [[parts[i][k] if t == mask[i].index(True) else 0.0 for t in range(len(mask[i]))] if any(mask[i])
                  else [0.0] * len(mask[i]) for i in range(len(uid))]  # fmt: skip
        for row, more in zip(total, grpo(column, mask, uid), strict=True):
            for t, x in enumerate(more):
                row[t] += weight * x
    return whiten(total, mask)


def optimal_token_baseline(rewards, logp, squares, mask, uid, *, skip_holes, rho=None):
    """Places are columns, or counts of valid tokens before when holes are skipped; `rho` are importance weights."""
    g, w, place = {}, {}, {}
    for i, ms in enumerate(mask):
        valid = [t for t, m in enumerate(ms) if m]
        for k, t in enumerate(valid):
            place[i, t] = k if skip_holes else t
            g[i, t] = sum(rewards[i][s] for s in valid[k:])
            w[i, t] = sum(
                (1 - 2 * math.exp(logp[i][s]) + squares[i][s]) * (1 if rho is None else rho[i][s] ** 2)
                for s in valid[: k + 1]
            )
    out = [[0.0] * len(ms) for ms in mask]
    for i, t in g:
        same = [key for key in g if uid[key[0]] == uid[i] and place[key] == place[i, t]]
        out[i][t] = g[i, t] - sum(w[key] * g[key] for key in same) / sum(w[key] for key in same)
    return out


def clamped(logp, old):
    return max(-20.0, min(20.0, logp - old))


def capped(d, cap):
    """exp(d), and from log cap on the straight line with the slope that it has there."""
    if cap is None or d <= math.log(cap):
        return math.exp(d)
    return cap * (1 + d - math.log(cap))


def dppo_token(logp, old, advantage, divergence, limit, cap):
    new_p, old_p, r = math.exp(logp), math.exp(old), math.exp(clamped(logp, old))
    if divergence == "tv":
        far = abs(new_p - old_p) > limit
    else:
        far = old_p * math.log(old_p / new_p) + (1 - old_p) * math.log((1 - old_p) / (1 - new_p)) > limit
    if far and ((advantage > 0 and r > 1) or (advantage < 0 and r < 1)):
        return 0.0
    return -advantage * capped(clamped(logp, old), cap)


def loss_token(name, logp, old, a, cfg):
    """Losses that look at one token at a time."""
    d = clamped(logp, old)
    r = math.exp(d)
    if name == "ppo":
        return ppo_token(logp, old, a, cfg.clip_low, cfg.clip_high, cfg.dual_clip)
    if name == "cispo":
        return -max(1 - cfg.clip_low, min(1 + cfg.clip_high, r)) * a * logp
    if name == "sapo":
        tau = cfg.tau_pos if a > 0 else cfg.tau_neg
        return -a * 4 / tau / (1 + math.exp(-tau * (r - 1)))
    if name == "cpgd":
        clipped = max(math.log(1 - cfg.clip_low), min(math.log(1 + cfg.clip_high), d))
        return -min(a * d, a * clipped) + cfg.drift_coef * min(r - 1, cfg.drift_clip) * logp
    if name == "gpg":
        return -a * logp
    if name == "dro":
        return -(a * logp - cfg.quadratic_coef / 2 * (logp - old) ** 2)
    if name == "luffy":
        return -a * capped(d, cfg.ratio_cap)
    if name in ("ipo", "kpop"):
        x, y = math.exp(logp), math.exp(old)
        far = abs(x - y) if name == "ipo" else max(two_outcomes(x, y), two_outcomes(y, x))
        return (-a * capped(d, cfg.ratio_cap) if far <= cfg.trust_region else 0.0) + cfg.kl_tau * d * d
    return dppo_token(logp, old, a, name.removeprefix("dppo_"), cfg.trust_region, cfg.ratio_cap)


def two_outcomes(p, q):
    """KL of (p, 1 - p) to (q, 1 - q)."""
    return p * math.log(p / q) + (1 - p) * math.log((1 - p) / (1 - q))


def loss_row(name, logps, olds, advantages, cfg):
    """Losses that look at a whole sequence; only its valid tokens are given."""
    n = len(logps)
    ds = [clamped(x, y) for x, y in zip(logps, olds, strict=True)]
    if name == "gspo":
        s = math.exp(sum(ds) / n)
        bounded = max(1 - cfg.clip_low, min(1 + cfg.clip_high, s))
        return [dual(max(-a * s, -a * bounded), a, cfg.dual_clip) for a in advantages]
    if name == "vespo":
        w = math.exp(max(-20.0, min(20.0, sum(x - y for x, y in zip(logps, olds, strict=True)))))
        return [-vespo_weight(w, a, cfg) * a * x for x, a in zip(logps, advantages, strict=True)]
    if name == "opsm":
        away = sum(y - x for x, y in zip(logps, olds, strict=True)) / n
        return [
            0.0 if a < 0 and away > cfg.off_policy_threshold else loss_token("ppo", x, y, a, cfg)
            for x, y, a in zip(logps, olds, advantages, strict=True)
        ]
    total = 0.0
    for d, a in zip(ds, advantages, strict=True):
        sign = (a > 0) - (a < 0)
        total += sign * min(sign * d, sign * max(-cfg.clip_low, min(cfg.clip_high, d)))
    mean = sum(advantages) / n
    return [dual(-mean * math.exp(total / n), mean, cfg.dual_clip)] * n


def vespo_weight(w, a, cfg):
    k, rate = (cfg.k_pos, cfg.lambda_pos) if a >= 0 else (cfg.k_neg, cfg.lambda_neg)
    return w**k * math.exp(rate * (1 - w))


def dual(loss, advantage, bound):
    return loss if bound is None or advantage >= 0 else min(loss, -advantage * bound)


def covariances(old, advantages, mask):
    valid = [(i, t) for i, ms in enumerate(mask) for t, m in enumerate(ms) if m]
    x = statistics.fmean(old[i][t] for i, t in valid)
    y = statistics.fmean(advantages[i][t] for i, t in valid)
    return {(i, t): (old[i][t] - x) * (advantages[i][t] - y) for i, t in valid}


def farthest(olds, rollouts, advantages, bound):
    """The tokens that M2PO drops, of flat lists: of those that A pushes out, the largest squared log-ratios."""
    d = [x - y for x, y in zip(olds, rollouts, strict=True)]
    rest, dropped = [i for i, a in enumerate(advantages) if a * d[i] > 0], set()
    while rest and statistics.fmean(d[i] ** 2 for i in rest) > bound:
        worst = max(d[i] ** 2 for i in rest)
        dropped |= {i for i in rest if d[i] ** 2 == worst}
        rest = [i for i in rest if d[i] ** 2 < worst]
    return dropped
