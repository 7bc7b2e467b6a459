"""KL estimators, their gradients, the reward form and the controller."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megarl.algorithms.kl import KLController, kl_in_reward, kl_tokens
from megarl.system.errors import ConfigError
from tests.algorithms import oracle
from tests.algorithms.cases import cases, close, poisoned

PLAIN = ["kl", "abs", "mse", "low_var_kl"]


@given(cases, st.sampled_from(PLAIN), st.sampled_from(["", "+"]), st.sampled_from([1.0, 30.0]))
@settings(max_examples=20, deadline=None)
def test_value_equals_the_formula(case, name, plus, scale):
    ref = case.logp + scale * case.rewards
    theirs = [
        [oracle.kl_token(name, a, b) if m else 0.0 for a, b, m in zip(*row, strict=True)]
        for row in zip(case.lists("logp"), ref.tolist(), case.lists("mask"), strict=True)
    ]
    args = poisoned(case.logp, case.mask), poisoned(ref, case.mask)
    close(kl_tokens(name + plus, *args, case.mask), theirs, 1e-9)


def test_hidden_tokens_count_nothing_whatever_the_estimator_is_at_zero():
    logp = torch.tensor([-1.0, -2.0], requires_grad=True)
    kl = kl_tokens(lambda d: d.exp(), logp, torch.tensor([-1.0, -1.0]), torch.tensor([True, False]))
    kl.sum().backward()
    assert kl.tolist() == [1.0, 0.0]
    assert logp.grad.tolist() == [1.0, 0.0]


@pytest.mark.parametrize("name", PLAIN)
def test_gradient_of_the_plain_form(name):
    ref = torch.linspace(-3, -1, 7, dtype=torch.float64)
    logp = torch.full((7,), -2.05, dtype=torch.float64, requires_grad=True)
    mask = torch.arange(7) != 3
    assert torch.autograd.gradcheck(lambda x: kl_tokens(name, x, ref, mask), (logp,))


@pytest.mark.parametrize("name", PLAIN)
def test_straight_through_form_has_the_gradient_of_k2(name):
    logp = torch.tensor([-1.0, -2.0, -40.0], requires_grad=True)
    ref = torch.tensor([-1.5, -1.0, -1.0])
    kl_tokens(name + "+", logp, ref, torch.ones(3, dtype=torch.bool)).sum().backward()
    close(logp.grad, [0.5, -1.0, -39.0], 1e-6)


@pytest.mark.parametrize("name", [n + "+" for n in PLAIN])
def test_straight_through_gradient_is_that_of_the_kl_on_average(name):
    """Exact expectation over a small vocabulary: sum_y p(y) grad(estimator(y)) = grad KL(p || q)."""
    logits = torch.tensor([0.3, -1.0, 0.8, 0.1], dtype=torch.float64, requires_grad=True)
    q = torch.tensor([0.0, 0.5, -0.5, 1.0], dtype=torch.float64).log_softmax(0)
    logp = logits.log_softmax(0)
    estimate = kl_tokens(name, logp, q, torch.ones(4, dtype=torch.bool))
    (actual,) = torch.autograd.grad((logp.detach().exp() * estimate).sum(), logits, retain_graph=True)
    (expected,) = torch.autograd.grad((logp.exp() * (logp - q)).sum(), logits)
    close(actual, expected, 1e-12)


@pytest.mark.parametrize("name", PLAIN)
@pytest.mark.parametrize("plus", ["", "+"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_extreme_distances_stay_finite_and_exact(name, plus, dtype):
    """1e4 squared is no float16, and adding it to a value of 10 takes the value's digits in float32."""
    d = torch.tensor([1e4, -1e4, 30.0]).to(dtype).requires_grad_()
    found = kl_tokens(name + plus, d, torch.zeros_like(d), torch.ones(3, dtype=torch.bool))
    close(found.detach(), [oracle.kl_token(name, x, 0.0) for x in d.tolist()], 1e-6)
    found.sum().backward()
    assert torch.isfinite(d.grad).all()


def test_names_of_schulman_are_aliases():
    d, mask = torch.randn(9), torch.ones(9, dtype=torch.bool)
    for alias, name in (("k1", "kl"), ("k2", "mse"), ("k3", "low_var_kl"), ("k3+", "low_var_kl+")):
        assert torch.equal(kl_tokens(alias, d, -d, mask), kl_tokens(name, d, -d, mask))


def test_unknown_estimator_is_refused():
    with pytest.raises(ConfigError, match="did you mean 'low_var_kl'"):
        kl_tokens("low_var_kll", torch.zeros(1), torch.zeros(1), torch.ones(1, dtype=torch.bool))


def test_kl_in_reward_by_hand():
    mask = torch.tensor([[True, True, False]])
    rewards = torch.tensor([[0.0, 1.0, float("nan")]])
    out, sums = kl_in_reward(
        rewards, torch.tensor([[-1.0, -2.0, 0.0]]), torch.tensor([[-1.5, -1.0, 0.0]]), mask, coef=0.1
    )
    close(out, [[-0.05, 1.1, 0.0]], 1e-6)
    assert sums.tolist() == [-0.5, 2.0]


def test_controller_follows_its_formula():
    c = KLController(0.2, target=0.1, horizon=1000)
    c.update(kl=0.11, samples=100)
    assert c.coef == pytest.approx(0.2 * (1 + 0.1 * 0.1))
    c.update(kl=0.0, samples=100)
    assert c.coef == pytest.approx(0.2 * 1.01 * (1 - 0.2 * 0.1))


def test_controller_state_survives_a_checkpoint_and_fixed_stays_fixed():
    c = KLController(0.2, target=0.1)
    c.update(kl=9.0, samples=500)
    other = KLController(0.5, target=0.1)
    other.load_state_dict(c.state_dict())
    assert other.coef == c.coef
    fixed = KLController(0.3)
    fixed.update(kl=9.0, samples=500)
    fixed.load_state_dict(c.state_dict())
    assert fixed.coef == 0.3
    other = KLController(0.5, target=0.1)
    other.load_state_dict(fixed.state_dict())
    assert other.coef == 0.5
    fixed.load_state_dict(KLController(0.7).state_dict())
    assert fixed.coef == 0.3
