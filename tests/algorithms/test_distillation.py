"""The teacher's term: by its formulas over loops, through every policy loss, and with its bounds."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megarl.algorithms.advantages import estimate
from megarl.algorithms.aggregation import aggregation_weights, local_counts
from megarl.algorithms.kl import kl_tokens
from megarl.algorithms.losses import POLICY_LOSSES
from megarl.algorithms.objective import actor_loss
from megarl.config.algorithm import DistillationConfig, PolicyLossConfig
from tests.algorithms.cases import cases, close, make_case, poisoned

WITHOUT_PREPARATION = [
    name for name in POLICY_LOSSES.names() if POLICY_LOSSES.spec(name).prepare is None and name != "pg_is"
]


def loss_of(case, distillation, teacher, *, logp=None, name="ppo", is_weights=None):
    counts = local_counts(case.mask)
    weights = aggregation_weights("token-mean", case.mask, counts).double()
    return actor_loss(
        case.logp if logp is None else logp,
        case.old_logp,
        case.advantages,
        case.mask,
        weights,
        PolicyLossConfig(name=name),
        tokens=float(counts[0]),
        teacher=teacher,
        distillation=distillation,
        is_weights=is_weights,
    )


def packed(case):
    """All valid tokens in a row, the teacher's three likeliest tokens at each, and the policy's log-probs of them."""
    tokens, g = int(case.mask.sum()), torch.Generator().manual_seed(1)
    teacher = torch.log_softmax(2 * torch.randn(tokens, 4, generator=g, dtype=torch.float64), 1)[:, :3]
    policy = torch.log_softmax(2 * torch.randn(tokens, 4, generator=g, dtype=torch.float64), 1)[:, :3]
    return torch.stack([torch.zeros_like(teacher), teacher], 2), policy


@given(cases, st.sampled_from([None, -1.5]), st.sampled_from([None, 0.3]))
@settings(max_examples=40, deadline=None)
def test_forward_kl_over_the_top_k(case, floor, clamp):
    top, policy = packed(case)
    floored = policy if floor is None else policy.clamp(min=floor)
    expected, corners = [], []
    for p, q in zip(top[:, :, 1].tolist(), policy.tolist(), strict=True):
        least = -math.inf if floor is None else floor
        pairs = [(max(a, least), max(b, least)) for a, b in zip(p, q, strict=True)]
        exact = sum(math.exp(a) * (a - b) for a, b in pairs)
        corners.append(abs(exact) < 1e-12)  # both models at the floor: a token that `cross` gives no gradient to
        value = max(exact, 0.0)
        expected.append(value if clamp is None else min(value, clamp))
    p = top[:, :, 1] if floor is None else top[:, :, 1].clamp(min=floor)
    cross = (p.exp() * floored).sum(1).requires_grad_()
    section = DistillationConfig(
        coef=2.0, estimator="forward_kl_topk", topk=3, log_prob_min_clamp=floor, loss_max_clamp=clamp, task_loss=False
    )
    ones = torch.ones(len(cross), dtype=torch.bool)
    logp, weights = torch.zeros(len(cross)), torch.full((len(cross),), 1 / len(cross), dtype=torch.float64)
    loss, metrics = actor_loss(
        logp, logp, logp, ones, weights, PolicyLossConfig(), tokens=float(len(cross)),
        offsets=torch.tensor([0, len(cross)]), teacher=(top, cross, policy.exp().sum(1)), distillation=section,
    )  # fmt: skip
    close(loss.detach(), torch.tensor(2.0 * sum(expected) / len(expected), dtype=torch.float64), 1e-9)
    loss.backward()
    moves = [value > 0 and (clamp is None or value < clamp) for value in expected]
    slopes = torch.tensor([-2.0 / len(cross) if move else 0.0 for move in moves], dtype=torch.float64)
    inside = ~torch.tensor(corners)
    close(cross.grad[inside], slopes[inside], 1e-12)
    numbers = metrics.result()
    assert numbers["actor/distillation_loss"] == pytest.approx(sum(expected) / len(expected))
    assert numbers["actor/distillation_student_mass"] == pytest.approx(float(policy.exp().sum(1).mean()))


@pytest.mark.parametrize("name", WITHOUT_PREPARATION)
@pytest.mark.parametrize("clamp", [None, 0.2])
def test_through_a_policy_loss_it_is_that_loss_with_minus_the_estimate_as_advantage(name, clamp):
    case = make_case(3)
    rho = torch.rand(case.mask.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    section = DistillationConfig(coef=0.7, estimator="k1", through="policy", loss_max_clamp=clamp)
    logp = case.logp.clone().requires_grad_()
    teacher = poisoned(case.ref_logp, case.mask)
    loss, _ = loss_of(case, section, teacher, logp=logp, name=name, is_weights=rho)
    loss.backward()
    task = case.logp.clone().requires_grad_()
    plain, _ = loss_of(case, None, None, logp=task, name=name, is_weights=rho)
    advantage = -(case.logp - case.ref_logp)
    if clamp is not None:
        advantage = advantage.clamp(-clamp, clamp)
    token_loss, _ = POLICY_LOSSES.get(name)(
        task, case.old_logp, advantage, case.mask, POLICY_LOSSES.spec(name).settings()
    )
    expected = plain + 0.7 * (rho * token_loss).sum() / case.mask.sum()
    expected.backward()
    close(loss.detach(), expected.detach(), 1e-7)
    close(logp.grad, task.grad, 1e-7)


@given(cases, st.sampled_from([0.05, 0.5]))
@settings(max_examples=20, deadline=None)
def test_bounds_alone_and_in_addition_to_the_rewards(case, clamp):
    section = DistillationConfig(coef=0.5, estimator="abs", loss_max_clamp=clamp)
    plain, _ = loss_of(case, None, None)
    both, metrics = loss_of(case, section, case.ref_logp)
    alone, _ = loss_of(case, section.model_copy(update={"task_loss": False}), case.ref_logp)
    values = kl_tokens("abs", case.logp, case.ref_logp, case.mask)
    close(alone, 0.5 * values.clamp(max=clamp).sum() / case.mask.sum(), 1e-6)
    close(both, plain + alone, 1e-7)
    assert metrics.result()["actor/distillation_loss_max"] == pytest.approx(float(values[case.mask].max()))
    assert metrics.result()["actor/distillation_loss"] <= clamp + 1e-9


def test_the_advantage_of_a_teacher_may_be_bounded():
    logp, teacher = torch.tensor([[-1.0, -2.0]]), torch.tensor([[-31.0, -1.5]])
    fields = {"old_logp": logp, "teacher_logp": teacher, "mask": torch.ones(1, 2, dtype=torch.bool)}
    assert estimate("reverse_kl", fields, {}).advantages.tolist() == [[-30.0, 0.5]]
    assert estimate("reverse_kl", fields, {"loss_max_clamp": 10.0}).advantages.tolist() == [[-10.0, 0.5]]
