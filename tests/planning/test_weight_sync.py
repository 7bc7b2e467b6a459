"""What weight updates take of a GPU, against the plan that an update follows."""

from __future__ import annotations

import math

import pytest

from megarl.artifacts.facts import model_facts
from megarl.checks.host import host_memory
from megarl.config.load import load_config
from megarl.config.model import LoraConfig, ModelConfig, ParallelConfig
from megarl.dag.placement import MODEL_ROLES, place, together
from megarl.dag.stage import Role
from megarl.models.hf import load_hf_config
from megarl.models.weight_table import WeightTable
from megarl.models.weights.adapters import adapter_tensors
from megarl.planning.assumptions import PlanAssumptions
from megarl.planning.memory import device_memory, offloaded_bytes
from megarl.planning.shards import parameter_bytes, state_bytes
from megarl.planning.step import StepFormulas
from megarl.planning.weight_sync import WeightSyncMemory
from megarl.sync.plan import holdings, make_plan
from megarl.sync.shards.boxes import GpuPlace, ServerStorage
from megarl.sync.shards.plan import UpdatePlan
from megarl.sync.shards.rounds import RoundLimits
from tests.models.tiny import tiny_dict
from tests.planning.planned import H100, read
from tests.sync.layouts import HERE, config, ranks_of, trainer
from tests.sync.shards.walk import job

SIZES = {"hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 8, "vocab_size": 40_000}
SERVERS = ["rollout.engine=sglang", "rollout.sglang.colocated=true", "actor.engine.offload=true"]


def recipe(*overrides: str):
    sizes = [f"model.hf_config.{key}={value}" for key, value in SIZES.items()]
    return load_config("grpo_quickstart", [*sizes, "model.dtype=bf16", *SERVERS, *overrides])


def sizes_of(made):
    return dict.fromkeys(MODEL_ROLES, model_facts(made.model))


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("tp", [1, 2])
@pytest.mark.parametrize("bucket_mb", [10, 50, 1000])
def test_buffers_are_those_of_the_plan_of_an_update(tp, tied, bucket_mb):
    shape = SIZES | {"tie_word_embeddings": tied}
    hf, ranks = config("qwen3", **shape), trainer(tp=tp, dp=2)
    plan = make_plan(holdings(WeightTable.of(hf), ranks), ranks_of(ranks), [HERE] * 2, bucket_bytes=bucket_mb * 10**6)
    sent = [[bucket.nbytes for bucket in buckets] for route in plan.routes for buckets in route.senders.values()]
    most = max(sum(max(sizes[first::2], default=0) for first in (0, 1)) for sizes in sent)
    made = recipe(f"cluster.nproc={2 * tp}", f"actor.parallel.tp={tp}", f"sync.bucket_mb={bucket_mb}")
    memory = WeightSyncMemory(
        made, model_facts(ModelConfig(hf_config=tiny_dict("qwen3", **shape))), together(made).teams[0]
    )
    estimate = sum(memory.buffers())
    # Senders are balanced to a percent; a model of a few buckets does not fill its last ones.
    assert 0.99 * most <= estimate <= 1.6 * most


def test_colocated_servers_count_in_every_moment_and_their_contexts_on_other_gpus_too():
    made = recipe("cluster.nproc=4", "actor.parallel.tp=2", "rollout.sglang.servers=4")
    memory = device_memory(made, sizes_of(made), together(made).teams[0], gpu=True)
    for moment in memory.moments:
        terms = {term.what: term.bytes for term in moment.terms}
        assert terms["a server's context and workspaces"] == 1.5e9, moment.name
        assert ("a server's CUDA graphs" in terms) == (moment.name == "generation")
        assert terms["contexts of 1 server rank on other GPUs"] == 0.5e9
        assert terms["NCCL's connections for slices of weights to 1 rank"] == 32 * 12 * 2**20
        assert terms["buffers of new weights for servers"] > 2 * 40_000 * 1024
        assert ("a tensor that is verified" in terms) == (moment.name == "new weights for servers")
    apart = recipe("rollout.sglang.colocated=false", "cluster.nproc=4", "actor.parallel.tp=2")
    memory = device_memory(apart, sizes_of(apart), together(apart).teams[0], gpu=True)
    found = {term.what for moment in memory.moments for term in moment.terms if moment.name != "a server"}
    assert "buffers of new weights for servers" in found
    assert not any("server's" in what or "contexts" in what for what in found)
    shards = ["sync.transport=shards", "rollout.sglang.servers=2", "cluster.nproc=4", "actor.parallel.tp=2"]
    boxes = recipe("rollout.sglang.colocated=false", *shards)
    memory = device_memory(boxes, sizes_of(boxes), together(boxes).teams[0], gpu=True)
    found = {term.what: term.bytes for moment in memory.moments for term in moment.terms if moment.name != "a server"}
    assert found["NCCL's groups with 2 cells of servers"] == 2 * 0.15e9
    assert not any("slices" in what for what in found)
    proxies = recipe("cluster.nproc=4", "actor.parallel.tp=2", "rollout.sglang={servers: 2, tp_size: 2}", shards[0])
    memory = device_memory(proxies, sizes_of(proxies), together(proxies).teams[0], gpu=True)
    for moment in memory.moments:
        terms = {term.what: term.bytes for term in moment.terms}
        assert terms["a server's context and workspaces"] == 1.5e9, moment.name
        assert terms["NCCL's group of all trainer ranks for new weights"] == 0.15e9
        stored = model_facts(proxies.model).parameters * 2 / 2  # bf16, half on each of two ranks
        assert terms["buffers that the server rank on a GPU copies from"] == 2 * min(stored, 512e6)
        assert terms["NCCL's connections for new weights to 1 rank"] == 32 * 12 * 2**20
        assert not any("contexts" in what or "slices" in what or "on its way" in what for what in terms)
    disk = recipe("sync.transport=disk", "sync.verify=off")
    (moment,) = [
        m for m in device_memory(disk, sizes_of(disk), together(disk).teams[0], gpu=True).moments if "new" in m.name
    ]
    assert {term.what for term in moment.terms if "server" in term.what} == {
        "a server's weights, per rank of it",
        "a server's context and workspaces",
    }


@pytest.mark.parametrize(("parallel", "tp"), [({"tp": 2, "dp": 2}, 2), ({"tp": 2, "pp": 2}, 2), ({"dp": 4}, 1)])
def test_as_many_ranks_are_connected_as_the_plan_of_an_update_needs_at_most(parallel, tp):
    ranks = trainer(**parallel)
    made = job("qwen3", ranks, tp)
    places = [GpuPlace(HERE, gpu) for gpu in range(4)]
    servers = [ServerStorage(made.servers[0].ranks, tuple(places[first : first + tp])) for first in range(0, 4, tp)]
    sent = UpdatePlan(made.tensors, made.trainer, places, servers, RoundLimits(cells=1)).messages
    pairs = set(zip(sent.sender.tolist(), (sent.server * tp + sent.receiver).tolist(), strict=True))
    met = [{a + b - rank for a, b in pairs if rank in (a, b) and a != b} for rank in range(4)]
    layout = [f"actor.parallel.{key}={size}" for key, size in parallel.items() if key != "dp"]
    shards = recipe("cluster.nproc=4", "sync.transport=shards", f"rollout.sglang.tp_size={tp}", *layout)
    counted = WeightSyncMemory(shards, model_facts(shards.model), together(shards).teams[0])._proxy_peers()
    assert max(map(len, met)) <= counted <= tp * 2 - 1


def test_with_separate_adapters_buffers_are_only_there_in_an_update_and_the_base_model_waits_in_host_memory():
    base = recipe("model.lora={rank: 4}", "rollout.sglang.servers=2", "cluster.nproc=2")
    separate = recipe("model.lora={rank: 4}", "rollout.sglang.servers=2", "cluster.nproc=2", "sync.adapters=separate")
    facts = model_facts(separate.model)
    found = {}
    for name, made in (("base", base), ("separate", separate)):
        memory = device_memory(made, sizes_of(made), together(made).teams[0], gpu=True)
        found[name] = {moment.name: {term.what: term.bytes for term in moment.terms} for moment in memory.moments}
    buffers, slots = "buffers of new weights for servers", "a server's slots for adapters"
    assert all(buffers in terms for terms in found["base"].values())
    assert [name for name, terms in found["separate"].items() if buffers in terms] == ["new weights for servers"]
    shapes = adapter_tensors(load_hf_config(separate.model), separate.model.lora).values()
    assert {terms[slots] for terms in found["separate"].values()} == {3 * 2 * sum(map(math.prod, shapes))}
    waiting = "servers' base model while it is off the GPUs"
    hosts = [host_memory(made, sizes_of(made), together(made), gpu=True).moments[0].terms for made in (base, separate)]
    assert [[term.bytes for term in terms if term.what == waiting] for terms in hosts] == [
        [],
        [2 * parameter_bytes(facts, ParallelConfig(), "bf16")],
    ]


def test_the_plan_of_an_update_of_separate_adapters_counts_their_bytes():
    config, graph, sizes = read("grpo_qwen3_8b_8gpu")
    lora = LoraConfig(rank=16)
    sync = config.sync.model_copy(update={"adapters": "separate"})
    config = config.model_copy(update={"sync": sync, "model": config.model.model_copy(update={"lora": lora})})
    formulas = StepFormulas(config, graph, place(graph, config), sizes, H100, PlanAssumptions.of(gpu=True))
    assert [cost.formula for cost in formulas.weights] == ["W3", "W3"]
    assert formulas.weights[0].bytes == pytest.approx(2 * 44e6, rel=0.01)  # docs/lora.md has the number of parameters
    (base,) = [cost for cost in formulas.moves() if "base model" in cost.what]
    assert base.bytes == pytest.approx(2 * 2 * 8.19e9, rel=0.01)  # to host memory and back


def test_graphs_that_cannot_be_released_count_in_every_moment_and_others_have_copies_in_host_memory():
    chosen = recipe('rollout.sglang.extra_args=["--cuda-graph-max-bs=64"]')
    memory = device_memory(chosen, sizes_of(chosen), together(chosen).teams[0], gpu=True)
    assert all("a server's CUDA graphs" in {term.what for term in moment.terms} for moment in memory.moments)
    for made, kept in ((chosen, False), (recipe(), True)):
        (moment,) = host_memory(made, sizes_of(made), together(made), gpu=True).moments
        assert any("a server's CUDA graphs" in term.what for term in moment.terms) == kept


@pytest.mark.parametrize(("name", "updates"), [("grpo_quickstart", True), ("dpo_quickstart", False)])
def test_an_actor_without_rollout_updates_servers_except_in_a_preference_recipe(name, updates):
    made = load_config(name, ["model.dtype=bf16"])
    memory = device_memory(made, sizes_of(made), together(made, (Role.ACTOR, Role.REFERENCE)).teams[0], gpu=True)
    assert ("buffers of new weights for servers" in {term.what for term in memory.terms()}) == updates
    assert ("new weights for servers" in {moment.name for moment in memory.moments}) == updates


def test_copies_in_host_memory_are_what_the_offload_schedule_takes_away():
    made = recipe("cluster.nproc=2", "algorithm.kl.use=loss", "algorithm.kl.coef=0.1")
    team = together(made, (Role.ACTOR, Role.ROLLOUT, Role.REFERENCE)).teams[0]
    facts = model_facts(made.model)
    memory = host_memory(made, sizes_of(made), together(made, (Role.ACTOR, Role.ROLLOUT, Role.REFERENCE)), gpu=True)
    (away,) = {term.bytes for moment in memory.moments for term in moment.terms if term.what == "offloaded state"}
    optimizer = state_bytes(facts, team.parallel, made.actor.engine, "bf16", 2)["optimizer"]
    assert away == 2 * (optimizer + 2 * parameter_bytes(facts, team.parallel, "bf16"))  # of actor and reference


@pytest.mark.parametrize("leaving", ["gradients", "optimizer", "parameters"])
def test_only_parts_that_may_leave_have_copies_in_host_memory(leaving):
    made = recipe(
        "cluster.nproc=2", "algorithm.kl.use=loss", "algorithm.kl.coef=0.1", f"actor.engine.offload=[{leaving}]"
    )
    team = together(made, (Role.ACTOR, Role.ROLLOUT, Role.REFERENCE)).teams[0]
    facts = model_facts(made.model)
    sizes = state_bytes(facts, team.parallel, made.actor.engine, "bf16", 2)
    # gradients are dropped; the actor's parameters stay, and the reference's leave
    kept = {"gradients": 0.0, "optimizer": sizes["optimizer"]}
    kept["parameters"] = parameter_bytes(facts, team.parallel, "bf16")
    assert offloaded_bytes(made, sizes_of(made), team) == kept[leaving]
