"""Losses and advantages of recent papers by hand: values and gradients from float64 scripts that share no code with us.

Gradients are with respect to log-probs. Token losses are averaged as each case says.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch

from megarl.algorithms.advantages import reverse_kl
from megarl.algorithms.aggregation import aggregation_weights, local_counts
from megarl.algorithms.correction import correct
from megarl.algorithms.losses import POLICY_LOSSES
from megarl.algorithms.objective import Objective, TokenInputs, actor_loss
from megarl.algorithms.stats import one_rank
from megarl.config.algorithm import AlgorithmConfig, KLConfig, PolicyLossConfig
from megarl.config.correction import ResolvedCorrection
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
    # Scores 0, 1, 0 of the policy and 1 of the expert: advantages of -0.5 and 0.5; the expert has no old log-probs.
    "luffy": Worked(
        "luffy",
        {
            "new": [[0.6, 0.3], [0.05, 0.9]],
            "old": [[0.5, 0.4], [math.nan, math.nan]],
            "advantages": [[-0.5] * 2, [0.5] * 2],
            "expert": [[0.0] * 2, [1.0] * 2],
        },
        {},
        0.089583,
        [0.15, 0.09375, -0.027778, -0.01125],
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
    given = [x for row in case.rows.get("expert", []) for x in row]
    own = {"expert_mask": torch.tensor(given).bool()} if given else {}
    prepared = spec.prepare(old, advantages, mask, cfg, keys=mask.long(), **fields) if spec.prepare else {}
    old = fields.get("rollout_logp", old)
    token_loss, _ = POLICY_LOSSES.get(case.name)(logp, old, advantages, mask, cfg, offsets=offsets, **prepared, **own)
    weights = aggregation_weights(case.aggregation, mask, local_counts(mask, offsets), offsets=offsets)
    loss = (weights * token_loss).sum()
    loss.backward()
    close(loss.detach(), torch.tensor(case.loss), 2e-6)
    close(logp.grad, case.gradient, 2e-6)


@pytest.mark.parametrize(
    ("estimator", "loss", "gradient"),
    [
        ("unbiased_k3", 0.277640, [0.091161, 0.536479, 0.0]),
        ("low_var_kl", 0.275031, [0.055556, 0.266667, 0.0]),
        ("low_var_kl+", 0.275031, [0.060774, 0.536479, 0.0]),
    ],
)
@pytest.mark.parametrize("masked", [False, True])
def test_kl_in_the_loss(estimator: str, loss: float, gradient: list[float], masked: bool) -> None:
    """The policy has moved from 0.2 to 0.3, stayed, and fallen from 0.4 to 0.1; the last one is at the reference."""
    new, old, ref = (logs([row]) for row in ([0.3, 0.5, 0.1], [0.2, 0.5, 0.4], [0.25, 0.1, 0.1]))
    mask = torch.ones(3, dtype=torch.bool)
    if masked:  # two more tokens, of which nothing may be read
        nan = torch.full((2,), math.nan, dtype=torch.float64)
        new, old, ref = (torch.cat([x, nan]) for x in (new, old, ref))
        mask = torch.cat([mask, torch.zeros(2, dtype=torch.bool)])
    logp, zero, offsets = new.clone().requires_grad_(), torch.zeros_like(new), torch.tensor([0, len(new)])
    kl = KLConfig(use="loss", estimator=estimator, coef=1.0)
    total, metrics = actor_loss(
        logp, old, zero, mask, mask / 3, PolicyLossConfig(name="gpg"), tokens=3, offsets=offsets, ref_logp=ref, kl=kl
    )
    total.backward()
    close(total.detach(), torch.tensor(loss), 2e-6)
    close(logp.grad[:3], gradient, 2e-6)
    assert (logp.grad[3:] == 0).all()
    assert metrics.result()["actor/kl_loss"] == pytest.approx(loss, abs=2e-6)


def test_unbiased_kl_and_its_gradient_are_those_of_the_whole_vocabulary_on_average() -> None:
    """Over tokens of an older policy, exactly: sum_y old(y) r(y) k3(y) = KL(pi, ref), and so for the gradient."""
    logits = torch.tensor([0.3, -1.0, 0.8, 0.1], dtype=torch.float64, requires_grad=True)
    old, ref = torch.tensor([[0.1, 0.2, 0.3, 0.4], [0.4, 0.3, 0.2, 0.1]], dtype=torch.float64).log().unbind()
    new, mask = logits.log_softmax(0), torch.ones(4, dtype=torch.bool)
    kl = KLConfig(use="loss", estimator="unbiased_k3", coef=1.0)
    cfg, offsets = PolicyLossConfig(name="gpg"), torch.tensor([0, 4])
    estimate = actor_loss(
        new, old, torch.zeros(4), mask, old.exp(), cfg, tokens=4, offsets=offsets, ref_logp=ref, kl=kl
    )[0]
    exact = (new.exp() * (new - ref)).sum()
    close(estimate.detach(), exact.detach())
    close(*(torch.autograd.grad(x, logits, retain_graph=True)[0] for x in (estimate, exact)))


def test_unbiased_kl_pulls_far_tokens_back() -> None:
    """A limit of the value would have no gradient there."""
    logp = torch.tensor([math.log(0.9)], dtype=torch.float64, requires_grad=True)
    old, ref, one = logp.detach(), torch.tensor([-19.0], dtype=torch.float64), torch.ones(1, dtype=torch.bool)
    kl = KLConfig(use="loss", estimator="unbiased_k3", coef=1.0)
    cfg, offsets = PolicyLossConfig(name="gpg"), torch.tensor([0, 1])
    actor_loss(logp, old, 0 * old, one, one, cfg, tokens=1, offsets=offsets, ref_logp=ref, kl=kl)[0].backward()
    close(logp.grad, [math.log(0.9) + 19])


def observed(*rows: int) -> TokenInputs:
    """Two samples: three tokens of the policy with an observation of one token inside, and one token with another."""
    mask = torch.tensor([True, False, True, True, True, False])
    tensors = {
        "offsets": torch.tensor([0, 4, 6]),
        "advantages": torch.tensor([1.0, 9.0, 1.0, -1.0, 0.0, 9.0], dtype=torch.float64),
        "response_mask": mask,
        "loss_mask": mask,
        "observation_mask": ~mask,
        "old_logp": logs([[0.5, 0.9, 0.5, 0.25, 0.3, 0.9]]),
    }
    if rows == (0,):
        tensors = {name: x[:4] if name != "offsets" else x[:2] for name, x in tensors.items()}
    elif rows == (1,):
        tensors = {name: x[4:] if name != "offsets" else x[1:] - 4 for name, x in tensors.items()}
    return TokenInputs(**tensors)


def update(new: torch.Tensor, inputs: TokenInputs, weights: torch.Tensor, echo: torch.Tensor) -> torch.Tensor:
    loss = PolicyLossConfig(name="ppo", **UNBOUNDED, echo_coef=0.05)
    objective = Objective.of(AlgorithmConfig(loss=loss), ResolvedCorrection())
    inputs = replace(inputs, weights=weights, echo_weights=echo)
    return objective.loss(new, torch.zeros_like(new), inputs, 4.0)[0]


def test_observations_have_a_divisor_of_their_own() -> None:
    """ECHO: tokens of the policy over their number, which is 4 here, and observations over theirs, 2."""
    objective = Objective.of(AlgorithmConfig(), ResolvedCorrection())
    new = logs([[0.5, 0.1, 0.4, 0.2, 0.3, 0.6]]).requires_grad_()
    whole = observed()
    weights, echo = objective.weigh(whole, one_rank)[1], objective.echo_weights(whole, one_rank)
    loss = update(new, whole, weights, echo)
    (gradient,) = torch.autograd.grad(loss, new)
    scale = 3 / 4  # the worked numbers have no fourth token of the policy; its advantage is 0 here
    assert loss.item() == pytest.approx(scale * -1 / 3 + 0.05 * (-math.log(0.1) - math.log(0.6)) / 2, abs=1e-6)
    close(gradient, [scale * -0.333333, -0.025, scale * -0.266667, scale * 0.266667, 0.0, -0.025], 1e-6)
    parts = [update(new[i], observed(row), weights[i], echo[i]) for row, i in ((0, slice(0, 4)), (1, slice(4, 6)))]
    close(sum(parts).detach(), loss.detach(), 1e-6)
    close(torch.autograd.grad(sum(parts), new)[0], gradient, 1e-7)


def test_observations_of_samples_that_are_left_out_do_not_count() -> None:
    objective, whole = Objective.of(AlgorithmConfig(), ResolvedCorrection()), observed()
    mask = torch.tensor([True, False, True, True, False, False])
    assert objective.echo_weights(replace(whole, loss_mask=mask), one_rank).tolist() == [0, 1, 0, 0, 0, 0]
    twice = replace(whole, copies=torch.tensor([3, 1]))
    assert objective.echo_weights(twice, one_rank).tolist() == [0, 0.75, 0, 0, 0, 0.25]
    nothing = replace(whole, observation_mask=torch.zeros(6, dtype=torch.bool))
    assert not objective.echo_weights(nothing, one_rank).any()


@pytest.mark.parametrize(
    ("task", "loss", "gradient"),
    [
        (0.0, -2.792619, [-0.117501, 0.138629, 0.0, 1.151293]),
        (0.5, -2.257209, [-0.242501, 0.038629, 0.0, 1.026293]),
    ],
)
def test_mopd_is_reverse_kl_with_gpg_and_two_sided_weights(task: float, loss: float, gradient: list[float]) -> None:
    """The third token has the weight 8, which is outside [0.2, 5]; it still counts in the mean."""
    old, teacher = logs([[0.5, 0.2, 0.4, 0.1]]), logs([[0.8, 0.1, 0.4, 0.001]])
    rollout, mask, offsets = logs([[0.5, 0.25, 0.05, 0.1]]), torch.ones(4, dtype=torch.bool), torch.tensor([0, 4])
    taught = reverse_kl(old, teacher, mask).advantages + task
    weights = correct(old, rollout, mask, offsets=offsets, is_level="token", is_threshold=[0.2, 5.0]).weights
    logp = old.clone().requires_grad_()
    total, _ = actor_loss(
        logp, old, taught, mask, mask / 4, PolicyLossConfig(name="gpg"), tokens=4, offsets=offsets, is_weights=weights
    )
    total.backward()
    close(total.detach(), torch.tensor(loss), 2e-6)
    close(logp.grad, gradient, 2e-6)
