"""Micro-batches by token budget."""

import itertools

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given

from megarl.data.packing import pack, split_to_count

lengths_lists = st.lists(st.integers(0, 30), max_size=30)


def fewest(lengths: list[int], budget: int) -> int:
    """Smallest number of micro-batches, by trying every assignment."""
    for count in range(1, len(lengths) + 1):
        for choice in itertools.product(range(count), repeat=len(lengths)):
            if all(
                sum(n for n, c in zip(lengths, choice, strict=True) if c == part) <= budget for part in range(count)
            ):
                return count
    return 0


@given(lengths_lists, st.integers(1, 40))
def test_every_sequence_once_and_no_micro_batch_over_the_budget(lengths, budget):
    parts = pack(lengths, budget)
    assert sorted(itertools.chain.from_iterable(parts)) == list(range(len(lengths)))
    assert all(part and part == sorted(part) for part in parts)
    assert all(len(part) == 1 or sum(lengths[i] for i in part) <= budget for part in parts)


@given(lengths_lists, st.integers(1, 40), st.integers(0, 6))
def test_any_larger_count_is_reached_within_the_budget(lengths, budget, more):
    count = len(pack(lengths, budget)) + more
    parts = split_to_count(lengths, count, budget)
    assert len(parts) == count
    assert sorted(itertools.chain.from_iterable(parts)) == list(range(len(lengths)))
    assert all(len(part) <= 1 or sum(lengths[i] for i in part) <= budget for part in parts)


@given(st.lists(st.integers(1, 30), max_size=30), st.integers(1, 12))
def test_micro_batches_are_empty_only_without_sequences_to_fill_them(lengths, count):
    sizes = [len(part) for part in split_to_count(lengths, count)]
    assert sizes.count(0) == max(0, count - len(lengths))
    assert all(sizes[: min(count, len(lengths))])


def test_few_micro_batches_against_the_brute_force_optimum():
    generator = np.random.default_rng(0)
    for _ in range(20):
        lengths = generator.integers(1, 10, 6).tolist()
        assert len(pack(lengths, 10)) <= 11 / 9 * fewest(lengths, 10) + 6 / 9


def test_too_small_a_count_is_refused():
    with pytest.raises(ValueError, match="2 micro-batches are needed, 1"):
        split_to_count([9, 9], 1, budget=10)


def test_a_long_sequence_is_alone():
    assert pack([1, 50, 1], 10) == [[0, 2], [1]]


def test_no_sequences():
    assert pack([], 10) == []
    assert split_to_count([], 2) == [[], []]


def test_large_batches_fill_their_budget():
    lengths = np.random.default_rng(0).integers(1, 4097, 2000)
    parts = pack(lengths, 16384)
    assert len(parts) == -(-int(lengths.sum()) // 16384)
