"""NCCL's connections of a rank: the groups that have rings, and the peers that get messages."""

from __future__ import annotations

import pytest

from megarl.checks.checklist import Checklist
from megarl.config.load import load_config
from megarl.config.model import ParallelConfig
from megarl.dag.placement import MODEL_ROLES, together
from megarl.planning.memory import GpuRoom, device_memory, planned_fraction
from megarl.planning.nccl import PEER_BYTES, RING_BYTES, nccl_terms, peers, rings
from tests.planning.test_weight_sync import recipe, sizes_of

MIB = 2**20


@pytest.mark.parametrize(
    ("sizes", "replicas", "mixture", "groups", "others"),
    [
        ({}, 1, False, 0, {}),
        ({}, 8, False, 2, {}),  # all ranks, gradients
        ({"tp": 8}, 1, False, 2, {}),
        ({"tp": 2, "cp": 2, "pp": 2}, 1, False, 4, {"stages": 1}),
        ({"tp": 8, "pp": 4}, 2, False, 3, {}),  # the next stage is on another machine
        ({"ep": 8}, 32, True, 3, {"experts": 7}),
        ({"ep": 16}, 32, True, 3, {"experts": 7}),  # eight of them are on other machines
        ({"tp": 2, "ep": 4, "etp": 2}, 4, True, 4, {"experts": 3}),
    ],
)
def test_groups_and_peers(sizes, replicas, mixture, groups, others):
    parallel = ParallelConfig(**sizes)
    assert len(rings(parallel, replicas, mixture=mixture)) == groups
    assert peers(parallel, replicas, 8, mixture=mixture) == others
    total = sum(term.bytes for term in nccl_terms(parallel, replicas, 8, mixture=mixture))
    assert total == groups * RING_BYTES + sum(others.values()) * PEER_BYTES


def test_an_all_to_all_of_eight_gpus_is_near_what_was_measured():
    """NVIDIA/nccl issue 1685: 1.06 GB before, 4.34 GB after the first all-to-all of eight H100."""
    (term,) = (term for term in nccl_terms(ParallelConfig(ep=8), 8, 8, mixture=True) if "experts" in term.what)
    assert term.bytes == 7 * 32 * (10 + 2) * MIB
    assert 0.8 < term.bytes / (4.34e9 - 1.06e9) < 1.2


def test_every_moment_but_that_of_a_server_alone_has_the_connections():
    made = recipe("cluster.nproc=4", "actor.parallel.tp=2", "rollout.sglang.servers=4")
    team = together(made, MODEL_ROLES).teams[0]
    memory = device_memory(made, sizes_of(made), team, gpu=True, room=GpuRoom(80e9))
    assert all(any("NCCL's rings" in term.what for term in moment.terms) for moment in memory.moments)
    assert 0 < planned_fraction(memory, 72e9) < planned_fraction(memory, 79e9)
    on_cpu = device_memory(made, sizes_of(made), team, gpu=False)
    assert not any("NCCL" in term.what for moment in on_cpu.moments for term in moment.terms)


def test_an_update_has_a_piece_of_a_streamed_optimizer():
    settings = "cluster.nproc=1", "model.hf_config.hidden_size=4096", "model.hf_config.num_hidden_layers=24"
    updates = {}
    for stream in ("false", "true"):
        made = recipe(*settings, f"actor.engine.stream_optimizer={stream}", "actor.engine.offload=true")
        memory = device_memory(made, sizes_of(made), together(made).teams[0], gpu=True)
        moment = next(moment for moment in memory.moments if moment.name == "the actor's update")
        updates[stream] = {term.what: term.bytes for term in moment.terms if "optimizer" in term.what}
    assert updates["false"]["actor optimizer"] > 10 * 2**30
    assert updates["true"] == {"actor optimizer, a piece": 2**30}


def test_a_streamed_optimizer_needs_offloading_of_all_parts():
    from megarl.checks.placement import _check_streamed

    def checked(*settings):
        checks = Checklist().of("placement")
        made = load_config("grpo_quickstart", ["actor.engine.stream_optimizer=true", *settings])
        _check_streamed("actor.engine", made.actor.engine, checks)
        return checks.items

    assert checked("actor.engine.offload=[optimizer, parameters, gradients]") == []
    (check,) = checked("actor.engine.offload=[optimizer, parameters]")
    assert (check.status, check.found) == ("fail", "['optimizer', 'parameters']")
    (check,) = checked()
    assert (check.status, check.key, check.allowed) == ("fail", "actor.engine.offload", "true")
