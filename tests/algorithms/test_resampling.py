"""Which samples PF-PPO trains on, and that a sample of two copies counts as two."""

from __future__ import annotations

import math
from collections import Counter

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megarl.algorithms.aggregation import aggregation_weights, local_counts
from megarl.algorithms.resampling import RESAMPLING, resampled
from megarl.config.algorithm import Aggregation, ResamplingConfig
from megarl.system.errors import UserError
from tests.algorithms.cases import cases, close

MODES = list(Aggregation.__args__)


def weight(name: str, score: float, scores: list[float], power: float) -> float:
    """A sample's weight, by its definition."""
    if name == "pow":
        return abs(score) ** power
    if name == "max_min":
        return float(score in (max(scores), min(scores)))
    return {"none": 1.0}.get(name, 0.4 if score == max(scores) else 0.1)


@pytest.mark.parametrize("name", RESAMPLING.names())
@given(scores=st.lists(st.sampled_from([-1.5, 0.0, 0.25, 1.0, 3.0]), min_size=1, max_size=9), seed=st.integers(0, 99))
@settings(max_examples=15, deadline=None)
def test_weights_and_copies(name, scores, seed):
    own = {"power": 3.0} if name == "pow" else {}
    found = RESAMPLING.get(name)(torch.tensor(scores, dtype=torch.float64), **own)
    close(found, [weight(name, score, scores, 3.0) for score in scores])
    copies = resampled(ResamplingConfig(name=name, **own), torch.tensor(scores), seed)
    assert copies.dtype == torch.int64
    assert int(copies.sum()) == len(scores)
    assert torch.equal(copies, resampled(ResamplingConfig(name=name, **own), torch.tensor(scores), seed))


def test_draws_follow_the_weights():
    """pow 2 of scores 1, 2, 0: shares 1/5, 4/5 and nothing, within four deviations of 4,000 draws."""
    scores, total = torch.tensor([1.0, 2.0, 0.0, 0.0]), Counter()
    for seed in range(1000):
        total.update(dict(enumerate(resampled(ResamplingConfig(name="pow"), scores, seed).tolist())))
    assert abs(total[0] / 4000 - 0.2) < 4 * math.sqrt(0.16 / 4000)
    assert total[2] == total[3] == 0


def test_scores_of_zero_are_drawn_evenly_and_no_sample_is_no_error():
    assert int(resampled(ResamplingConfig(name="pow"), torch.zeros(64), 0).gt(0).sum()) > 20
    assert resampled(ResamplingConfig(name="max_min"), torch.zeros(0), 0).tolist() == []


def test_weights_that_are_none_are_refused(tmp_path, monkeypatch):
    (tmp_path / "weights_of_mine.py").write_text("def minus(scores):\n    return -scores\n")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match="weight per sample"):
        resampled(ResamplingConfig(name="weights_of_mine.py:minus"), torch.ones(2), 0)


@given(cases, st.sampled_from(MODES), st.integers(0, 99))
@settings(max_examples=15, deadline=None)
def test_copies_are_worth_what_the_copied_batch_is(case, mode, seed):
    """The loss of the batch with every sample written out as often as it was drawn."""
    g = torch.Generator().manual_seed(seed)
    copies = torch.randint(0, 4, (len(case.uid),), generator=g)
    counts = local_counts(case.mask, copies=copies)
    weights = aggregation_weights(mode, case.mask, counts, sum_norm=7.0, copies=copies)
    again = torch.repeat_interleave(torch.arange(len(case.uid)), copies)
    mask, loss = case.mask[again], case.advantages[again]
    assert torch.equal(counts, local_counts(mask))
    expected = (aggregation_weights(mode, mask, local_counts(mask), sum_norm=7.0) * loss).sum()
    close((weights * case.advantages).sum(), expected, 1e-6)
    packed = aggregation_weights(mode, case.pack(case.mask), counts, offsets=case.offsets, sum_norm=7.0, copies=copies)
    close(packed, case.pack(weights))
