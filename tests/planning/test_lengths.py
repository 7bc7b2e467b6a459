"""Closed forms of log-normal lengths, against samples of them."""

from __future__ import annotations

import numpy as np
import pytest

from megarl.planning.lengths import Lengths

CASES = [Lengths(300.0, 0.8, 1024), Lengths(300.0, 0.3, 1024), Lengths(900.0, 1.0, 1024), Lengths(200.0, 0.0, 256)]


def drawn(lengths, groups=4000, samples=8):
    return np.array(lengths.sample((1,), groups, samples))


@pytest.mark.parametrize("lengths", CASES, ids=str)
def test_mean_variation_and_share_above_are_those_of_samples(lengths):
    """32,000 samples: three standard errors of their mean are 1.3%; rounding to tokens is less."""
    found = drawn(lengths)
    assert lengths.expected == pytest.approx(found.mean(), rel=0.015)
    assert lengths.variation == pytest.approx(found.std() / found.mean(), abs=0.02)
    for tokens in (50, 150, 300, 700):
        assert lengths.above(tokens) == pytest.approx((found > tokens).mean(), abs=0.015)
    assert lengths.above(lengths.longest) == 0


@pytest.mark.parametrize("samples", [2, 16, 128])
def test_the_longest_of_some_is_about_that_of_samples(samples):
    """The quantile stands for the mean of the largest: within 6%, of two within 12%."""
    lengths = Lengths(300.0, 0.6, 4096)
    found = drawn(lengths, 4000, samples).max(axis=1).mean()
    assert lengths.longest_of(samples) == pytest.approx(found, rel=0.12 if samples == 2 else 0.06)


def test_one_sample_is_as_long_as_the_mean():
    assert Lengths(300.0, 0.6, 4096).longest_of(1) == Lengths(300.0, 0.6, 4096).expected
