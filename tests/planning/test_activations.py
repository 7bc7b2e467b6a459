"""Memory of an update by formulas, against the training engine on fake tensors, whose storages are added up.

The engine runs in a process of its own, once for all cases: Megatron's state is one per process.
"""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path

import pytest

from megarl import artifacts
from megarl.artifacts.facts import facts_from_config
from megarl.artifacts.jsonl import read_jsonl
from megarl.config.model import ParallelConfig
from megarl.config.run import RunConfig
from megarl.config.training import EngineConfig
from megarl.planning.activations import Activations, Passes
from megarl.planning.memory import logit_copies, update_passes
from megarl.planning.shards import BYTES, state_bytes
from tests.forked import Forked
from tests.planning import fake_engine
from tests.planning.fake_engine import FakeCase

DENSE = {
    "model_type": "qwen3",
    "hidden_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 32,
    "intermediate_size": 768,
    "vocab_size": 4000,
    "max_position_embeddings": 4096,
    "tie_word_embeddings": False,
}
FOUR_LAYERS = {**DENSE, "num_hidden_layers": 4}
LLAMA = {**DENSE, "model_type": "llama"}
EXPERTS = {
    **DENSE,
    "model_type": "qwen3_moe",
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 256,
}
LINEAR = {f"linear_{name}": 16 for name in ("num_key_heads", "num_value_heads", "key_head_dim", "value_head_dim")}
#: Models with a draft head.
GATED = {**DENSE, "model_type": "qwen3_5_text", "layer_types": ["full_attention"] * 2, **LINEAR}
SHARED = {
    **DENSE,
    "model_type": "glm4_moe",
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 256,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 0,
    "n_shared_experts": 2,
}


def case(name, model=DENSE, world=1, *, samples=4, rank=0, engine=None, value_head=False, mtp=False, **parallel):
    """A case of `samples` of 256 tokens; a micro-batch has four."""
    settings = {"micro_batch_tokens": 1024, "logits_chunk_tokens": 128, **(engine or {})}
    more = {"parallel": parallel, "engine": settings, "value_head": value_head, "mtp": mtp}
    return FakeCase(name, model, world, [256] * samples, 64, rank=rank, **more)


#: Each part of a formula is in one case, and independent parts share a case. Two micro-batches show what the first
#: leaves to the second, and fill a pipeline.
SMALL = [
    case("draft head, logits at once", GATED, engine={"logits_chunk_tokens": 4096}, mtp=True),
    case("draft head of the last stage", SHARED, 2, rank=1, samples=8, engine={"recompute": "full"}, mtp=True, pp=2),
    case("shared experts", SHARED, 2, tp=2, ep=2),
    case("recomputed, shared optimizer", world=2, samples=8, engine={"recompute": "full"}),
    case("value head, whole optimizer", world=2, value_head=True, engine={"distributed_optimizer": False}),
    case("sp", world=2, tp=2, sp=True),
    case("cp", world=2, cp=2),
    case("first stage, tp", LLAMA, 4, samples=8, tp=2, pp=2),
    case("last stage, logits at once", world=2, rank=1, samples=8, engine={"logits_chunk_tokens": 4096}, pp=2),
    case("interleaved", FOUR_LAYERS, 2, samples=8, pp=2, vpp=2),
    case("experts, recomputed", EXPERTS, 4, samples=8, tp=2, pp=2, ep=2, engine={"recompute": "full"}),
    case("wide experts", EXPERTS, 4, samples=8, tp=2, ep=2, etp=2),
]


def real_cases():
    """8B as its recipe says, the others with layouts of 32 to 512 GPUs of 80 GB."""
    known = json.loads((Path(artifacts.__file__).parent / "known_models.json").read_text(encoding="utf-8"))

    def case(name, model, world, lengths, engine, **layout):
        return FakeCase(name, known[model], world, lengths, prompt=512, parallel=layout, engine=engine)

    full, kept = {"micro_batch_tokens": 16384, "recompute": "full"}, {"micro_batch_tokens": 8192}
    return [
        case("8B", "Qwen/Qwen3-8B", 8, [1536] * 5, kept, tp=2, sp=True),
        case("30B-A3B", "Qwen/Qwen3-30B-A3B", 32, [1536] * 30, full, tp=4, pp=2, ep=8),
        case("70B", "meta-llama/Llama-3.1-70B", 64, [4096] * 16, kept, tp=8, pp=4, sp=True),
        case("235B-A22B", "Qwen/Qwen3-235B-A22B", 512, [4096] * 8, kept | {"recompute": "full"}, tp=4, pp=2, ep=32),
    ]


STATE = ("parameters", "gradients", "optimizer")


def formulas(case):
    """The planner's numbers for a case: the keys of the engine's that both have."""
    facts, parallel = facts_from_config(case.model, case.name), ParallelConfig(**case.parallel)
    facts = replace(facts, trains_draft=case.mtp)
    engine, longest = EngineConfig(**case.engine), max(case.lengths) - 1
    count = -(-len(case.lengths) // max(1, engine.micro_batch_tokens // longest))
    each = -(-len(case.lengths) // count)
    rows = each * (longest + 1 - case.prompt)
    passes = Passes(each * longest / parallel.cp, rows / parallel.cp, longest, count)
    element, value = BYTES[case.dtype], case.value_head
    found = Activations(facts, parallel, engine, passes, element=element, gpu=True, value_head=value)
    last = parallel.pp > 1 and case.rank * parallel.pp // case.world == parallel.pp - 1
    dp = case.world // parallel.model_parallel_size
    state = state_bytes(facts, parallel, engine, case.dtype, dp, value_head=value)
    return {**state, "update": found.needed(last=last).bytes}


def total(numbers):
    """Bytes of the update's fullest moment."""
    return sum(numbers[name] for name in (*STATE, "update"))


@pytest.fixture(scope="module")
def tracked(tmp_path_factory):
    return track(SMALL, tmp_path_factory.mktemp("cases"))


def track(cases, folder):
    file, measured = folder / "cases.json", folder / "measured.jsonl"
    file.write_text(json.dumps([asdict(one) for one in cases]))
    process = Forked(fake_engine.main, (str(file), str(measured)))
    assert process.wait(600) == 0
    found = list(read_jsonl(measured))
    return {numbers["name"]: numbers for numbers in found}


@pytest.mark.procs
@pytest.mark.parametrize("one", SMALL, ids=lambda one: one.name)
def test_formulas_are_within_a_tenth_of_the_engine(one, tracked):
    seen, said = tracked[one.name], formulas(one)
    for name in (*STATE, "update"):  # each by itself, so that errors cannot cancel
        assert said[name] == pytest.approx(seen[name], rel=0.1), name


@pytest.mark.procs
def test_layers_of_experts_that_are_computed_again_leave_nothing(tracked):
    """Only Megatron's buffers are left, as without recomputation."""
    assert tracked["experts, recomputed"]["left"] <= tracked["wide experts"]["left"]


@pytest.mark.campaign("memory")
@pytest.mark.procs
@pytest.mark.parametrize("one", real_cases(), ids=lambda one: one.name)
def test_formulas_are_within_a_tenth_at_real_size(one, tmp_path):
    seen, said = track([one], tmp_path)[one.name], formulas(one)
    print(
        one.name,
        *(f"{name}: {seen[name] / 1e9:.2f} GB, formulas {said[name] / 1e9:.2f}" for name in (*STATE, "update")),
    )
    assert total(said) == pytest.approx(total(seen), rel=0.1)
    assert said["update"] == pytest.approx(seen["update"], rel=0.1)


def activations(model=DENSE, *, passes=None, engine=None, gpu=False, **parallel):
    facts = facts_from_config(model, "test")
    return Activations(
        facts,
        ParallelConfig(**parallel),
        engine or EngineConfig(),
        passes or Passes(tokens=1024, rows=768, longest=256),
        element=4,
        gpu=gpu,
    )


def test_short_sequences_on_a_cpu_keep_the_probabilities():
    # 8 heads, 256 keys: blocks of 64 queries see 64, 128, 192 and 256 keys, 640 in place of 1,024.
    kept = activations().attention - activations(engine=EngineConfig(recompute="selective")).attention
    assert kept == 4 * 1024 * 8 * 640 / 4


def test_what_parts_recompute_is_not_kept():
    plain = activations()
    mlp, norm = (activations(engine=EngineConfig(recompute=[part])) for part in ("mlp", "norm"))
    assert mlp.attention == plain.attention
    assert mlp.feed_forward == 2 * plain.stream  # the norm's input and output
    assert (plain.layer - norm.layer) == 2 * plain.stream
    assert activations(engine=EngineConfig(recompute=["attention"])).layer == (
        activations(engine=EngineConfig(recompute="selective")).layer
    )


def test_no_probabilities_are_kept_of_long_sequences_or_on_gpus():
    long = Passes(tokens=4096, rows=4096, longest=2048)
    sums = 4 * 4096 * 8  # one number per query and head
    selective = EngineConfig(recompute="selective")
    for gpu in (False, True):
        more = (
            activations(passes=long, gpu=gpu).attention - activations(passes=long, gpu=gpu, engine=selective).attention
        )
        assert more == sums


@pytest.mark.parametrize(
    ("share", "budget", "passes"),
    [
        (False, 2048, Passes(tokens=3 * 639, rows=3 * 128, longest=639, count=11)),
        (True, 8192, Passes(tokens=4 * (512 + 8 * 127), rows=32 * 128, longest=639)),
        (True, 3500, Passes(tokens=2 * (512 + 8 * 127), rows=16 * 128, longest=639, count=2)),
        (True, 2048, Passes(tokens=512 + 8 * 127, rows=8 * 128, longest=639, count=4)),
        (True, 1024, Passes(tokens=512 + 4 * 127, rows=4 * 128, longest=639, count=8)),
        (True, 500, Passes(tokens=639, rows=128, longest=639, count=32)),
    ],
)
def test_micro_batches_of_shared_prompts_have_more_answers(share, budget, passes):
    config = RunConfig.model_validate(
        {
            "name": "test",
            "data": {"batch_size": 4, "max_prompt_tokens": 512},
            "rollout": {"sampling": {"n": 8, "max_new_tokens": 128}},
            "actor": {"engine": {"share_prefixes": share, "micro_batch_tokens": budget}},
        }
    )
    facts = facts_from_config(DENSE, "dense")
    assert update_passes(config, facts, "actor", ParallelConfig(), 1, "train") == passes


def test_the_first_stage_holds_one_micro_batch_for_each_stage():
    passes = Passes(tokens=1024, rows=768, longest=256, count=8)
    assert activations(passes=passes, pp=4).in_flight(last=False) == 4
    assert activations(passes=passes, pp=4).in_flight(last=True) == 1
    assert activations(passes=replace(passes, count=2), pp=4).in_flight(last=False) == 2
    # 2 * (4 - 1) + 4 chunks are forward before the first is backward; a chunk is half of a stage.
    assert activations(passes=passes, pp=4, vpp=2).in_flight(last=False) == 11 / 2


@pytest.mark.parametrize("estimator", ["forward_kl", "reverse_kl", "jsd"])
@pytest.mark.parametrize("clamp", [None, -10.0])
def test_a_divergence_over_the_vocabulary_has_so_many_tensors_of_logits_at_once(estimator, clamp):
    import torch
    from torch._subclasses.fake_tensor import FakeTensorMode

    from megarl.algorithms.divergences import chosen_divergence, terms
    from megarl.system.comm import WorkerGroup
    from megarl.training.vocabulary import TeacherHead, vocabulary_divergence

    own = {"coef": 1.0, "estimator": estimator, "topk": None, "log_prob_min_clamp": clamp}
    config = RunConfig.model_validate({"name": "test", "algorithm": {"distillation": own}})
    asked = partial(terms, chosen_divergence(config.algorithm.distillation))
    with FakeTensorMode(), fake_engine.Storages() as storages:
        policy, head = (torch.zeros(rows, 8, requires_grad=True) for rows in (256, 20_000))
        before = storages.live
        divergences = vocabulary_divergence(
            policy,
            head,
            policy.detach(),
            TeacherHead(head.detach(), asked),
            temperature=1.0,
            chunk_tokens=128,
            group=WorkerGroup.alone(),
        )
        divergences.sum().backward()
    # In addition a gradient of the head, 8 / 128 of a chunk's logits.
    assert logit_copies(config) == pytest.approx((storages.peak - before) / (4 * 128 * 20_000), abs=0.2)


@pytest.mark.parametrize("kind", ["qwen2_vl", "qwen2_5_vl", "qwen3_vl"])
def test_a_vision_encoder_keeps_of_a_patch_what_the_formula_says(kind):
    """Storages that autograd keeps of transformers' module, without parameters; statistics of rows are left out."""
    import torch

    from megarl.config.model import ModelConfig
    from megarl.models.hf import encoder_of, load_hf_config
    from megarl.models.vlm.model import build_encoder
    from megarl.planning.vision import patch_bytes
    from tests.models.vlm_tiny import config_of

    raw = config_of(kind)
    sizes = {"embed_dim": 128} if kind == "qwen2_vl" else {"hidden_size": 128, "intermediate_size": 320}
    raw["vision_config"] |= {"depth": 6, **sizes}
    hf = load_hf_config(ModelConfig(hf_config=raw))
    module, encoder = build_encoder(hf, torch.float32), encoder_of(hf)
    own = {parameter.untyped_storage().data_ptr() for parameter in module.parameters()}
    kept = {}

    def keep(tensor):
        kept[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        module(torch.zeros(256, encoder.patch_values), grid_thw=torch.tensor([[1, 16, 16]]))
    found = sum(tensor.untyped_storage().nbytes() for place, tensor in kept.items() if place not in own) / 256
    assert found == pytest.approx(patch_bytes(encoder, 4, recompute=False), rel=0.1)


def test_a_patch_counts_as_the_tokens_of_its_memory():
    from megarl.artifacts.facts import known_facts
    from megarl.config.model import ModelConfig
    from megarl.planning.vision import patch_tokens

    facts = known_facts(ModelConfig(path="Qwen/Qwen2.5-VL-7B-Instruct"), "")
    one, split = ParallelConfig(), ParallelConfig(tp=2, sp=True)
    engine, again = EngineConfig(), EngineConfig(recompute="full")
    block = 13 * 1280 + 4 * 3420
    ends = 3 * 2 * 14**2 + 3 * 1280
    kept, kept_again = ends + 32 * block, ends + 32 * 1280 + block
    # Of a token: in each layer inputs and outputs of two norms, queries, keys and values before and after RoPE, the
    # context, three widths of the MLP; and the stream. Four bytes each of statistics are left out.
    layer = 4 * 3584 + 2 * 3584 + 3 * 512 + 3584 + 3 * 18944
    passing = 2 * 18944 + 3584
    found = patch_tokens(facts, one, engine, learns=True)
    assert found == pytest.approx(kept / (28 * layer + 3584 + passing), rel=0.02)
    found = patch_tokens(facts, one, again, learns=True)
    assert found == pytest.approx(kept_again / (28 * 3584 + 3584 + passing + layer), rel=0.02)
    assert patch_tokens(facts, split, engine, learns=True) == pytest.approx(2 * kept / (28 * layer), rel=0.05)
    assert patch_tokens(facts, one, engine, learns=False) < 0.02
    assert patch_tokens(replace(facts, encoder=None), one, engine, learns=True) == 0.0
