"""Losses and advantages of recent papers by hand: values and gradients from float64 scripts that share no code with us.

Gradients are with respect to log-probs. Token losses are averaged as each case says.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from megarl.algorithms.aggregation import aggregation_weights, local_counts
from megarl.algorithms.losses import POLICY_LOSSES
from tests.algorithms.cases import close

FIVE = {
    "new": [[0.48, 0.30, 0.02, 0.90, 0.60]],
    "old": [[0.45, 0.45, 0.001, 0.90, 0.52]],
    "advantages": [[1.0, 1.0, -1.0, 0.0, -2.0]],
}
THREE_ROWS = {
    "new": [[0.4, 0.2, 0.5], [0.3, 0.6], [0.2, 0.2]],
    "old": [[0.5, 0.5, 0.5], [0.5, 0.6], [0.5, 0.5]],
    "advantages": [[-1.0] * 3, [-1.0] * 2, [1.0] * 2],
}
TWO_ROWS = {"new": [[0.5, 0.4], [0.3, 0.3, 0.3]], "old": [[0.5, 0.5], [0.3, 0.2, 0.3]]}
UP, DOWN = {"advantages": [[1.0] * 2, [-0.5] * 3]}, {"advantages": [[-1.0] * 2, [0.5] * 3]}
ENGINE, DRIFT = [0.1, 0.2, 0.3, 0.2, 0.4, 0.1], [0.05, -0.6, 0.4, 0.1, -0.3, 0.8]
MOVED = [[p * math.exp(d) for p, d in zip(ENGINE, DRIFT, strict=True)]]
DRIFTED = {"new": MOVED, "old": MOVED, "rollout": [ENGINE], "advantages": [[1.0, 1.0, 1.0, -1.0, -1.0, 1.0]]}
UNBOUNDED = {"clip_low": 1.0, "clip_high": 1e9, "dual_clip": None}
NO_KL = {"kl_tau": 0.0, "ratio_cap": None}


@dataclass
class Worked:
    """A policy loss, its settings, probabilities by row, and what must come out."""

    name: str
    rows: dict[str, list[list[float]]]
    settings: dict[str, Any]
    loss: float
    gradient: list[float]
    aggregation: str = "token-mean"


LUSPO = "seq-mean-token-sum"
LOSSES = {
    "ipo": Worked("ipo", FIVE, {"ratio_cap": None}, 4.250038, [-0.213308, -0.000162, 4.001198, 0, 0.461596]),
    "ipo, near": Worked(
        "ipo", FIVE, {"trust_region": 0.05, "ratio_cap": None}, 3.788499, [-0.213308, -0.000162, 4.001198, 0, 0.000057]
    ),
    "kpop": Worked("kpop", FIVE, NO_KL, 4.114872, [-0.213333, -0.133333, 4, 0, 0.461538]),
    "kpop, near": Worked("kpop", FIVE, {**NO_KL, "trust_region": 0.048}, 4.248205, [-0.213333, 0, 4, 0, 0.461538]),
    "kpop, nearest": Worked("kpop", FIVE, {**NO_KL, "trust_region": 0.03}, 0.248205, [-0.213333, 0, 0, 0, 0.461538]),
    "dppo": Worked(
        "dppo_tv", FIVE, {"trust_region": 0.1, "ratio_cap": None}, 4.114872, [-0.213333, -0.133333, 4, 0, 0.461538]
    ),
    "vespo": Worked("vespo", TWO_ROWS | UP, {}, -0.073082, [-0.233231] * 2 + [0.124159] * 3),
    "vespo, signs exchanged": Worked("vespo", TWO_ROWS | DOWN, {}, -0.064529, [0.152763] * 2 + [-0.050204] * 3),
    **{
        f"opsm, {limit}": Worked(
            "opsm",
            THREE_ROWS,
            {**UNBOUNDED, "off_policy_threshold": limit},
            loss,
            [0.0] * stopped + [0.114286, 0.057143, 0.142857, 0.085714, 0.142857, -0.057143, -0.057143][stopped:],
        )
        for limit, loss, stopped in ((0.5, 0.428571, 0), (0.3, 0.114286, 3), (0.1, -0.114286, 5))
    },
    "luspo": Worked(
        "gspo", TWO_ROWS | DOWN, {"clip_low": 2e-3, "clip_high": 2.5e-3}, 0.246125, [0.0] * 5, aggregation=LUSPO
    ),
    "luspo, wide": Worked(
        "gspo",
        TWO_ROWS | DOWN,
        {"clip_low": 0.2, "clip_high": 0.25},
        0.035892,
        [0.447214] * 2 + [-0.286179] * 3,
        aggregation=LUSPO,
    ),
    "luspo, clipped above": Worked(
        "gspo",
        TWO_ROWS | DOWN,
        {"clip_low": 0.2, "clip_high": 0.1},
        0.069427,
        [0.447214] * 2 + [0.0] * 3,
        aggregation=LUSPO,
    ),
    **{
        f"m2po, {bound}": Worked("m2po", DRIFTED, {"second_moment": bound, "ratio_cap": None}, loss, gradient)
        for bound, loss, gradient in (
            (0.04, -0.082485, [-0.175212, -0.091469, 0, 0.184195, 0, 0]),
            (0.2, -0.207653, [-0.175212, -0.091469, -0.248637, 0.184195, 0.123470, 0]),
        )
    },
}


def logs(rows: list[list[float]]) -> torch.Tensor:
    return torch.tensor([p for row in rows for p in row], dtype=torch.float64).log()


@pytest.mark.parametrize("case", LOSSES.values(), ids=LOSSES)
def test_loss_and_gradient(case: Worked) -> None:
    spec = POLICY_LOSSES.spec(case.name)
    cfg = spec.settings(**case.settings)
    logp, old = logs(case.rows["new"]).requires_grad_(), logs(case.rows["old"])
    advantages = torch.tensor([a for row in case.rows["advantages"] for a in row], dtype=torch.float64)
    offsets = torch.tensor([0, *map(len, case.rows["new"])]).cumsum(0)
    mask = torch.ones(len(logp), dtype=torch.bool)
    fields = {"rollout_logp": logs(case.rows["rollout"])} if "rollout" in case.rows else {}
    prepared = spec.prepare(old, advantages, mask, cfg, keys=mask.long(), **fields) if spec.prepare else {}
    old = fields.get("rollout_logp", old)
    token_loss, _ = POLICY_LOSSES.get(case.name)(logp, old, advantages, mask, cfg, offsets=offsets, **prepared)
    weights = aggregation_weights(case.aggregation, mask, local_counts(mask, offsets), offsets=offsets)
    loss = (weights * token_loss).sum()
    loss.backward()
    close(loss.detach(), torch.tensor(case.loss), 2e-6)
    close(logp.grad, case.gradient, 2e-6)
