"""Seconds of weight updates from shard to shard by formula, beside those of their specification."""

from __future__ import annotations

from dataclasses import replace

import pytest

from megarl.artifacts.facts import ModelFacts
from megarl.config.model import ParallelConfig
from megarl.dag.placement import place
from megarl.planning.assumptions import PlanAssumptions
from megarl.planning.hardware import KINDS
from megarl.planning.links import Links
from megarl.planning.shard_sync import ShardUpdateSize, fullest_stage, shard_update_seconds
from megarl.planning.step import StepFormulas
from tests.planning.planned import H100, read

#: GB of the model, ranks of the trainer, its fullest stage, servers, their ranks, whether they are colocated; seconds.
SPECIFIED = {
    "30B to 2 x tp 8": (61.06, 16, 1.0, 2, 8, False, 0.27),
    "30B to 8 x tp 2": (61.06, 16, 1.0, 8, 2, False, 0.28),
    "30B colocated": (61.06, 32, 1.0, 4, 8, True, 0.12),
    "235B to 4 x tp 16": (470.19, 64, 24 * 4 / 94, 4, 16, False, 0.80),
    "235B to 8 x tp 8": (470.19, 64, 24 * 4 / 94, 8, 8, False, 1.5),
    "671B to 8 x tp 32": (1342.05, 256, 4 * 16 / 58, 8, 32, False, 1.2),
}


@pytest.mark.parametrize("case", SPECIFIED.values(), ids=SPECIFIED)
def test_seconds_are_those_specified(case: tuple) -> None:
    size, *sizes, seconds = case

    planned = sum(shard_update_seconds(ShardUpdateSize(size * 1e9, *sizes), Links(KINDS["h100"], PlanAssumptions())))

    assert planned == pytest.approx(seconds, rel=0.05)


def facts(layers: int, experts: int = 0, sparse: tuple[bool, ...] = ()) -> ModelFacts:
    return ModelFacts("x", "qwen3", layers, 64, 4, 4, 16, 128, 100, 64, tied=False, experts=experts, sparse=sparse)


def test_the_fullest_stage_is_that_with_most_layers() -> None:
    assert fullest_stage(facts(94), ParallelConfig(pp=4)) == 24 * 4 / 94


def test_only_layers_with_experts_count_in_a_mixture() -> None:
    sparse = (False, False, True, True, True, True)

    assert fullest_stage(facts(6, 4, sparse), ParallelConfig(pp=2)) == 3 * 2 / 4


def test_a_plan_counts_updates_from_shard_to_shard() -> None:
    config, graph, sizes = read("grpo_qwen3_8b_8gpu")
    config = config.model_copy(update={"sync": config.sync.model_copy(update={"transport": "shards"})})

    costs = StepFormulas(config, graph, place(graph, config), sizes, H100, PlanAssumptions.of(gpu=True)).weights

    assert [cost.formula for cost in costs] == ["W2", "W2"]
    # on the trainer's machine each of eight servers of one GPU receives all of 8.19e9 parameters over its links
    assert costs[0].seconds == pytest.approx(2 * 8.19e9 / (450e9 * 0.7), rel=0.01)


@pytest.mark.parametrize(("pp", "gathering"), [(1, 1), (2, 8)])
def test_pipeline_stages_on_several_machines_send_to_their_servers_over_the_network(pp: int, gathering: int) -> None:
    """A replica has 2 * pp ranks, but its two stages are 8 ranks apart, so that the servers of a machine gather."""
    layout = [f"actor.parallel={{tp: 2, pp: {pp}}}", "sync.transport=shards", "cluster.nproc=16", "cluster.nnodes=2"]
    config, graph, sizes = read("grpo_qwen3_8b_8gpu", *layout, "rollout.sglang.servers=16")
    hardware = replace(H100, nodes=2)

    costs = StepFormulas(config, graph, place(graph, config), sizes, hardware, PlanAssumptions.of(gpu=True)).weights

    assert costs[0].bytes == pytest.approx(2 * 8.19e9 / gathering, rel=0.01)
