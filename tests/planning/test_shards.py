"""Parameters of a rank, against the plan by which a rank loads its weights."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace
from itertools import product
from types import SimpleNamespace
from typing import Any

import pytest

from megarl.config.model import LoraConfig, ModelConfig, ParallelConfig
from megarl.config.sglang import SGLangConfig
from megarl.config.training import EngineConfig
from megarl.models.hf import facts_of
from megarl.models.weight_table import Coordinate, WeightTable
from megarl.models.weights.adapters import adapter_slices
from megarl.planning.memory import server_bytes
from megarl.planning.shards import checkpoint_bytes, owned_parameters, stage_parameters, state_bytes
from tests.models.tiny import ARCHITECTURES, tiny_dict
from tests.sync.layouts import trainer
from tests.sync.shards.walk import job

LAYOUTS = [
    {},
    {"tp": 2},
    {"pp": 2},
    {"pp": 2, "vpp": 2},
    {"tp": 2, "pp": 4},
    {"ep": 2},
    {"tp": 2, "ep": 4, "etp": 1},
    {"tp": 2, "ep": 2, "etp": 2, "pp": 2},
]


def hf_of(model_type, **changes):
    from megarl.config.model import ModelConfig
    from megarl.models.hf import load_hf_config

    return load_hf_config(ModelConfig(hf_config=tiny_dict(model_type, **changes)))


def loaded(hf, parallel, *, value_head=False):
    """(dense, expert) parameters of the fullest rank, by what it loads."""
    found = []
    for pp_rank, tp_rank in product(range(parallel.pp), range(parallel.tp)):
        at = Coordinate(
            parallel.tp, tp_rank, parallel.pp, pp_rank, parallel.vpp or 1, parallel.ep, 0, parallel.expert_tp, 0
        )
        shards = WeightTable.of(hf, value_head=value_head).shards(at)
        sizes = [(".experts." in shard.param, math.prod(shard.shape)) for shard in shards]
        found.append((sum(n for expert, n in sizes if not expert), sum(n for expert, n in sizes if expert)))
    return max(found, key=sum)


def placed() -> list:
    """Every architecture in every layout, in turn with a head of its own and with a tied one."""
    return [
        pytest.param(name, tied, layout, marks=() if (first + second) % 2 == tied else pytest.mark.campaign("families"))
        for (first, name), (second, layout), tied in itertools.product(
            enumerate(ARCHITECTURES), enumerate(LAYOUTS), (False, True)
        )
    ]


@pytest.mark.parametrize(("model_type", "tied", "layout"), placed())
def test_a_rank_holds_what_it_loads(model_type, tied, layout):
    hf, parallel = hf_of(model_type, tie_word_embeddings=tied), ParallelConfig(**layout)
    facts = facts_of(hf)
    if not facts.is_moe and (parallel.ep > 1 or parallel.etp):
        pytest.skip("no experts")
    if parallel.pp > 1 and facts.dense_layers:
        pytest.skip("stages count with their mean")
    assert stage_parameters(facts, parallel) == loaded(hf, parallel)
    assert stage_parameters(facts, parallel, value_head=True) == loaded(hf, parallel, value_head=True)


def test_a_stage_counts_with_its_own_layers():
    hf, half = hf_of("qwen3_moe", mlp_only_layers=[0]), ParallelConfig(pp=2)
    assert sum(stage_parameters(facts_of(hf), ParallelConfig())) == facts_of(hf).parameters
    assert stage_parameters(facts_of(hf), half) == loaded(hf, half)


def test_every_rank_owns_its_share_of_the_optimizer():
    facts, engine = facts_of(hf_of("qwen3_moe")), EngineConfig()
    dense, expert = stage_parameters(facts, ParallelConfig(ep=4))
    assert owned_parameters(facts, ParallelConfig(ep=4), engine, dp=8) == dense / 8 + expert / 2
    dense, expert = stage_parameters(facts, ParallelConfig(cp=2, tp=2))
    assert owned_parameters(facts, ParallelConfig(cp=2, tp=2), engine, dp=2) == dense / 4 + expert / 4


@pytest.mark.parametrize(("dtype", "bytes_each"), [("bf16", 14), ("fp32", 12)])
def test_a_checkpoint_has_parameters_and_state_once(dtype, bytes_each):
    facts = facts_of(hf_of("qwen3"))
    assert checkpoint_bytes(facts, dtype) == bytes_each * facts.parameters
    state = state_bytes(facts, ParallelConfig(), EngineConfig(), dtype, dp=1)
    assert state["parameters"] + state["optimizer"] == checkpoint_bytes(facts, dtype)
    assert state["gradients"] == 4 * facts.parameters


@pytest.mark.parametrize("model_type", ["qwen3", "qwen3_moe"])
@pytest.mark.parametrize("layout", [{}, {"tp": 2}, {"tp": 2, "pp": 2}, {"tp": 2, "ep": 2}])
def test_with_adapters_only_these_and_a_value_head_have_gradients(model_type, layout):
    targets = ["attention", "experts" if "moe" in model_type else "mlp"]
    hf, parallel, lora = hf_of(model_type), ParallelConfig(**layout), LoraConfig(rank=4, targets=targets)
    at = Coordinate(tp=parallel.tp, pp=parallel.pp, ep=parallel.ep, etp=parallel.expert_tp)
    adapters = sum(math.prod(shard.shape) for shard in adapter_slices(hf, at, lora))
    facts, engine = facts_of(hf), EngineConfig()
    state = state_bytes(facts, parallel, engine, "bf16", 2, lora=lora)
    whole = state_bytes(facts, parallel, engine, "bf16", 2)
    assert state["gradients"] == 4 * adapters
    assert state["optimizer"] == 12 * adapters / 2
    assert state["parameters"] == whole["parameters"] + 2 * adapters
    critic = state_bytes(facts, parallel, engine, "bf16", 2, value_head=True, lora=lora)
    assert critic["gradients"] == 4 * (adapters + facts.hidden)
    if not layout:
        assert checkpoint_bytes(facts, "bf16", lora) == 14 * adapters


@pytest.mark.parametrize("freeze", [("tower",), ("tower", "merger"), ("language_model",)], ids=str)
def test_what_is_frozen_has_neither_gradients_nor_optimizer_state(freeze):
    from megarl.architectures.tensors import part_of
    from megarl.artifacts.facts import facts_from_config
    from megarl.models.hf import load_hf_config
    from tests.models.vlm_tiny import config_of

    raw = config_of("qwen3_vl")
    facts, hf = facts_from_config(raw, "tiny"), load_hf_config(ModelConfig(hf_config=raw))
    facts = replace(facts, frozen=freeze)
    for parallel in (ParallelConfig(), ParallelConfig(tp=2), ParallelConfig(pp=2)):
        ranks = [
            WeightTable.of(hf).shards(Coordinate(tp=parallel.tp, pp=parallel.pp, pp_rank=rank))
            for rank in range(parallel.pp)
        ]
        held, learn = (
            max(sum(math.prod(one.shape) for one in rank if part_of(one.param) not in parts) for rank in ranks)
            for parts in ((), freeze)
        )
        state = state_bytes(facts, parallel, EngineConfig(), "bf16", 2)
        assert state == {"parameters": 2 * held, "gradients": 4 * learn, "optimizer": 12 * learn / 2}
    learn = sum(
        math.prod(one.shape) for one in WeightTable.of(hf).shards(Coordinate()) if part_of(one.param) not in freeze
    )
    assert checkpoint_bytes(facts, "bf16") == 2 * facts.parameters + 12 * learn


@pytest.mark.parametrize(
    ("model", "tied"), [("deepseek_v3", False), ("qwen3_moe", False), ("qwen3", True), ("qwen3_5_text", True)]
)
def test_a_server_with_attention_groups_holds_what_its_layout_says(model, tied):
    """The vocabulary has whole rows on each rank, and norms and routers are the same on all."""
    changes = {"vocab_size": 256, "tie_word_embeddings": tied}
    made = job(model, trainer(), 4, ep=4, attention_dp=2, changes=changes)
    elements = [int(rank.parameters.shapes.prod(1).sum()) for rank in made.servers[0].ranks]
    servers = SGLangConfig(tp_size=4, ep_size=4, attention_dp=2)
    recipe: Any = SimpleNamespace(rollout=SimpleNamespace(sglang=servers), rollout_dtype="bf16")

    assert server_bytes(recipe, facts_of(made.hf)) == 2 * max(elements)
