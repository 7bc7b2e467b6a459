"""The teacher's term: by its formulas over loops, through every policy loss, and with its bounds."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megarl.algorithms.advantages import estimate
from megarl.algorithms.aggregation import aggregation_weights, local_counts
from megarl.algorithms.divergences import divergence
from megarl.algorithms.kl import KL, kl_tokens
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
    """Log-probs of teacher and policy at every valid token: of three tokens, and of the rest."""
    tokens, g = int(case.mask.sum()), torch.Generator().manual_seed(1)
    return [torch.log_softmax(2 * torch.randn(tokens, 4, generator=g, dtype=torch.float64), 1) for _ in range(2)]


def written_out(name: str, p: list[float], q: list[float], tail: str, floor: float | None, beta: float) -> float:
    """The divergence of one position from log-probs, with loops over its formula."""
    if tail != "bucket":
        p, q = p[:-1], q[:-1]
    if tail == "renormalise":
        p, q = ([x - math.log(sum(map(math.exp, row))) for x in row] for row in (p, q))
    if floor is not None:
        p, q = ([max(x, floor) for x in row] for row in (p, q))
    beta = {"forward_kl": 0.0, "forward_kl_topk": 0.0, "reverse_kl": 1.0}.get(name, beta)
    total = 0.0
    for a, b in zip(p, q, strict=True):
        x, y = math.exp(a), math.exp(b)
        if beta in (0.0, 1.0):
            total += x * (a - b) if beta == 0 else y * (b - a)
        else:
            m = math.log(beta * x + (1 - beta) * y)
            total += beta * x * (a - m) + (1 - beta) * y * (b - m)
    return max(total, 0.0) if tail == "ignore" else total


@pytest.mark.parametrize("tail", ["bucket", "renormalise", "ignore"])
@pytest.mark.parametrize("name", ["forward_kl", "forward_kl_topk", "reverse_kl", "jsd"])
@given(cases, st.sampled_from([None, -1.5]), st.sampled_from([None, 0.3]), st.sampled_from([0.0, 0.3, 1.0]))
@settings(max_examples=4, deadline=None)
def test_divergences_over_the_likeliest_tokens(name, tail, case, floor, clamp, beta):
    teacher, policy = packed(case)
    own = {"tail": tail, "log_prob_min_clamp": floor} | ({"beta": beta} if name == "jsd" else {})
    exact = [written_out(name, p, q, tail, floor, beta) for p, q in zip(teacher.tolist(), policy.tolist(), strict=True)]
    section = DistillationConfig(coef=2.0, estimator=name, topk=3, loss_max_clamp=clamp, task_loss=False, **own)
    count = len(policy)
    logp, weights = torch.zeros(count), torch.full((count,), 1 / count, dtype=torch.float64)
    loss, metrics = actor_loss(
        logp, logp, logp, torch.ones(count, dtype=torch.bool), weights, PolicyLossConfig(), tokens=float(count),
        offsets=torch.tensor([0, count]), teacher=(torch.stack([teacher, teacher], 2), policy), distillation=section,
    )  # fmt: skip
    bounded = [value if clamp is None else max(min(value, clamp), -clamp) for value in exact]
    assert float(loss) == pytest.approx(2.0 * sum(bounded) / count, rel=1e-9, abs=1e-12)
    numbers = metrics.result()
    assert numbers["actor/distillation_loss_max"] == pytest.approx(max(exact), rel=1e-9, abs=1e-12)
    assert numbers["actor/distillation_student_mass"] == pytest.approx(float(policy[:, :-1].exp().sum(1).mean()))
    assert numbers["actor/distillation_teacher_mass"] == pytest.approx(float(teacher[:, :-1].exp().sum(1).mean()))


@pytest.mark.parametrize("beta", [0.0, 0.25, 0.5, 1.0])
def test_the_jsd_of_whole_distributions_and_its_gradient_are_those_of_trl(beta):
    """The formula of TRL 1.16's GKDTrainer: kl_div of log-probs, with a mixture by logsumexp."""
    teacher, start = packed(make_case(2))
    losses = []
    for ours in (True, False):
        policy = start.clone().requires_grad_()
        logq = policy.log_softmax(1)
        if ours:
            section = DistillationConfig(estimator="jsd", beta=beta)
            found = divergence(KL.choose(section, "algorithm.distillation"), teacher, logq)
        elif beta in (0, 1):
            pair = (logq, teacher) if beta == 0 else (teacher, logq)
            found = torch.nn.functional.kl_div(*pair, reduction="none", log_target=True).sum(1)
        else:
            b = torch.tensor(beta, dtype=torch.float64)
            mixture = torch.logsumexp(torch.stack([logq + torch.log1p(-b), teacher + b.log()]), 0)
            kl = [
                torch.nn.functional.kl_div(mixture, x, reduction="none", log_target=True).sum(1)
                for x in (teacher, logq)
            ]
            found = b * kl[0] + (1 - b) * kl[1]
        (grad,) = torch.autograd.grad((found * torch.linspace(1, 2, len(found)).double()).sum(), policy)
        losses.append((found.detach(), grad))
    for a, b in zip(*losses, strict=True):
        close(a, b, 1e-12)


def test_only_a_bucket_sees_the_policys_mass_elsewhere():
    teacher, policy = (torch.tensor([[0.6, 0.3, 0.1]]).log(), torch.tensor([[0.2, 0.1, 0.7]]).log())
    found = {
        tail: float(divergence(KL.choose(DistillationConfig(estimator="reverse_kl", tail=tail)), teacher, policy))
        for tail in ("bucket", "renormalise", "ignore")
    }
    assert found["bucket"] > 0.9
    assert found["renormalise"] == pytest.approx(0, abs=1e-6)
    assert found["ignore"] == 0


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
@settings(max_examples=10, deadline=None)
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
