"""Real processes over gloo: many random redistributions in one process group each."""

from __future__ import annotations

import itertools
import random

import pytest
import torch
import torch.distributed as dist

from megarl.dag.exchange import DataLayout
from megarl.dag.exchange_dist import DistExchange, ExchangeError
from megarl.data.batch import Batch, Jagged
from tests.dist import run_distributed
from tests.dist import world as all_ranks
from tests.same import same

pytestmark = pytest.mark.procs


def samples(numbers: list[int]) -> Batch:
    """Samples whose every field follows from their number; odd shapes, dtypes and text on purpose."""

    def jagged(make, dtype) -> Jagged:
        rows = [make(n) for n in numbers]
        return Jagged.from_lengths(torch.tensor([x for row in rows for x in row], dtype=dtype), [len(r) for r in rows])

    return Batch(
        {
            "prompt_ids": jagged(lambda n: [n] * (n % 4), torch.int64),
            "logp": jagged(lambda n: [n / 7] * (n % 3), torch.bfloat16),
            "score": torch.tensor([float(n) for n in numbers]),
            "flag": torch.tensor([[n % 2 == 0] * 2 for n in numbers], dtype=torch.bool).reshape(-1, 2),
        },
        {
            "sample_id": [f"s{n}" for n in numbers],
            "uid": [f"g{n // 3}" for n in numbers],
            "row": [{"n": n, "text": "ü\n"} for n in numbers],
        },
    )


def random_layout(rng: random.Random, world: int) -> DataLayout:
    ranks = list(range(world))
    rng.shuffle(ranks)
    ranks = ranks[: rng.randint(1, world)]
    parts = rng.choice([d for d in range(1, len(ranks) + 1) if len(ranks) % d == 0])
    return DataLayout.of(ranks, parts)


def one_case(rng: random.Random, world: int, exchange: DistExchange, name: str) -> int:
    """A random redistribution there and back; returns the number of samples this rank (as a lead) ended with."""
    rank = dist.get_rank()
    src, dst = random_layout(rng, world), random_layout(rng, world)
    sizes = [rng.choice([0, 0, 1, 2, 3, 5, 8]) for _ in src.parts]
    starts = [sum(sizes[:k]) for k in range(len(sizes))]
    mine = src.part_of(rank)
    numbers = [] if mine is None else list(range(starts[mine], starts[mine] + sizes[mine]))
    batch = None if mine is None else samples(numbers)
    if rank not in src.ranks | dst.ranks:
        return 0
    got = exchange.redistribute(batch, src, dst, key=name)
    assert (got is not None) == (rank in dst.ranks)
    if got is not None:
        assert same(got, samples([int(x) for x in got["score"]])), "a field was lost or mixed up"
    back = exchange.redistribute(got, dst, src, key=name + " back", held=None if batch is None else batch["sample_id"])
    if batch is not None:
        assert same(back, batch), "samples did not come back to where they were, in order"
    part = dst.part_of(rank)
    return len(got) if got is not None and dst.parts[part][0] == rank else 0


def random_cases(seed: int, count: int) -> list:
    world, results = dist.get_world_size(), []
    exchanges = [
        DistExchange(all_ranks()),
        DistExchange(all_ranks(), balanced=True),
        DistExchange(all_ranks(), balanced=True, equal_counts=True, together=None),
    ]
    for exchange in exchanges:
        exchange.prepare(
            [(DataLayout((subset,)), DataLayout(tuple((r,) for r in subset))) for subset in subsets(world)]
        )
    for k in range(count):
        rng = random.Random(f"{seed}/{k}")
        results.append(one_case(rng, world, exchanges[k % 3], f"case {k}"))
    if world > 1:
        results.append(wrong_key())
        results.append(unpackable())
    return results


def subsets(world: int) -> list[tuple[int, ...]]:
    return [s for n in range(1, world + 1) for s in itertools.combinations(range(world), n)]


def complaint(batch: Batch | None, src: DataLayout, dst: DataLayout, key: str) -> str:
    """What the exchange says; nothing for ranks that are not concerned."""
    exchange = DistExchange(all_ranks())
    exchange.prepare([(src, dst)])
    if dist.get_rank() not in src.ranks | dst.ranks:
        return "not concerned"
    with pytest.raises(ExchangeError) as caught:
        exchange.redistribute(batch, src, dst, key=key)
    return str(caught.value)


def wrong_key() -> str:
    world = dist.get_world_size()
    src, dst = DataLayout.of(range(world), 1), DataLayout.of(range(world), world)
    return complaint(samples([1]), src, dst, f"step {dist.get_rank() == 0}")


def unpackable() -> str:
    """A sender that cannot pack tells everybody, so nobody waits."""
    batch = Batch({}, {"sample_id": ["a"], "bad": [(1, 2)]}) if dist.get_rank() == 0 else None
    return complaint(batch, DataLayout(((0,),)), DataLayout(((1,),)), "k")


@pytest.mark.parametrize(("world", "count"), [(1, 10), (2, 40), (3, 40), (4, 45)])
def test_every_field_exactly_once_for_random_layouts_and_sizes(world, count):
    results = run_distributed(random_cases, world, 200, 7, count)
    for k in range(count):
        rng = random.Random(f"7/{k}")
        src, _ = random_layout(rng, world), random_layout(rng, world)
        assert sum(r[k] for r in results) == sum(rng.choice([0, 0, 1, 2, 3, 5, 8]) for _ in src.parts)
    if world > 1:
        assert all("key differs" in r[count] and "step True" in r[count] for r in results)
        assert all("could not pack samples: {0: \"ValueError: column 'bad'" in r[count + 1] for r in results[:2])
