"""Faults that are planted are found by the section that should find them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from megarl.certificate.findings import Findings, read_findings
from megarl.certificate.harness import verdict
from megarl.models.weight_table import WeightTable
from tests.dist import no_parallel, run_distributed, run_pretending


def found_in(folder: Path) -> dict[str, bool]:
    return {line["name"]: line["passed"] for line in read_findings(folder / "f") if line["kind"] == "check"}


def _layout() -> Any:
    from megarl.config.model import ParallelConfig
    from megarl.training.parallel import init_parallel
    from tests.dist import world

    no_parallel()
    return init_parallel(ParallelConfig(), world())


def router_on_the_host(folder: str) -> None:
    """The section's work on a mixture on a pretended GPU whose router is on the CPU."""
    from megarl.certificate import models
    from megarl.certificate.sections import training
    from tests.pretend_cuda import Pretend

    host = torch.zeros(8, 64)
    made = models.make_engine

    def planted(*args: Any, **kwargs: Any) -> Any:
        engine = made(*args, **kwargs)
        router = engine.chunks[0].decoder.layers[1].mlp.router
        del router.weight
        router.register_buffer("weight", host)
        return engine

    found = Findings(Path(folder) / "f")
    with Pretend(), mock.patch.object(training, "make_engine", planted):
        try:
            training.train(found, "mixture", _layout(), torch.float32, "local", {}, [])
        except Exception as error:
            found.fact("error", error)


@pytest.mark.procs
def test_a_router_on_the_cpu_is_found_by_the_training_section(tmp_path):
    run_pretending(router_on_the_host, 1, 120, str(tmp_path))
    (check,) = [line for line in read_findings(tmp_path / "f") if line["kind"] == "check"]
    assert (check["name"], check["passed"]) == ("mixture float32: all on cuda:0", False)
    assert check["detail"].startswith("decoder.layers.1.mlp.router.weight on cpu")
    assert verdict([check], 0, 1.0)[0] == "failed"


def leaking_session(folder: str, leak: bool) -> None:
    """The section's work with sessions that something keeps."""
    from megarl.certificate.sections import generation
    from megarl.rollout.embedded import engine as module

    kept: list[Any] = []

    class Leaking(module.Session):
        def __init__(self, *args: Any) -> None:
            super().__init__(*args)
            if leak:
                kept.append(self)

    with mock.patch.object(module, "Session", Leaking):
        generation.generate(Findings(Path(folder) / "f"), "dense", _layout(), torch.float32)


@pytest.mark.procs
@pytest.mark.parametrize("leak", [False, True])
def test_sessions_that_are_kept_are_found_by_the_generation_section(tmp_path, leak):
    run_distributed(leaking_session, 1, 120, str(tmp_path), leak)
    assert found_in(tmp_path) == {
        "dense float32: log-probs are those of the training pass": True,
        "dense float32: memory is given back": not leak,
    }


@pytest.mark.parametrize(("servers", "passed"), [("2.29.7", True), ("2.30.7", False)])
def test_another_nccl_is_found_by_the_environment_section(tmp_path, servers, passed):
    from megarl.certificate.sections import environment
    from tests.system.compat.test_cuda import interpreter

    pythons = {name: interpreter(tmp_path / name, nccl) for name, nccl in (("trainer", "2.29.7"), ("servers", servers))}
    environment.nccl(Findings(tmp_path / "f"), **pythons)
    assert found_in(tmp_path) == {"NCCL": passed}


def test_a_rank_with_other_numbers_is_found_by_the_layouts_section():
    from megarl.certificate.sections.layouts import differences

    def rank(samples: dict[str, list[float]], norm: float) -> dict[str, Any]:
        return {"samples": {"log-prob": samples}, "steps": [{"loss": 2.0, "gradient norm": norm}]}

    one = rank({"a": [-1.0, -2.0], "b": [-3.0]}, 4.0)
    assert differences(one, [rank({"a": [-1.0, -2.0]}, 4.0), rank({"b": [-3.0]}, 4.0)]) == {
        "log-prob": 0.0,
        "loss": 0.0,
        "gradient norm": 0.0,
    }
    wrong = differences(one, [rank({"a": [-1.0, -2.5]}, 4.0), rank({"b": [-3.0]}, 5.0)])
    assert wrong == {"log-prob": 0.5, "loss": 0.0, "gradient norm": 0.25}
    assert differences(one, [rank({"a": [-1.0, -2.0]}, 4.0)])["log-prob"] == float("inf")  # a sample is missing


def test_servers_that_are_fed_crosswise_are_found_by_the_servers_section():
    """Two replicas of two ranks each, and a server on every GPU; dealt out in turn, server 1 gets ranks 2 and 3."""
    from megarl.certificate.sections.servers import crossings
    from megarl.sync.plan import Route, SyncPlan, holdings, make_plan
    from tests.sync.layouts import HERE, config, ranks_of, trainer

    ranks = trainer(tp=2, dp=2)
    crossed = make_plan(holdings(WeightTable.of(config("qwen3")), ranks), ranks_of(ranks), [HERE] * 4, same_host=True)
    assert [route.receivers for route in crossed.routes] == [(0, 2), (1, 3)]
    gpus = ["0", "1", "2", "3"]
    assert crossings(crossed, gpus, [[gpu] for gpu in gpus]) == [
        "server 2 on GPU 2 gets weights from GPU 0, 1",
        "server 1 on GPU 1 gets weights from GPU 2, 3",
    ]
    near = [
        Route(route.replica, receivers, route.senders, route.givers)
        for route, receivers in zip(crossed.routes, [(0, 1), (2, 3)], strict=True)
    ]
    assert crossings(SyncPlan(crossed.hosts, tuple(near)), gpus, [[gpu] for gpu in gpus]) == []
    assert crossings(crossed, gpus, [["4"], ["5"], ["6"], ["7"]]) == []  # GPUs of their own


def test_findings_survive_numbers_that_json_has_not(tmp_path):
    found = Findings(tmp_path / "f")
    found.figure("rate", float("inf"), "GB/s")
    assert json.loads((tmp_path / "f").read_text())["value"] is None
