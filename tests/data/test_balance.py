"""Balanced partitions: complete, deterministic, close to the optimum, fast."""

import itertools
import time

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import assume, given, settings

from megarl.data.balance import balance, max_over_mean, share_groups

lengths_lists = st.lists(st.integers(0, 50), max_size=24)


def worst(lengths, parts) -> int:
    return max(sum(lengths[i] for i in part) for part in parts)


def optimum(lengths: list[int], k: int, equal_counts: bool) -> int:
    """Smallest possible largest total, by trying every assignment."""
    best = sum(lengths)
    for choice in itertools.product(range(k), repeat=len(lengths)):
        counts = [choice.count(part) for part in range(k)]
        if not equal_counts or max(counts) - min(counts) <= 1:
            best = min(
                best, max(sum(n for n, c in zip(lengths, choice, strict=True) if c == part) for part in range(k))
            )
    return best


@given(lengths_lists, st.integers(1, 9), st.booleans())
def test_every_item_is_in_exactly_one_part(lengths, k, equal_counts):
    parts = balance(lengths, k, equal_counts)
    assert len(parts) == k
    assert sorted(itertools.chain.from_iterable(parts)) == list(range(len(lengths)))
    assert all(part == sorted(part) for part in parts)


@given(lengths_lists, st.integers(1, 9))
def test_equal_counts_differ_by_at_most_one(lengths, k):
    counts = [len(part) for part in balance(lengths, k, equal_counts=True)]
    assert max(counts) - min(counts) <= 1


@given(st.lists(st.integers(1, 50), max_size=24), st.integers(1, 9))
def test_no_part_is_empty_while_another_holds_two(lengths, k):
    counts = [len(part) for part in balance(lengths, k)]
    assert min(counts) > 0 or max(counts) <= 1


@given(lengths_lists, st.integers(1, 9), st.booleans())
def test_the_same_lengths_give_the_same_parts(lengths, k, equal_counts):
    assert balance(lengths, k, equal_counts) == balance(np.array(lengths, dtype=np.int32), k, equal_counts)


@given(lengths_lists, st.integers(1, 9))
def test_longest_first_bound_holds(lengths, k):
    # Graham: at most 4/3 - 1/(3k) of the optimum, which is at least the mean and the longest item.
    parts = balance(lengths, k)
    longest = sorted(lengths, reverse=True)
    at_least = max([sum(lengths) / k, *longest[:1], sum(longest[k - 1 : k + 1]) if len(lengths) > k else 0])
    assert worst(lengths, parts) <= 4 / 3 * at_least + 1e-9


@pytest.mark.parametrize("equal_counts", [False, True])
def test_small_cases_are_close_to_the_brute_force_optimum(equal_counts):
    generator = np.random.default_rng(0)
    ratios = []
    for _ in range(20):
        lengths = generator.integers(1, 30, 7).tolist()
        ratios.append(worst(lengths, balance(lengths, 3, equal_counts)) / optimum(lengths, 3, equal_counts))
    assert np.mean(ratios) < 1.03
    assert max(ratios) < 1.2


@given(st.integers(0, 10**6), st.integers(2, 8))
@settings(max_examples=75)
def test_no_exchange_between_heaviest_and_lightest_part_evens_them_out(seed, k):
    generator = np.random.default_rng(seed)
    lengths = generator.lognormal(3, 2, generator.integers(k + 1, 5 * k)).astype(int).tolist()
    parts = sorted(balance(lengths, k, equal_counts=True), key=lambda part: sum(lengths[i] for i in part))
    totals = [sum(lengths[i] for i in part) for part in parts]
    assume(totals[0] < totals[1] or k == 2)  # of several heaviest and lightest parts, others may have been compared
    assume(totals[-1] > totals[-2] or k == 2)
    light, heavy = ([lengths[i] for i in part] for part in (parts[0], parts[-1]))
    surplus = sum(heavy) - sum(light)
    pairs = [(give, take) for give in heavy for take in light]
    if len(heavy) > len(light):  # then an item may also move
        pairs += [(give, 0) for give in heavy]
    assert surplus <= 1 or all(abs(surplus - 2 * (give - take)) >= surplus for give, take in pairs)


DISTRIBUTIONS = {
    "uniform": lambda g, n: g.integers(1, 4097, n),
    "lognormal": lambda g, n: np.minimum(g.lognormal(6, 1, n), 8192).astype(int) + 1,
    "exponential": lambda g, n: g.exponential(1000, n).astype(int) + 1,
    "clipped": lambda g, n: np.where(g.random(n) < 0.3, 4096, g.integers(50, 4096, n)),
}


@pytest.mark.parametrize("n", [8192, 8193, 10_000])
@pytest.mark.parametrize("name", DISTRIBUTIONS)
def test_many_lengths_over_512_ranks_with_equal_counts(name, n):
    lengths = DISTRIBUTIONS[name](np.random.default_rng(0), n)
    best = float("inf")
    for _ in range(3):
        start = time.process_time()
        parts = balance(lengths, 512, equal_counts=True)
        best = min(best, time.process_time() - start)
    totals = [lengths[part].sum() for part in parts]
    assert {len(part) for part in parts} == {n // 512, -(-n // 512)}
    assert max(totals) / np.mean(totals) <= 1.02
    assert best <= 0.25  # a hundredth measured; what grows with lengths x ranks takes seconds


def test_nonsense_is_refused():
    with pytest.raises(ValueError, match="k=0"):
        balance([1], 0)
    with pytest.raises(ValueError, match="non-negative"):
        balance([-1], 1)


# -- groups of a step --------------------------------------------------------------------------------------------------


def totals_of(tokens: list[int], shares: list[list[int]], start: int, end: int) -> list[int]:
    """Of each replica, in groups `start` to `end`."""
    return [sum(tokens[k] for k in share if start <= k < end) for share in shares]


@st.composite
def shared_steps(draw, most: int = 5, least: int = 1) -> tuple[list[int], list[list[int]], list[tuple[int, int]]]:
    """Log-normal tokens of groups, the shares of replicas, and where each mini-batch begins and ends."""
    parts = draw(st.integers(least, most))
    ends = list(itertools.accumulate(draw(st.lists(st.integers(1, 6), min_size=1, max_size=4)), initial=0))
    minis = [(parts * a, parts * b) for a, b in itertools.pairwise(ends)]
    generator = np.random.default_rng(draw(st.integers(0, 10**6)))
    tokens = (1 + generator.lognormal(5, draw(st.sampled_from([0.3, 1.0, 2.0])), parts * ends[-1])).astype(int).tolist()
    return tokens, share_groups(tokens, parts, [start for start, _ in minis[1:]]), minis


@given(shared_steps())
@settings(deadline=None)
def test_replicas_have_equally_many_groups_of_every_mini_batch(step):
    tokens, shares, minis = step
    assert sorted(itertools.chain.from_iterable(shares)) == list(range(len(tokens)))
    assert all(share == sorted(share) for share in shares)
    for start, end in minis:
        assert {sum(start <= k < end for k in share) for share in shares} == {(end - start) // len(shares)}


@given(shared_steps())
@settings(deadline=None, max_examples=75)
def test_no_exchange_of_two_groups_would_help_an_uneven_mini_batch(step):
    tokens, shares, minis = step
    for start, end in minis:
        totals = totals_of(tokens, shares, start, end)
        most = max(totals)
        if most * len(shares) <= 1.05 * sum(totals):
            continue
        full = totals.index(most)
        for other in set(range(len(shares))) - {full}:
            rest = [total for part, total in enumerate(totals) if part not in (full, other)]  # one may be as full
            for give, take in itertools.product(shares[full], shares[other]):
                if start <= give < end and start <= take < end:
                    moved = tokens[give] - tokens[take]
                    assert max(most - moved, totals[other] + moved, *rest) >= most


@given(shared_steps(most=2, least=2))
@settings(deadline=None)
def test_of_two_replicas_a_step_is_no_less_even_than_its_worst_mini_batch(step):
    tokens, shares, minis = step
    apart = [abs(one - two) for one, two in (totals_of(tokens, shares, *mini) for mini in minis)]
    one, two = totals_of(tokens, shares, 0, len(tokens))
    assert abs(one - two) <= max(apart)


@pytest.mark.parametrize("parts", [2, 3, 8, 16])
def test_log_normal_groups_are_even_where_a_replica_has_eight_of_a_mini_batch(parts):
    generator = np.random.default_rng(parts)
    even, dealt = [], []
    for _ in range(20):
        tokens = generator.lognormal(6, 1, (24 * parts, 8)).astype(int).sum(1).tolist()
        cuts = [8 * parts, 16 * parts]
        shares = share_groups(tokens, parts, cuts)
        owners = [0] * len(tokens)
        for part, share in enumerate(shares):
            for k in share:
                owners[k] = part
        for start, end in itertools.pairwise([0, *cuts, len(tokens)]):
            totals, rising = totals_of(tokens, shares, start, end), sorted(tokens[start:end])
            whole = rising[-1] + sum(rising[:7])  # the longest group with the shortest ones: nobody can have less
            assert max(totals) <= max(1.05 * sum(totals) / parts, whole)
        even.append(max_over_mean(tokens, owners, parts, cuts))
        dealt.append(max_over_mean(tokens, [k % parts for k in range(len(tokens))], parts, cuts))
    assert np.median(even) <= 1.02
    assert np.median(dealt) > 1.05, "there is something to even out"


def test_a_group_longer_than_all_others_stays_whole_and_its_replica_gets_the_shortest():
    assert share_groups([1, 100, 3, 2], 2) == [[0, 1], [2, 3]]


def test_steps_that_do_not_divide_or_are_empty_are_shared_all_the_same():
    assert share_groups([], 3, [4]) == [[], [], []]
    assert sorted(map(len, share_groups([5, 1, 1, 1, 1], 2, [4]))) == [2, 3]
    assert max_over_mean([0, 0], [0, 0], 2) == 1.0
