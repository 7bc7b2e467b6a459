"""Which groups a step gets, and who gets them, does not depend on how many replicas collected them."""

from __future__ import annotations

import random

import pytest
import torch

from megarl.comm import WorkerGroup
from megarl.data.batch import Batch, Jagged
from megarl.data.groups import group_places
from megarl.runtime.pool import GroupPool
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
    parts = pool.deal(WANTED)
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
