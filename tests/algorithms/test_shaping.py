"""Overlong penalty and group filter."""

from __future__ import annotations

from fractions import Fraction

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megarl.algorithms.group_filter import accuracy_filter, group_filter, score_histogram, truncated_filter
from megarl.algorithms.overlong import overlong_penalty


@given(st.lists(st.integers(0, 50), max_size=8), st.integers(1, 40), st.floats(0.1, 3))
def test_penalty_equals_its_formula(lengths, buffer, factor):
    got = overlong_penalty(torch.tensor(lengths, dtype=torch.int64), max_length=40, buffer=buffer, factor=factor)
    expected = [min(-((n - (40 - buffer)) / buffer) * factor, 0.0) for n in lengths]
    assert got.tolist() == pytest.approx(expected, abs=1e-5)


def test_penalty_zone_must_fit():
    with pytest.raises(ValueError, match="buffer"):
        overlong_penalty(torch.tensor([1]), max_length=10, buffer=11)


@given(st.lists(st.tuples(st.sampled_from("abc"), st.sampled_from([0.0, 0.1, 1.0])), max_size=12))
def test_filter_keeps_exactly_the_groups_that_vary(rows):
    uid, metric = [u for u, _ in rows], [x for _, x in rows]
    expected = [len({x for u, x in rows if u == mine}) > 1 for mine in uid]
    assert group_filter(torch.tensor(metric), uid).tolist() == expected


@given(
    st.lists(st.tuples(st.sampled_from("abc"), st.integers(0, 1)), min_size=1, max_size=12),
    st.sampled_from([None, 0.0, 0.3, 0.5]),
    st.sampled_from([None, 0.5, 0.7, 1.0]),
)
def test_accuracy_filter_keeps_exactly_the_groups_inside_its_bounds(rows, low, high):
    uid, metric = [u for u, _ in rows], [x for _, x in rows]
    expected = []
    for mine in uid:
        group = [x for u, x in rows if u == mine]
        mean = Fraction(sum(group), len(group))
        above = low is None or mean >= Fraction(str(low))
        expected.append(above and (high is None or mean <= Fraction(str(high))))
    assert accuracy_filter(torch.tensor(metric).float(), uid, low=low, high=high).tolist() == expected


def test_bounds_are_inclusive_in_spite_of_rounding():
    metric, uid = torch.tensor([0.1] * 3 + [0.0, 1.0]), list("aaabb")
    assert accuracy_filter(metric.double(), uid, low=0.1, high=0.5).all()
    assert accuracy_filter(metric, uid, low=0.2).tolist() == [False] * 3 + [True] * 2


def test_truncated_filter_drops_what_the_limit_cut():
    assert truncated_filter(["stop", "length"]).tolist() == [True, False]


@pytest.mark.parametrize("low", [0, -1, 0.25])
def test_histogram_separates_half_right_groups_from_wrong_ones_on_any_scale(low):
    groups = [[low, low], [low, 1.0], [1.0, low], [1.0, 1.0], [0.5, 0.5]]
    assert score_histogram(groups) == {f"all {low}": 1, "between": 3, "all 1": 1}


def test_histogram_of_a_single_score():
    assert score_histogram([[0.5, 0.5]] * 3) == {"all 0.5": 3, "between": 0}
