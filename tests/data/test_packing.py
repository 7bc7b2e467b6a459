"""Micro-batches by token budget."""

import itertools

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given

from megarl.data.packing import bundles, pack, split_to_count

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
    with pytest.raises(ValueError, match="count is 1, but the sequences need 2 micro-batches"):
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


#: Of each sequence its tokens, and the images it has, whose costs are those of `IMAGES`.
seeing = st.lists(st.tuples(st.integers(1, 30), st.sampled_from([(), (0,), (1,), (0, 1), (2,)])), max_size=30)
IMAGES = (3, 11, 40)


@given(seeing, st.integers(1, 60))
def test_what_sequences_share_is_counted_once_and_no_bundle_is_over_the_budget(sequences, budget):
    lengths = [length for length, _ in sequences]
    shared = [{image: IMAGES[image] for image in images} for _, images in sequences]
    parts, costs = bundles(lengths, shared, budget)
    assert sorted(itertools.chain.from_iterable(parts)) == list(range(len(lengths)))
    for part, cost in zip(parts, costs, strict=True):
        images = {image for number in part for image in sequences[number][1]}
        assert cost == sum(lengths[number] for number in part) + sum(IMAGES[image] for image in images)
        assert cost <= budget or len(part) == 1
    single = [length + sum(own.values()) for length, own in zip(lengths, shared, strict=True)]
    assert len(pack(costs, budget)) <= len(pack(single, budget))


def test_sequences_that_share_are_together_where_that_needs_no_more_micro_batches():
    shared = [{1: 6}, {2: 6}] * 4
    parts, costs = bundles([2] * 8, shared, 14)
    assert (parts, costs) == ([[0, 2, 4, 6], [1, 3, 5, 7]], [14, 14])
    assert bundles([9] * 3, [{1: 1}] * 3, 20) == ([[0, 2], [1]], [19, 10])
    assert bundles([5] * 3, [{}] * 3, 20) == ([[0], [1], [2]], [5] * 3)
