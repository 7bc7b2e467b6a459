"""Replicas exchange rows before a pass: how even they get, that every row is computed once, and where results go.

That loss and gradients do not depend on it: test_layouts.py and test_loss_invariance.py, where replicas are uneven.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import hypothesis.strategies as st
import numpy as np
import pytest
import torch
from hypothesis import given

from megarl.config.training import EngineConfig
from megarl.data.balance import balance, rebalance
from megarl.data.batch import Batch, Jagged
from megarl.system.comm import WorkerGroup
from megarl.system.errors import ConfigError
from megarl.training import microbatch
from megarl.training.row_exchange import RowExchange
from megarl.training.sequence_layout import TextLayout


class Ranks:
    """Groups of threads, each a rank, that exchange bytes."""

    def __init__(self, size: int) -> None:
        self.size, self._all = size, [[b""] * size for _ in range(size)]
        self._meet = threading.Barrier(size, timeout=60)

    def run(self, fn: Callable) -> list:
        def on(rank: int):
            try:
                return fn(Rank(self, rank))
            except BaseException:
                self._meet.abort()  # the others wait for this rank
                raise

        with ThreadPoolExecutor(self.size) as pool:
            return list(pool.map(on, range(self.size)))

    def swap(self, rank: int, parts: list[bytes]) -> list[bytes]:
        self._all[rank] = parts
        self._meet.wait()
        received = [parts[rank] for parts in self._all]
        self._meet.wait()
        return received


class Rank:
    def __init__(self, ranks: Ranks, rank: int) -> None:
        self.ranks, self.rank, self.size = ranks, rank, ranks.size

    def all_gather_bytes(self, data: bytes) -> list[bytes]:
        return self.ranks.swap(self.rank, [data] * self.size)

    def all_to_all_bytes(self, parts: list[bytes]) -> list[bytes]:
        return self.ranks.swap(self.rank, parts)


def rows_of(lengths: list[int], first: int) -> Batch:
    """Rows whose tokens and id are the row's number, from `first`."""
    tokens = Jagged.from_list([[first + place] * n for place, n in enumerate(lengths)], dtype=torch.int64)
    prompts = Jagged.from_list([[0]] * len(lengths), dtype=torch.int64)
    columns = {"sample_id": [str(first + place) for place in range(len(lengths))]}
    return Batch({"prompt_ids": prompts, "response_ids": tokens}, columns)


def exchange(shares: list[list[int]], unit: int = 1) -> list[tuple[RowExchange, Batch, Batch, Jagged]]:
    """Exchange rows of these lengths; each rank's exchange, rows before and after, and restored outputs."""
    firsts = np.cumsum([0, *map(len, shares)]).tolist()

    def of(rank: Rank) -> tuple[RowExchange, Batch, Batch, Jagged]:
        given = rows_of(shares[rank.rank], firsts[rank.rank])
        made = RowExchange.of(*microbatch.indivisible(given, 64, unit=unit), rank)
        rows = made.send(given)
        outputs = rows["response_ids"].like(rows["response_ids"].values[:, None] * torch.tensor([1.0, -1.0]))
        return made, given, rows, made.restore(outputs)

    return Ranks(len(shares)).run(of)


def lognormal(prompts: int, samples: int, seed: int = 0) -> np.ndarray:
    """Lengths of responses with sigma 0.8, half of the variance between prompts, int [prompts, samples]."""
    rng, sigma = np.random.default_rng(seed), 0.8 * 0.5**0.5
    logs = 5 + rng.normal(0, sigma, (prompts, 1)) + rng.normal(0, sigma, (prompts, samples))
    return np.exp(logs).astype(int) + 1


def test_sixteen_replicas_of_one_group_each_get_equally_many_tokens():
    """A group of 32 samples is all that each of 16 replicas has of a mini-batch of 16 prompts."""
    shares = lognormal(16, 32, seed=7).tolist()
    ranks = exchange(shares)
    totals = np.array([int(rows["response_ids"].lengths.sum()) for _, _, rows, _ in ranks])
    given = np.array(list(map(sum, shares)))
    print(f"fullest over mean: {given.max() / given.mean():.2f}, exchanged {totals.max() / totals.mean():.3f}")
    assert given.max() / given.mean() > 1.9
    assert totals.max() / totals.mean() < 1.05
    assert ranks[0][0].before == pytest.approx(given.max() / given.mean())
    assert ranks[0][0].after == pytest.approx(totals.max() / totals.mean())


@given(st.lists(st.lists(st.integers(1, 40), max_size=8).map(lambda n: n[: len(n) // 2 * 2]), min_size=2, max_size=4))
def test_every_row_is_computed_once_and_its_outputs_return(shares):
    ranks = exchange(shares, unit=2)
    computed = [int(number) for _, _, rows, _ in ranks for number in rows["sample_id"]]
    assert sorted(computed) == list(range(sum(map(len, shares))))
    for made, before, rows, restored in ranks:
        numbers, lengths = list(map(int, rows["sample_id"])), rows["response_ids"].lengths.tolist()
        assert rows["response_ids"].values.tolist() == np.repeat(numbers, lengths).tolist()
        assert [number // 2 for number in numbers[::2]] == [number // 2 for number in numbers[1::2]]
        assert made.moves or rows is before
        assert restored.offsets.equal(before["response_ids"].offsets)
        assert restored.values.tolist() == [[n, -n] for n in before["response_ids"].values.tolist()]
        assert made.after <= made.before


def test_replicas_that_are_even_send_nothing():
    ranks = exchange([[50, 50], [51, 50]])
    assert not any(made.moves for made, *_ in ranks)


def test_samples_that_share_a_prompt_stay_together():
    """Four samples of a prompt of 32 tokens are one unit, which a micro-batch computes with the prompt once."""
    ids = Jagged.from_list([list(range(32))] * 4 + [[7]], dtype=torch.int64)
    batch = Batch({"prompt_ids": ids, "response_ids": Jagged.from_list([[1, 2, 3]] * 5, dtype=torch.int64)})
    assert microbatch.indivisible(batch, 64, TextLayout(share=True)) == ([[0, 1, 2, 3], [4]], [40, 3])
    assert microbatch.indivisible(batch, 64, TextLayout())[0] == [[0], [1], [2], [3], [4]]


@given(st.lists(st.tuples(st.integers(0, 50), st.integers(0, 4)), max_size=24))
def test_moved_items_leave_no_part_fuller_than_the_fullest_before(items):
    sizes, owners = [size for size, _ in items], [owner for _, owner in items]
    before, after = (np.bincount(parts, sizes, 5) for parts in (owners, rebalance(sizes, owners, 5)))
    assert after.max() <= before.max()
    assert after.sum() == before.sum()


def test_few_items_move_and_the_parts_are_as_even_as_new_ones():
    sizes = lognormal(64, 16).ravel()
    owners = np.repeat(np.arange(64) % 16, 16)
    new = rebalance(sizes, owners, 16)
    fullest = np.bincount(new, weights=sizes).max()
    assert fullest <= 1.02 * max(sizes[part].sum() for part in balance(sizes, 16))
    assert sizes[new != owners].sum() < 0.3 * sizes.sum()


def test_a_column_that_cannot_be_sent_names_the_key():
    from megarl.training.engine import MegatronEngine

    batch = rows_of([9, 9], 0)
    batch.set("handles", [object(), object()])
    engine = MegatronEngine.__new__(MegatronEngine)
    engine._where, engine.config = "actor.engine", EngineConfig()
    exchange = RowExchange(WorkerGroup.alone(), staying=[0], leaving=[[], [1]], coming=[0, 0], before=2.0, after=1.0)
    with pytest.raises(ConfigError, match=r"'handles'(?s:.*)set actor\.engine\.balance_replicas=false"):
        engine._sent(exchange, batch)
