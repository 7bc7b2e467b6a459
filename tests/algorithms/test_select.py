"""Choosing tokens over all ranks, and the distillation loss."""

from __future__ import annotations

import math

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megarl.algorithms.distillation import forward_kl_topk
from megarl.algorithms.rows import Rows
from megarl.algorithms.select import descending, drawn, smallest
from tests.algorithms import oracle
from tests.algorithms.cases import close

keys = st.lists(st.integers(0, 2**63 - 1) | st.integers(0, 5), max_size=30)


@given(keys, st.integers(1, 40), st.randoms(use_true_random=False))
def test_smallest_takes_that_many_and_all_ties(values, count, random):
    among = [random.random() < 0.7 for _ in values]
    candidates = sorted(v for v, a in zip(values, among, strict=True) if a)
    bound = candidates[min(count, len(candidates)) - 1] if candidates else -1
    got = smallest(torch.tensor(values, dtype=torch.int64), torch.tensor(among, dtype=torch.bool), count)
    assert got.tolist() == [a and v <= bound for v, a in zip(values, among, strict=True)]


@given(st.lists(st.floats(1e-300, 1e300), max_size=20))
def test_keys_of_positive_floats_are_in_reverse_order(values):
    found = descending(torch.tensor(values, dtype=torch.float64)).tolist()
    assert sorted(values, reverse=True) == [v for _, v in sorted(zip(found, values, strict=True))]
    assert all(key >= 0 for key in found)


def test_draws_belong_to_sample_and_place():
    seeds = torch.tensor([7, 2**62, 7])
    rows = Rows(torch.tensor([0, 3, 5, 7]), None)
    found = drawn(seeds, rows)
    assert (found >= 0).all()
    assert found[:2].tolist() == found[5:].tolist()
    assert len(set(found.tolist())) == 5
    assert drawn(seeds[1:], Rows(torch.tensor([0, 2, 4]), None)).tolist() == found[3:].tolist()


def test_draws_are_even():
    found = drawn(torch.arange(200), Rows(torch.arange(201) * 100, None)).double() / 2.0**63
    assert abs(found.mean().item() - 0.5) < 0.01
    assert abs((found < 0.1).double().mean().item() - 0.1) < 0.01


@given(st.integers(0, 999), st.integers(1, 6), st.integers(0, 4))
@settings(max_examples=40)
def test_forward_kl_equals_its_formula(seed, k, positions):
    g = torch.Generator().manual_seed(seed)
    logp, teacher = (-30 * torch.rand(positions, k, generator=g, dtype=torch.float64) for _ in range(2))
    teacher[torch.rand(positions, k, generator=g) < 0.2] = -math.inf
    mask = torch.rand(positions, generator=g) < 0.7
    logp[~mask] = float("nan")
    expected = [
        oracle.forward_kl_topk(p, q) if m else 0.0
        for p, q, m in zip(logp.tolist(), teacher.tolist(), mask.tolist(), strict=True)
    ]
    logp.requires_grad_()
    found = forward_kl_topk(logp, teacher, mask)
    close(found.detach(), expected)
    found.sum().backward()
    assert torch.isfinite(logp.grad).all()


def test_forward_kl_over_everything_is_the_kl_with_its_gradient():
    logits = torch.tensor([0.3, -1.0, 0.8], dtype=torch.float64, requires_grad=True)
    teacher = torch.tensor([0.0, 0.5, -0.5], dtype=torch.float64).log_softmax(0)
    found = forward_kl_topk(logits.log_softmax(0)[None], teacher[None], torch.ones(1, dtype=torch.bool))
    kl = (teacher.exp() * (teacher - logits.detach().log_softmax(0))).sum()
    close(found.detach(), kl[None])
    found.sum().backward()
    close(logits.grad, logits.detach().softmax(0) - teacher.exp())
