"""Choosing tokens over all ranks."""

from __future__ import annotations

from collections.abc import Callable

import torch
from hypothesis import given
from hypothesis import strategies as st

from megarl.algorithms.rows import Rows
from megarl.algorithms.select import descending, random_keys, smallest, within_mean

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
    found = random_keys(seeds, rows)
    assert (found >= 0).all()
    assert found[:2].tolist() == found[5:].tolist()
    assert len(set(found.tolist())) == 5
    assert random_keys(seeds[1:], Rows(torch.tensor([0, 2, 4]), None)).tolist() == found[3:].tolist()


def test_draws_are_even():
    found = random_keys(torch.arange(200), Rows(torch.arange(201) * 100, None)).double() / 2.0**63
    assert abs(found.mean().item() - 0.5) < 0.01
    assert abs((found < 0.1).double().mean().item() - 0.1) < 0.01


@given(
    st.lists(st.integers(0, 5), max_size=30), st.sampled_from([0.1, 1.0, 2.0, 9.0]), st.randoms(use_true_random=False)
)
def test_within_mean_takes_the_smallest_and_all_ties(values, limit, random):
    among = [random.random() < 0.7 for _ in values]
    rest = [v for v, a in zip(values, among, strict=True) if a]
    while rest and sum(rest) > limit * len(rest):
        rest = [v for v in rest if v < max(rest)]
    kept = within_mean(torch.tensor(values).double(), torch.tensor(among, dtype=torch.bool), limit)
    assert kept.tolist() == [a and v in rest for v, a in zip(values, among, strict=True)]


def adding(others: list[torch.Tensor], own: list[torch.Tensor]) -> Callable[[torch.Tensor], torch.Tensor]:
    """A sum over two ranks: adds the other one's numbers as far as they are known, and records this one's."""
    known = iter(others)

    def all_sum(x: torch.Tensor) -> torch.Tensor:
        own.append(x)
        return x + next(known, torch.zeros_like(x))

    return all_sum


def test_within_mean_has_one_bound_on_all_ranks():
    """Two ranks that add their sums choose the tokens that one rank with both parts chooses."""
    values = torch.rand(40, dtype=torch.float64, generator=torch.Generator().manual_seed(3)).mul(8).round().div(8)
    among, parts = torch.arange(40) % 5 > 0, [slice(0, 13), slice(13, 40)]
    sums: list[list[torch.Tensor]] = [[], []]
    for _ in range(9):  # in every round the sums of the search's next step become known
        earlier, sums, kept = sums, [[], []], []
        for rank, part in enumerate(parts):
            kept.append(within_mean(values[part], among[part], 0.3, adding(earlier[1 - rank], sums[rank])))
    whole = within_mean(values, among, 0.3)
    assert torch.cat(kept).tolist() == whole.tolist()
    assert 0 < int(whole.sum()) < int(among.sum())
