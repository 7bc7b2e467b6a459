"""The bank of successes: bounded, deterministic, and the same after a checkpoint."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megarl.algorithms.progress import SuccessBank
from megarl.data.batch import Batch
from megarl.system.errors import UserError

EPISODE = st.tuples(st.sampled_from(["a", "b", "c"]), st.booleans(), st.sampled_from([0.0, math.nan, 1.0, 2.0, 3.0]))


def fill(bank, episodes):
    rows = torch.tensor([[value, value] for _, _, value in episodes]).reshape(-1, 2)
    bank.add(rows, torch.tensor([won for _, won, _ in episodes], dtype=torch.bool), [name for name, _, _ in episodes])


@given(st.lists(st.lists(EPISODE, max_size=6), max_size=5), st.integers(1, 4))
def test_a_bank_holds_the_latest_valid_successes_of_each_task(batches, size):
    bank, expected = SuccessBank(size), {}
    for episodes in batches:
        fill(bank, episodes)
        for name, won, value in episodes:
            if won and value > 0:
                expected[name] = [*expected.get(name, []), value][-size:]
    for name in "abc":
        held = bank.references(name, 2)
        assert (None if held is None else held[:, 0].tolist()) == expected.get(name)
    assert len(bank) == sum(map(len, expected.values()))


@given(st.lists(EPISODE, max_size=12), st.integers(1, 4), st.integers(1, 4))
def test_a_checkpoint_keeps_what_the_bank_holds(episodes, size, later):
    bank, again = SuccessBank(size), SuccessBank(later)
    fill(bank, episodes)
    fill(again, [("c", True, 9.0)])
    state = bank.state()
    saved = Batch({"embedding": state["embedding"]})
    saved.set("task", state["task"])
    back = Batch.from_bytes(saved.to_bytes())
    again.load_state({"embedding": back["embedding"], "task": back["task"]})
    for name in "abc":
        held, found = bank.references(name, 2), again.references(name, 2)
        assert (found is None) == (held is None)
        assert held is None or found.tolist() == held[-later:].tolist()


def test_tasks_may_be_numbers():
    bank = SuccessBank(1)
    bank.add(torch.ones(2, 3), torch.tensor([True, True]), [4, 5])
    again = SuccessBank(1)
    again.load_state(bank.state())
    assert again.references(5, 3).tolist() == [[1.0] * 3]


def test_what_it_holds_does_not_keep_the_batch_in_memory():
    bank, rows = SuccessBank(1), torch.ones(1000, 8)
    bank.add(rows, torch.ones(1000, dtype=torch.bool), ["a"] * 1000)
    assert bank.references("a", 8).untyped_storage().nbytes() == 8 * 4
    rows.zero_()
    assert bank.references("a", 8).sum() == 8


def test_another_encoder_is_refused():
    bank = SuccessBank(1)
    bank.add(torch.ones(1, 3), torch.tensor([True]), ["reach"])
    for use in (
        lambda: bank.references("reach", 4),
        lambda: bank.add(torch.ones(1, 4), torch.tensor([True]), ["push"]),
    ):
        with pytest.raises(UserError, match=r"success bank, task 'reach'(?s:.*)found: +4(?s:.*)allowed: 3"):
            use()


def test_an_empty_bank_is_refused():
    with pytest.raises(ValueError, match="at least 1"):
        SuccessBank(0)
