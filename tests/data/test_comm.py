"""Collectives over plain data, in one process and between real ones."""

import math

import pytest
import torch.distributed as dist

from megarl.comm import (
    all_gather_bytes,
    all_gather_json,
    all_to_all_bytes,
    broadcast_bytes,
    broadcast_json,
    reduce_metrics,
)
from megarl.metrics import Metrics
from tests.dist import run_distributed


def test_one_process_gets_back_what_it_gave():
    assert all_gather_bytes(b"x") == [b"x"]
    assert all_to_all_bytes([b"x"]) == [b"x"]
    assert all_gather_json({"a": [1, None]}) == [{"a": [1, None]}]
    assert broadcast_json("é\ud83d", src=0) == "é\ud83d"
    assert broadcast_bytes(b"", src=0) == b""


def test_reduced_metrics_are_a_copy():
    bag = Metrics()
    bag.mean("reward", 3, 4)
    reduce_metrics(bag).mean("reward", 1, 1)
    assert bag.result() == {"reward": 0.75}


def exchange() -> dict:
    rank = dist.get_rank()
    bag = Metrics()
    bag.mean("reward", total=float(rank), count=rank + 1)
    bag.max("longest", math.nan if rank == 0 else rank)
    bag.sum("tokens", 0.1 * (rank + 1))
    if rank == 1:
        bag.min("only_here", 7)
    pair = dist.new_group([1, 2])  # every rank must make it; only members may use it
    gathered = all_gather_bytes(bytes([rank]) * rank * 1000)
    return {
        "bytes": [len(data) for data in gathered],
        "content": all(data == bytes([r]) * r * 1000 for r, data in enumerate(gathered)),
        "mine": [data.decode() for data in all_to_all_bytes([f"{rank}>{r}".encode() * r for r in range(3)])],
        "none": [data.decode() for data in all_gather_bytes(b"")],
        "json": all_gather_json({"rank": rank, "text": "é" * rank}),
        "infinity": all_gather_json(math.inf)[0] == math.inf,
        "broadcast": broadcast_json({"from": rank} if rank == 2 else None, src=2),
        "empty_broadcast": broadcast_bytes(b"" if rank == 0 else None, src=0).decode(),
        "pair": [] if rank == 0 else [*all_gather_json(rank, pair), broadcast_json(rank * 10, src=2, group=pair)],
        "metrics": reduce_metrics(bag).result(),
    }


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
        assert result["metrics"] == {
            "reward": 3 / 6,
            "longest": 2.0,
            "tokens": 0.1 + 0.2 + 0.1 * 3,
            "only_here": 7.0,
        }
