"""Groups of workers and their collectives, in one process and between real ones."""

import datetime
import math

import pytest
import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import _set_pg_timeout as set_timeout

from megarl.system import tracing
from megarl.system.comm import WorkerGroup, team_world
from megarl.system.errors import WorkerError
from megarl.system.metric_table import MetricTable
from megarl.system.metrics import Metrics
from tests.dist import run_distributed


def test_one_process_gets_back_what_it_gave():
    me = WorkerGroup.alone()
    assert (me.rank, me.size, me.ranks) == (0, 1, (0,))
    assert me.all_gather_bytes(b"x") == [b"x"]
    assert me.all_to_all_bytes([b"x"]) == [b"x"]
    assert me.all_gather_json({"a": [1, None]}) == [{"a": [1, None]}]
    assert me.broadcast_json("é\ud83d") == "é\ud83d"
    assert me.broadcast_bytes(b"") == b""
    assert me.all_reduce(torch.ones(2)).tolist() == [1, 1]
    assert me.all_gather(torch.ones(1)) == [torch.ones(1)]
    me.barrier()
    me.close()


def test_what_a_source_does_not_give_is_an_error():
    with pytest.raises(ValueError, match="must pass data"):
        WorkerGroup.alone().broadcast_bytes(None)
    with pytest.raises(ValueError, match="only this process"):
        WorkerGroup.alone().process_group  # noqa: B018
    with pytest.raises(ValueError, match="one part for each of 1 ranks, got 2"):
        WorkerGroup.alone().all_to_all_bytes([b"", b""])


def test_reduced_metrics_are_a_copy():
    bag = Metrics()
    bag.mean("reward", 3, 4)
    WorkerGroup.alone().reduce_metrics(bag).mean("reward", 1, 1)
    assert bag.result() == {"reward": 0.75}


def _bags(ranks: int) -> list[Metrics]:
    """Metrics of each rank: some names only on some ranks, NaN and infinities among the values."""
    bags = []
    for rank in range(ranks):
        bag = Metrics()
        bag.mean("reward", total=0.5 * rank, count=rank)
        bag.max("longest", math.nan if rank == 0 else -rank)
        bag.min("shortest", [math.inf, 3.0, math.nan][rank % 3])
        if rank % 2:
            bag.sum("tokens", 2.0**rank)
            bag.max("never", math.nan)
            bag.max("lowest", -math.inf)
        if rank == 2:
            bag.mean("broken", math.nan, 1)
        bags.append(bag)
    return bags


@pytest.mark.parametrize("ranks", [1, 2, 5])
def test_rows_of_a_table_combine_as_metrics_merge(ranks: int):
    table, merged = MetricTable(), Metrics()
    for bag in _bags(ranks):
        merged.merge(bag)
        table.add(table.unknown(bag))
    row, *others = [table.row(bag) for bag in _bags(ranks)]
    for other in others:
        table.combine(row, other)
    combined = table.metrics(row)
    assert combined is not None
    assert {k: str(v) for k, v in combined.to_json().items()} == {k: str(v) for k, v in merged.to_json().items()}


def test_a_name_that_the_table_lacks_shows_in_every_row():
    table, known, more = MetricTable(), Metrics(), Metrics()
    known.sum("a", 1)
    more.sum("b", 1)
    table.add(table.unknown(known))
    row = table.row(known)
    table.combine(row, table.row(more))
    assert table.metrics(row) is None


def test_a_name_may_get_another_reduction_in_a_later_step_but_not_differ_between_ranks():
    table, before, after = MetricTable(), Metrics(), Metrics()
    before.sum("a", 1)
    after.max("a", 2)
    for bag in (before, after):
        table.add(table.unknown(bag))
        reduced = table.metrics(table.row(bag))
        assert reduced is not None
        assert reduced.to_json() == bag.to_json()
    row = table.row(before)
    table.combine(row, table.row(after))
    with pytest.raises(ValueError, match="metric 'a' is reduced by 'sum' on some ranks and by 'max' on others"):
        table.metrics(row)


def _reductions(ranks: int) -> dict:
    """What reductions over a tree of ranks give, and how many of them gather names."""
    world, found, gathers = team_world(60), dict[str, object](), list[int]()
    gather = world.all_gather_json
    world.all_gather_json = lambda value: gathers.append(len(value)) or gather(value)  # type: ignore[method-assign]
    for _ in range(2):
        found = world.reduce_metrics(_bags(ranks)[world.rank]).to_json()
    extra = Metrics()
    extra.sum("tokens" if world.rank else "late", 1.0)
    late = world.reduce_metrics(extra).result()
    wrong = Metrics()
    (wrong.max if world.rank == 1 else wrong.sum)("tokens", 1.0)
    with pytest.raises(ValueError) as refused:
        world.reduce_metrics(wrong)
    return {"metrics": {name: str(item) for name, item in found.items()}, "late": late, "gathers": gathers,
            "refused": str(refused.value)}  # fmt: skip


@pytest.mark.procs
def test_ranks_exchange_names_of_metrics_once():
    merged = Metrics()
    for bag in _bags(3):
        merged.merge(bag)
    for rank, result in enumerate(run_distributed(_reductions, 3, 120, 3)):
        assert result["metrics"] == {name: str(item) for name, item in merged.to_json().items()}
        assert result["late"] == {"tokens": 2.0, "late": 1.0}
        assert len(result["gathers"]) == 3  # the first reduction, the new name, the refused one
        assert result["gathers"][1] == (rank == 0)
        assert result["refused"] == "metric 'tokens' is reduced by 'sum' on some ranks and by 'max' on others"


def exchange() -> dict:
    world = team_world(60)
    rank = world.rank
    bag = Metrics()
    bag.mean("reward", total=float(rank), count=rank + 1)
    bag.max("longest", math.nan if rank == 0 else rank)
    bag.sum("tokens", 0.1 * (rank + 1))
    if rank == 1:
        bag.min("only_here", 7)
    pair = world.subgroup([1, 2], "the last two")  # every rank makes it; only members get it
    single = world.subgroup([1], "the middle")
    gathered = world.all_gather_bytes(bytes([rank]) * rank * 1000)
    return {
        "bytes": [len(data) for data in gathered],
        "content": all(data == bytes([r]) * r * 1000 for r, data in enumerate(gathered)),
        "mine": [data.decode() for data in world.all_to_all_bytes([f"{rank}>{r}".encode() * r for r in range(3)])],
        "none": [data.decode() for data in world.all_gather_bytes(b"")],
        "json": world.all_gather_json({"rank": rank, "text": "é" * rank}),
        "infinity": world.all_gather_json(math.inf)[0] == math.inf,
        "broadcast": world.broadcast_json({"from": rank} if rank == 2 else None, src=2),
        "empty_broadcast": world.broadcast_bytes(b"" if rank == 0 else None).decode(),
        "pair": [] if pair is None else [*pair.all_gather_json(rank), pair.broadcast_json(rank * 10, src=1)],
        "single": [] if single is None else [single.rank, single.size, *single.ranks, *single.all_gather_json(rank)],
        "metrics": world.reduce_metrics(bag).result(),
        "sum": int(world.all_reduce(torch.tensor(rank))),
        "max": int(world.all_reduce(torch.tensor(rank), "max")),
        "passed": _pass_on(pair),
        "late": _wait_for_nobody(world),
    }


def _pass_on(pair: WorkerGroup | None) -> float | None:
    """What the second rank of the pair has from the first, and both have from the second."""
    if pair is None:
        return None
    got = torch.tensor(2.5)
    if pair.rank == 0:
        pair.send(got, dst=1)
    else:
        pair.receive(got.zero_(), src=0).add_(1)
    return float(pair.broadcast(got, src=1))


def _wait_for_nobody(world: WorkerGroup) -> str:
    """What a rank is told whose partner does not come; the others are told nothing."""
    pair = world.subgroup([0, 1], "two ranks")
    if world.rank == 0 and pair is not None:
        set_timeout(datetime.timedelta(seconds=0.2), pair.process_group)
        hasty = WorkerGroup("two impatient ranks", pair.process_group, 0.2)
        with tracing.phase("step/probe"), pytest.raises(WorkerError) as found:
            hasty.all_gather_json(None)
        return str(found.value).partition(": ")[0]
    return ""


@pytest.mark.procs
def test_three_processes():
    results = run_distributed(exchange, 3, 120)
    for rank, result in enumerate(results):
        assert result["bytes"] == [0, 1000, 2000]
        assert result["content"]
        assert result["mine"] == [f"{r}>{rank}" * rank for r in range(3)]
        assert result["none"] == ["", "", ""]
        assert result["json"] == [{"rank": r, "text": "é" * r} for r in range(3)]
        assert result["infinity"]
        assert result["broadcast"] == {"from": 2}
        assert result["empty_broadcast"] == ""
        assert result["pair"] == ([] if rank == 0 else [1, 2, 20])
        assert result["single"] == ([0, 1, 1, 1] if rank == 1 else [])
        assert (result["sum"], result["max"]) == (3, 2)
        assert result["passed"] == (None if rank == 0 else 3.5)
        assert result["metrics"] == {
            "reward": 3 / 6,
            "longest": 2.0,
            "tokens": 0.1 + 0.2 + 0.1 * 3,
            "only_here": 7.0,
        }
    assert results[0]["late"] == (
        "rank 0 of two impatient ranks timed out waiting for the tensors of the other ranks in phase step/probe "
        "(deadline 0.2 s, cluster.timeout_s)"
    )


def _reduced(op: str) -> dict[str, bool]:
    """Whether `WorkerGroup.all_reduce` gives bit for bit what torch's gives, by type and size, and without it."""
    group, found, reduce = team_world(60.0), {}, dist.all_reduce
    for dtype in (torch.float32, torch.bfloat16, torch.float64, torch.int64):
        for size in (1, 1000, 1 << 19):
            mine = (torch.randn(size, generator=torch.Generator().manual_seed(group.rank)) * 100).to(dtype)
            mine.requires_grad_(dtype.is_floating_point)
            theirs, calls = mine.detach().clone(), []
            reduce(theirs, op=dist.ReduceOp.SUM if op == "sum" else dist.ReduceOp.MAX)
            dist.all_reduce = lambda *args, calls=calls, **more: calls.append(reduce(*args, **more))
            same = group.all_reduce(mine, op) is mine and torch.equal(mine, theirs)
            dist.all_reduce = reduce
            found[f"{dtype}, {size}"] = same and bool(calls) == (size * dtype.itemsize > 1 << 19)
    with torch.inference_mode():
        made = torch.ones(3)
    found["made where nothing is recorded"] = group.all_reduce(made, op).tolist() == [2.0 if op == "sum" else 1.0] * 3
    return found


@pytest.mark.procs
@pytest.mark.parametrize("op", ["sum", "max"])
def test_two_ranks_that_give_each_other_what_they_have_get_what_a_reduction_gives(op):
    for found in run_distributed(_reduced, 2, 120, op):
        assert [what for what, right in found.items() if not right] == []
