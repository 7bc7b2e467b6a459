"""Response masks of executed actions, counted over policy calls in order."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megarl.algorithms.executed import executed_mask


@given(st.lists(st.tuples(st.integers(0, 4), st.data()), max_size=6), st.integers(1, 25), st.integers(1, 14))
def test_every_executed_action_counts_all_its_tokens_and_no_other_does(episodes, chunk, dims):
    calls = [count for count, _ in episodes]
    steps = [data.draw(st.integers(0, count * chunk)) for count, data in episodes]
    mask, offsets = executed_mask(torch.tensor(steps).long(), torch.tensor(calls).long(), chunk=chunk, dims=dims)
    expected, ends = [], [0]
    for finish, count in zip(steps, calls, strict=True):
        done = 0
        for _call in range(count):
            for _action in range(chunk):
                expected += [done < finish] * dims
                done += 1
        ends.append(len(expected))
    assert mask.tolist() == expected
    assert offsets.tolist() == ends
    assert (mask.dtype, offsets.dtype) == (torch.bool, torch.int64)


@pytest.mark.parametrize(("chunk", "dims"), [(8, 7), (25, 14), (8, 14), (25, 7)])
def test_an_episode_that_ends_inside_a_call_keeps_the_first_actions_of_it(chunk, dims):
    mask, offsets = executed_mask(torch.tensor([chunk + 3]), torch.tensor([2]), chunk=chunk, dims=dims)
    assert mask.sum() == (chunk + 3) * dims
    assert mask[: (chunk + 3) * dims].all()
    assert offsets.tolist() == [0, 2 * chunk * dims]


@pytest.mark.parametrize(("steps", "calls"), [(-1, 1), (17, 2), (1, 0)])
def test_more_actions_than_were_drawn_are_refused(steps, calls):
    with pytest.raises(ValueError, match=rf"episode 1 executed {steps} actions of the {calls * 8} of its {calls}"):
        executed_mask(torch.tensor([8, steps]), torch.tensor([1, calls]), chunk=8, dims=7)


def test_shapes_and_sizes_are_checked():
    with pytest.raises(ValueError, match=r"must be \[B\]"):
        executed_mask(torch.tensor([1, 2]), torch.tensor([1]), chunk=8, dims=7)
    with pytest.raises(ValueError, match="at least one action"):
        executed_mask(torch.tensor([1]), torch.tensor([1]), chunk=0, dims=7)
