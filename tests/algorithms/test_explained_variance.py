"""Explained variance against numpy-free loops over float64, and over ranks."""

import math

import torch

from megarl.algorithms.stats import explained_variance


def _oracle(values, returns, mask):
    rows = [(float(v), float(r)) for v, r, m in zip(values, returns, mask, strict=True) if m]
    mean = sum(r for _, r in rows) / len(rows)
    error = sum(r - v for v, r in rows) / len(rows)
    total = sum((r - mean) ** 2 for _, r in rows) / len(rows)
    return 1 - sum((r - v - error) ** 2 for v, r in rows) / len(rows) / total


def _case(count=50):
    rng = torch.Generator().manual_seed(1)
    returns = torch.randn(count, generator=rng)
    values = 0.7 * returns + 0.5 * torch.randn(count, generator=rng) + 3.0
    mask = torch.rand(count, generator=rng) < 0.7
    values[~mask] = math.nan
    return values, returns, mask


def test_equals_the_formula_and_never_reads_hidden_tokens():
    values, returns, mask = _case()
    assert math.isclose(explained_variance(values, returns, mask), _oracle(values, returns, mask), rel_tol=1e-9)


def test_parts_on_several_ranks_give_the_number_of_the_whole():
    values, returns, mask = _case()
    parts = [slice(0, 7), slice(7, 7), slice(7, 50)]
    sums: list[list[torch.Tensor]] = [[], []]  # what each rank adds in each of the two rounds
    for round_ in range(2):
        for part in parts:
            asked = iter([sum(sums[0])] if round_ else [])

            def all_sum(x, asked=asked, round_=round_):
                known = next(asked, None)
                if known is None:
                    sums[round_].append(x)
                    raise StopIteration
                return known

            try:
                explained_variance(values[part], returns[part], mask[part], all_sum=all_sum)
            except StopIteration:
                continue
    totals = iter([sum(sums[0]), sum(sums[1])])
    got = explained_variance(values[parts[0]], returns[parts[0]], mask[parts[0]], all_sum=lambda x: next(totals))
    assert math.isclose(got, _oracle(values, returns, mask), rel_tol=1e-9)


def test_perfect_constant_and_nothing_to_explain():
    returns, mask = torch.tensor([0.0, 1.0, 2.0]), torch.ones(3, dtype=torch.bool)
    assert explained_variance(returns, returns, mask) == 1
    assert explained_variance(torch.full((3,), 9.0), returns, mask) == 0
    assert explained_variance(-returns, returns, mask) == -3
    assert explained_variance(returns, torch.full((3,), 0.1), mask) is None
    assert explained_variance(returns, returns, ~mask) is None
