"""GAE over decisions of several tokens, against a loop over the decisions in float64."""

from __future__ import annotations

import pytest
import torch

from megarl.algorithms.advantages.gae import gae
from megarl.algorithms.decisions import Decisions


@pytest.mark.parametrize(("gamma", "lam"), [(0.9, 0.7), (1.0, 1.0), (0.99, 0.0)])
def test_gae_goes_from_decision_to_decision(gamma: float, lam: float) -> None:
    """Rewards, values and calls of three episodes; only some of the last call's tokens were executed."""
    generator = torch.Generator().manual_seed(3)
    calls, width, executed = [3, 1, 4], 5, 2
    starts, mask, offsets = [], [], [0]
    for count in calls:
        starts += [place % width == 0 for place in range(count * width)]
        mask += [place < (count - 1) * width + executed for place in range(count * width)]
        offsets.append(len(mask))
    began, valid, borders = torch.tensor(starts), torch.tensor(mask), torch.tensor(offsets)
    rewards = torch.randn(len(mask), generator=generator, dtype=torch.float64) * valid
    values = torch.randn(len(mask), generator=generator, dtype=torch.float64)
    decisions = Decisions.of(began, borders)
    result = gae(decisions.gather(rewards), values, began, offsets=borders, gamma=gamma, lam=lam, whiten=False)
    found = [decisions.spread(value, valid) for value in result]
    expected = torch.zeros(2, len(mask), dtype=torch.float64)
    for first, count in zip(offsets, calls, strict=False):
        later = {"advantage": 0.0, "value": 0.0}
        for call in reversed(range(count)):
            at = slice(first + call * width, first + (call + 1) * width)
            value = float(values[at][0])
            advantage = float(rewards[at].sum()) + gamma * later["value"] - value + gamma * lam * later["advantage"]
            expected[0, at], expected[1, at] = advantage * valid[at].double(), (advantage + value) * valid[at].double()
            later = {"advantage": advantage, "value": value}
    torch.testing.assert_close(torch.stack(found), expected, atol=1e-12, rtol=0)


def test_tokens_before_a_rows_first_start_belong_to_no_decision() -> None:
    """The first row has no start, and the third one begins with a token that has none."""
    starts = torch.tensor([0, 0, 1, 0, 0, 1, 0], dtype=torch.bool)
    decisions = Decisions.of(starts, torch.tensor([0, 2, 4, 7]))
    assert decisions.start.tolist() == [-1, -1, 2, 2, -1, 5, 5]
    assert decisions.gather(torch.arange(1.0, 8.0)).tolist() == [0, 0, 7, 0, 0, 13, 0]
    kept = torch.tensor([1, 1, 1, 1, 1, 1, 0], dtype=torch.bool)
    assert decisions.spread(torch.arange(1.0, 8.0), kept).tolist() == [0, 0, 3, 3, 0, 6, 0]
    nothing = Decisions.of(starts[:0], torch.tensor([0]))
    assert nothing.gather(torch.zeros(0)).shape == nothing.spread(torch.zeros(0), starts[:0]).shape == (0,)
