"""Every sample gets exactly one destination, whatever the sizes."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from megarl.dag.exchange_plan import PartInfo, assign
from megarl.data.balance import balance

sizes = st.lists(st.integers(0, 7), min_size=1, max_size=5)


def infos(counts, group=1):
    parts, k = [], 0
    for count in counts:
        numbers = range(k, k + count)
        parts.append(
            PartInfo(
                count, [f"s{i}" for i in numbers], [f"g{i // group}" for i in numbers], [1 + i % 5 for i in numbers]
            )
        )
        k += count
    return parts


def flat(counts):
    return [(part, i) for part, count in enumerate(counts) for i in range(count)]


@given(sizes, st.integers(1, 5), st.integers(1, 4), st.booleans(), st.booleans())
def test_exactly_once_and_groups_stay_whole(counts, n_dst, group, balanced, equal):
    plan = assign(infos(counts, group), n_dst, balance=balance if balanced else None, equal_counts=equal)
    assert len(plan) == n_dst
    assert sorted(s for part in plan for s in part) == flat(counts)
    home = {}
    number = {sample: k // group for k, sample in enumerate(flat(counts))}
    for dst, part in enumerate(plan):
        for sample in part:
            assert home.setdefault(number[sample], dst) == dst


@given(sizes, st.integers(1, 5))
def test_unbalanced_runs_keep_the_order_and_near_equal_counts(counts, n_dst):
    plan = assign(infos(counts), n_dst)
    assert [s for part in plan for s in part] == flat(counts)
    lengths = [len(part) for part in plan]
    assert max(lengths) - min(lengths) <= 1


@given(sizes, st.randoms(use_true_random=False), st.integers(1, 4))
def test_samples_go_back_to_who_holds_them(counts, random, n_dst):
    ids = [f"s{i}" for i in range(sum(counts))]
    random.shuffle(ids)
    held = [ids[k::n_dst] for k in range(n_dst)]
    plan = assign(infos(counts), n_dst, held=held)
    name = dict(zip(flat(counts), (f"s{i}" for i in range(sum(counts))), strict=True))
    assert [[name[s] for s in part] for part in plan] == held


def test_other_samples_are_planned_afresh():
    assert assign(infos([2]), 2, held=[["s0"], ["other"]]) == [[(0, 0)], [(0, 1)]]


def test_balanced_parts_have_even_tokens():
    part = PartInfo(6, lengths=[10, 1, 1, 1, 1, 6])
    plan = assign([part], 2, balance=balance)
    assert sorted(sum([10, 1, 1, 1, 1, 6][i] for _, i in p) for p in plan) == [10, 10]
