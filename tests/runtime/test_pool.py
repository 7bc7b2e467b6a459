"""Which groups a step gets, and who gets them, does not depend on how many replicas collected them."""

from __future__ import annotations

import random

import pytest
import torch

from megarl.data.balance import share_groups
from megarl.data.batch import Batch, Jagged
from megarl.data.groups import ORDINAL, group_places, tokens_of
from megarl.runtime.exchange import GroupPool
from megarl.system.comm import WorkerGroup
from tests.dist import run_distributed, world
from tests.same import same

ROUNDS = (7, 6, 5)  # prompts per round, divided by no number of replicas
WANTED = 4


def groups(names: list[str]) -> Batch:
    """One to three samples of each prompt."""
    return batch_of([f"{name}#{i}" for name in names for i in range(1 + ord(name[-1]) % 3)])


def batch_of(ids: list[str]) -> Batch:
    tokens = Jagged.from_list([[len(id), *map(ord, id)] for id in ids], dtype=torch.int64)
    return Batch({"tokens": tokens}, {"id": ids, "uid": [id[:-2] for id in ids]})


def mixed(batch: Batch) -> Batch:
    """The same groups in the same order, the samples of all groups one after the other in turn."""
    places = group_places(batch["uid"])
    return batch.select([group[i] for i in range(3) for group in places if i < len(group)])


def kept() -> list[list[tuple[str, bool]]]:
    """(prompt, kept) of every round, in the order of the data."""
    draw = random.Random(3)
    return [[(f"{round_}.{k}", draw.random() < 0.6) for k in range(count)] for round_, count in enumerate(ROUNDS)]


def deal(group: WorkerGroup) -> list[list]:
    """What this replica is dealt, as [ids, do the tokens belong to them]."""
    pool, rank, size = GroupPool(group), group.rank, group.size
    for row in kept():
        mine = row[rank::size]
        pool.add(mixed(groups([name for name, _ in mine])), [keep for _, keep in mine])
    parts = pool.split(WANTED)
    return [[part["id"], same(part, batch_of(part["id"]))] for part in parts] + [len(pool)]


def on_all_ranks() -> dict:
    everyone = world()
    pair = everyone.subgroup([0, 1], "a pair")
    return {"3": deal(everyone), "2": None if pair is None else deal(pair)}


def expected(rank: int, size: int) -> list[list]:
    names = [name for row in kept() for name, keep in row if keep]
    parts = [names[:WANTED][rank::size], names[WANTED:][rank::size]]
    return [[groups(part)["id"], True] for part in parts] + [len(names)]


def test_one_replica_keeps_the_first_in_order():
    assert deal(WorkerGroup.alone()) == expected(0, 1)


@pytest.mark.procs
def test_two_and_three_replicas_share_the_same_groups():
    for rank, found in enumerate(run_distributed(on_all_ranks, 3, 120)):
        assert found["3"] == expected(rank, 3)
        assert found["2"] == (expected(rank, 2) if rank < 2 else None)


# -- by tokens ---------------------------------------------------------------------------------------------------------

CUTS = (6,)  # of 12 groups


class Counting(WorkerGroup):
    """Counts the bytes of samples that are sent, by the rank that gets them."""

    sent: list[int]

    def all_to_all_bytes(self, parts):
        self.sent = [len(part) for part in parts]
        return super().all_to_all_bytes(parts)


def lengths() -> list[int]:
    """Response tokens of each sample of 12 groups."""
    draw = random.Random(5)
    return [1 + int(draw.lognormvariate(3, 1)) for _ in range(12)]


def drawn(numbers: list[int]) -> Batch:
    """Two samples of each prompt, the second one twice as long."""
    places = [(k, i) for k in numbers for i in range(2)]
    tokens = [lengths()[k] * (1 + i) for k, i in places]
    batch = Batch(size=len(places))
    batch.set("prompt_ids", Jagged.from_list([[k] * 3 for k, _ in places], dtype=torch.int64))
    batch.set("response_ids", Jagged.from_list([[7] * n for n in tokens], dtype=torch.int64))
    batch.set("uid", [str(k) for k, _ in places])
    return batch


def by_tokens(group: WorkerGroup) -> list:
    """Numbers of the samples that this replica gets, are they whole, how many were sent to others and to itself."""
    counting = Counting(group.name, group.process_group if group.size > 1 else None, group.deadline_s)
    pool = GroupPool(counting, CUTS)
    mine = list(range(group.rank, 12, group.size))
    pool.add(mixed(drawn(mine)), [True] * len(mine))
    batch, rest = pool.split(12)
    numbers = [int(uid) for uid in batch["uid"][::2]]
    good = same(batch.drop([ORDINAL]), drawn(numbers)) and batch[ORDINAL] == [k for k in numbers for _ in range(2)]
    leaves = len(set(mine) - set(numbers)) > 0
    sent = getattr(counting, "sent", [0])
    return [numbers, good and len(rest) == 0, sent[group.rank] == 0 and (sum(sent) > 0) == leaves]


def by_tokens_on_all_ranks() -> dict:
    everyone = world()
    pair = everyone.subgroup([0, 1], "a pair")
    return {"3": by_tokens(everyone), "2": None if pair is None else by_tokens(pair)}


def test_one_replica_keeps_all_groups_in_order():
    assert by_tokens(WorkerGroup.alone()) == [list(range(12)), True, True]


@pytest.mark.procs
def test_replicas_exchange_groups_by_tokens_and_keep_the_mini_batches():
    found = run_distributed(by_tokens_on_all_ranks, 3, 120)
    tokens = [3 * n + 6 for n in lengths()]
    for size in (2, 3):
        shares = [found[rank][str(size)] for rank in range(size)]
        assert [numbers for numbers, _, _ in shares] == share_groups(tokens, size, CUTS)
        assert all(whole and only_leaving for _, whole, only_leaving in shares)


def test_a_shared_prompt_counts_once_in_its_group():
    lengths = {"prompt_ids": [5, 5, 7, 5], "response_ids": [1, 2, 3, 4]}
    batch = Batch(
        {name: Jagged.from_list([[0] * length for length in each]) for name, each in lengths.items()},
        {"uid": ["a", "a", "b", "a"]},
    )
    assert tokens_of(batch) == [6, 7, 10, 9]
    assert tokens_of(batch, share=True) == [6, 2, 10, 4]


def test_only_equal_prompts_of_a_group_are_shared():
    """Rows of an agent's episode have one uid, and the prompt of a later turn is longer."""
    prompts = [[1, 2], [1, 2, 3, 4], [1, 2], [1, 2]]
    fields = {"prompt_ids": prompts, "response_ids": [[0], [0], [0], [0]]}
    batch = Batch({name: Jagged.from_list(rows) for name, rows in fields.items()}, {"uid": ["a", "a", "a", "b"]})
    assert tokens_of(batch, share=True) == [3, 5, 1, 3]
