"""Odd configurations against transformers: accepted and equal, or refused before a process starts; nothing else.

Configurations are drawn from the keys of all supported configuration classes together, so that every class also meets
the keys that only others read.
"""

import dataclasses
import json
import logging
import re
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, event, given, settings
from hypothesis import strategies as st

from megarl.architectures import ARCHITECTURES
from megarl.artifacts.facts import facts_from_config, model_facts
from megarl.checks.weights import check_weights
from megarl.config.model import ModelConfig
from megarl.models.hf import load_hf_config
from megarl.models.packing import pack_stream
from megarl.system.errors import ConfigError
from tests.dist import single_process
from tests.models.families import LENGTH, reference, token_ids
from tests.models.tiny import build_tiny

TOLERANCE = 1e-5  # of the largest logit, about 100 roundings of float32

theta = st.sampled_from([100.0, 10000, 1e6])
length = st.sampled_from([8, 16, 64])
rope = st.one_of(
    st.none(),
    st.fixed_dictionaries({"rope_type": st.just("default")}, optional={"rope_theta": theta, "factor": st.just(2.0)}),
    st.fixed_dictionaries({"rope_type": st.just("default"), "partial_rotary_factor": st.just(0.5)}),
    st.fixed_dictionaries(
        {"type": st.just("linear"), "factor": st.sampled_from([2.0, 4])}, optional={"rope_theta": theta}
    ),
    st.fixed_dictionaries(
        {
            "rope_type": st.just("llama3"),
            "factor": st.just(8.0),
            "low_freq_factor": st.just(1.0),
            "high_freq_factor": st.sampled_from([4.0, 1.0]),
        },
        optional={"original_max_position_embeddings": length, "rope_theta": theta},
    ),
    st.fixed_dictionaries(
        {"rope_type": st.just("yarn"), "factor": st.sampled_from([2.0, 4.0, None])},
        optional={
            "original_max_position_embeddings": length,
            "attention_factor": st.sampled_from([0.5, None]),
            "beta_fast": st.just(16),
            "mscale": st.just(0.7),
            "mscale_all_dim": st.just(0.9),
            "truncate": st.booleans(),
            "rope_theta": theta,
        },
    ),
    st.sampled_from(
        [
            {"rope_type": "dynamic", "factor": 2.0},
            {"rope_type": "linear", "factor": 2.0, "partial_rotary_factor": 0.5},
            {"full_attention": {"rope_type": "default", "rope_theta": 100.0}},
            {"rope_type": "default", "rope_theta": None},
            {"factor": 3.0},
        ]
    ),
)
kind = st.sampled_from(["full_attention", "sliding_attention"])
# Every key of the configuration classes, with common and with odd values; those that no model may have are rare.
KEYS: dict[str, st.SearchStrategy[Any]] = {
    "vocab_size": st.sampled_from([61, 64]),
    "hidden_size": st.sampled_from([16, 32, 48, 64]),
    "intermediate_size": st.sampled_from([8, 24, 40]),
    "num_hidden_layers": st.integers(1, 3),
    "num_attention_heads": st.sampled_from([1, 2, 4, 4, 6]),
    "num_key_value_heads": st.sampled_from([1, 2, 2, 4, None]),
    "head_dim": st.sampled_from([2, 8, 20, 20, None, 7]),
    "hidden_act": st.sampled_from(["silu", "silu", "swish", "gelu"]),
    "max_position_embeddings": st.sampled_from([16, 64]),
    "initializer_range": st.just(0.02),
    "rms_norm_eps": st.sampled_from([1e-6, 1e-5, 0.1]),
    "tie_word_embeddings": st.booleans(),
    "rope_parameters": rope,
    "rope_scaling": rope,
    "rope_theta": theta,
    "partial_rotary_factor": st.sampled_from([0.5, 1.0]),
    "original_max_position_embeddings": length,
    "attention_bias": st.sampled_from([False, False, True]),
    "mlp_bias": st.sampled_from([False, False, True]),
    "attention_dropout": st.sampled_from([0.0, 0.1]),
    "sliding_window": st.sampled_from([None, 1, 3, 8, 100, 0]),
    "use_sliding_window": st.booleans(),
    "max_window_layers": st.integers(0, 3),
    "layer_types": st.one_of(st.none(), st.lists(kind, min_size=1, max_size=3)),
    "num_local_experts": st.integers(0, 5),
    "num_experts": st.integers(0, 5),
    "num_experts_per_tok": st.sampled_from([1, 1, 2, 3]),
    "moe_intermediate_size": st.sampled_from([8, 24]),
    "norm_topk_prob": st.booleans(),
    "decoder_sparse_step": st.sampled_from([1, 2, 3]),
    "mlp_only_layers": st.sampled_from([None, [], [0], [0, 1, 2], [7, -1]]),
    "output_router_logits": st.booleans(),
    "router_aux_loss_coef": st.sampled_from([0.0, 0.001]),
    "router_jitter_noise": st.sampled_from([0.0, 0.1]),
    "pad_token_id": st.sampled_from([None, 0]),
    "bos_token_id": st.just(1),
    "eos_token_id": st.sampled_from([2, [2, 3]]),
    "use_cache": st.booleans(),
    "pretraining_tp": st.sampled_from([1, 2]),
    "n_routed_experts": st.integers(0, 5),
    "n_shared_experts": st.sampled_from([1, 2]),
    "n_group": st.sampled_from([1, 1, 2]),
    "topk_group": st.sampled_from([1, 1, 2]),
    "routed_scaling_factor": st.sampled_from([1.0, 1.5, 2]),
    "first_k_dense_replace": st.integers(0, 3),
    "use_qk_norm": st.booleans(),
    "num_mtp_layers": st.integers(0, 1),
    "no_rope_layers": st.sampled_from([None, [1, 0], [0, 0, 1], [1]]),
    "no_rope_layer_interval": st.sampled_from([1, 2, 4, 0]),
    "attention_out_bias": st.booleans(),
    "residual_dropout": st.sampled_from([0.0, 0.1]),
    "resid_pdrop": st.sampled_from([0.0, 0.1]),
    "embd_pdrop": st.sampled_from([0.0, 0.1]),
    "embedding_multiplier": st.sampled_from([1.0, 3, 12.0]),
    "logits_scaling": st.sampled_from([1.0, 0.3, 8]),
    "residual_multiplier": st.sampled_from([1.0, 0.22]),
    "attention_multiplier": st.sampled_from([1.0, 0.015625]),
    "hidden_activation": st.sampled_from(["gelu_pytorch_tanh", "gelu_pytorch_tanh", "silu", "gelu"]),
    "query_pre_attn_scalar": st.sampled_from([16, 256]),
    "sliding_window_pattern": st.sampled_from([2, 6, 3, "LG", None]),
    "rope_local_base_freq": st.sampled_from([100.0, 10000]),
    "final_logit_softcapping": st.sampled_from([None, 3.0]),
    "attn_logit_softcapping": st.sampled_from([None, 3.0]),
    "use_bidirectional_attention": st.sampled_from([None, False, True]),
    "full_attention_interval": st.sampled_from([1, 2, 4]),
    "linear_num_key_heads": st.sampled_from([1, 2]),
    "linear_num_value_heads": st.sampled_from([1, 2, 4]),
    "linear_key_head_dim": st.sampled_from([4, 8]),
    "linear_value_head_dim": st.sampled_from([4, 6]),
    "linear_conv_kernel_dim": st.sampled_from([2, 4]),
    "q_lora_rank": st.sampled_from([12, None, 0]),
    "kv_lora_rank": st.sampled_from([8, 20]),
    "qk_nope_head_dim": st.sampled_from([4, 12]),
    "qk_rope_head_dim": st.sampled_from([2, 8, 5]),
    "v_head_dim": st.sampled_from([4, 30]),
    "rope_interleave": st.booleans(),
    "mlp_layer_types": st.one_of(st.none(), st.lists(st.sampled_from(["dense", "sparse"]), min_size=1, max_size=3)),
    "shared_expert_intermediate_size": st.sampled_from([8, 16]),
    "qkv_bias": st.booleans(),
    "rotary_dim": st.sampled_from([None, 2, 4]),
    "swiglu_limit": st.sampled_from([0.5, 7.0, 7]),
    "swiglu_alpha": st.sampled_from([1.0, 1.702, 2]),
}
SMALL = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 24,
    "vocab_size": 64,
    "max_position_embeddings": 64,
    "pad_token_id": None,  # the default of some classes is a token beyond the small vocabulary
}
LATENT = {
    "num_key_value_heads": 4,
    "q_lora_rank": 20,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 12,
    "qk_rope_head_dim": 8,
    "v_head_dim": 10,
    "n_group": 1,
    "topk_group": 1,
}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}


@st.composite
def configs(draw: st.DrawFn) -> dict[str, Any]:
    """A config.json: a small model of one architecture, and up to eight keys as any of the classes might set them."""
    model_type = draw(st.sampled_from(sorted(ARCHITECTURES)))
    raw = odd(model_type, {})
    # The keys that the class reads are drawn twice as often.
    read = [key for key in KEYS if key in ARCHITECTURES[model_type].keys]
    for key in draw(st.lists(st.sampled_from([*KEYS, *read]), min_size=2, max_size=10, unique=True)):
        raw[key] = draw(KEYS[key])
    for key in ("layer_types", "mlp_layer_types"):
        if raw.get(key):  # mostly of the length that fits
            raw[key] = (raw[key] * 3)[: raw["num_hidden_layers"]]
    return raw


def ours(folder: Path, vocab: int, *, critic: bool) -> torch.Tensor:
    (model,) = build_tiny(folder, value_head=critic)
    stream = pack_stream([LENGTH])
    with torch.no_grad():
        packed = {"packed_seq_params": stream.params}
        hidden = model(stream.input_ids(token_ids(LENGTH, vocab)), stream.position_ids, None, **packed)[:, 0]
        return model.values(hidden) if critic else model.logits(hidden)


def compare(
    raw: dict[str, Any], *, critic: bool = False, published: bool = False, reasons: tuple[str, ...] | None = None
) -> str:
    """`equal`, or `refused` before a start; anything else fails.

    Args:
        reasons: expressions for the only refusals that may meet what transformers runs; None: any.
        critic: a token classifier of one label, if transformers has this class for the model.
        published: config.json holds `raw`, not what save_pretrained makes of it.
    """
    from transformers.models.auto.modeling_auto import MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING_NAMES as CLASSIFIERS

    critic = critic and raw["model_type"] in CLASSIFIERS
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        found = reference(raw, folder, critic=critic)
        if found is None or published:
            (folder / "config.json").write_text(json.dumps(raw))
        refusal = None
        try:
            facts = model_facts(ModelConfig(path=str(folder)))
            if found is not None:
                check_weights(folder, facts, value_head=critic)
        except ConfigError as error:
            refusal = str(error)
        if refusal is not None:
            known = found is None or reasons is None or any(re.search(reason, refusal) for reason in reasons)
            assert known, f"transformers runs this: {raw}\n{refusal}"
            return "refused"
        assert found is not None, f"transformers does not run this, and the checks accept it: {raw}"
        model, expected = found
        assert critic or facts.parameters == sum(param.numel() for param in model.parameters()), raw
        got = ours(folder, model.config.vocab_size, critic=critic)
        worst = (got - expected).abs().max().item() / max(1.0, expected.abs().max().item())
        assert worst < TOLERANCE, f"{worst:.2g} from transformers: {raw}"
        return "equal"


@pytest.fixture(autouse=True, scope="module")
def _parallel():
    logging.getLogger("transformers").setLevel(logging.ERROR)
    single_process()


# What transformers runs and megarl does not.
NOT_SUPPORTED = (
    "is not supported",
    "high_freq_factor above low_freq_factor",
    "transformers treats a mistral with layer_types as a ministral",
    "the config has layers with a sliding window, but no window size",
    "sliding_window has no legal value",
    r"a divisor of the \d+ attention heads|one for each attention head",  # some numbers do nothing in latent attention
    "invalid value of sliding_window",
)


@pytest.mark.parametrize("examples", [30, pytest.param(60, marks=pytest.mark.campaign("families"))])
def test_drawn_configs_are_equal_or_refused(examples):
    results: list[str] = []

    @settings(
        max_examples=examples, deadline=None, derandomize=True, database=None, suppress_health_check=list(HealthCheck)
    )
    @given(raw=configs(), critic=st.sampled_from([False, False, True]), published=st.booleans())
    def each(raw, critic, published):
        results.append(compare(raw, critic=critic, published=published, reasons=NOT_SUPPORTED))
        event(results[-1])

    each()
    assert results.count("equal") >= examples // 3, f"{results.count('equal')} of {len(results)}"


WINDOWS = {"sliding_window": 3, "use_sliding_window": True}
LINEAR = {"rope_type": "linear", "factor": 4.0}
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
LONGROPE = {"short_factor": [1.0, 1.5, 2.0, 3.0], "long_factor": [4.0] * 4}
# Keys that the class does not read change nothing; keys that it reads do what they do in transformers.
EQUAL = [
    ("llama", {"sliding_window": 3}),
    ("llama", {"use_cache": False, "layer_types": ["sliding_attention"] * 2, **WINDOWS}),
    ("llama", {"num_experts": 4, "num_local_experts": 4, "norm_topk_prob": False}),
    ("llama", {"head_dim": 20, "num_attention_heads": 2}),
    ("llama", {"rope_scaling": LINEAR, "rope_parameters": {"rope_type": "default"}}),
    ("llama", {"rope_scaling": {"rope_type": "yarn", "factor": 4.0}, "original_max_position_embeddings": 16}),
    ("llama", {"rope_parameters": {**LLAMA3, "original_max_position_embeddings": 16}}),
    ("mistral", {"attention_bias": True, "mlp_bias": True}),
    ("mistral", {"sliding_window": 3, "use_sliding_window": False, "max_window_layers": 1}),
    ("mixtral", {"norm_topk_prob": False}),
    ("mixtral", {"layer_types": ["full_attention", "sliding_attention"], "sliding_window": 3}),
    ("mixtral", {"mlp_only_layers": [0], "decoder_sparse_step": 2, "moe_intermediate_size": 8}),
    ("mixtral", {"num_experts_per_tok": 1}),
    ("mixtral", {"num_experts": 3, "num_local_experts": 5}),
    ("mixtral", {"router_jitter_noise": 0.1, "output_router_logits": True}),
    ("qwen2", {"attention_bias": False, "mlp_bias": True, "num_experts": 2}),
    ("qwen2", {**WINDOWS, "max_window_layers": 1}),
    ("qwen2", {"head_dim": 20}),
    ("qwen3", {**WINDOWS, "layer_types": ["sliding_attention", "full_attention"], "max_window_layers": 0}),
    ("qwen3", {"sliding_window": 3, "max_window_layers": 0}),
    ("qwen3_moe", {**WINDOWS, "layer_types": ["full_attention", "full_attention"], "max_window_layers": 5}),
    ("qwen3_moe", {"num_experts_per_tok": 1, "norm_topk_prob": True}),
    ("qwen3_moe", {"num_experts_per_tok": 1, "norm_topk_prob": False}),
    ("qwen3_moe", {"num_experts": 0, "output_router_logits": True}),
    ("qwen3_moe", {"num_local_experts": 3}),
    ("qwen3_moe", {"mlp_only_layers": [0, 1]}),
    ("qwen3_moe", {"decoder_sparse_step": 2}),
    ("qwen3_moe", {"mlp_only_layers": [1], "tie_word_embeddings": True}),
    ("glm4_moe", {"attention_bias": True, "use_qk_norm": True, "n_group": 2, "output_router_logits": True}),
    ("glm4_moe", {"first_k_dense_replace": 2}),
    ("deepseek_v3", {"first_k_dense_replace": 1, "rope_interleave": False, "q_lora_rank": None}),
    ("deepseek_v3", {"first_k_dense_replace": 0, "num_local_experts": 6, "n_group": 3, "topk_group": 2}),
    ("deepseek_v3", {"rope_scaling": {**LINEAR, "mscale_all_dim": 0.8}, "head_dim": 8, "v_head_dim": 30}),
    ("deepseek_v3", {"partial_rotary_factor": 0.5, "num_key_value_heads": None}),
    ("glm4_moe_lite", {"mlp_layer_types": ["sparse", "dense"], "rms_norm_eps": 0.1}),
    ("glm4_moe_lite", {"first_k_dense_replace": 1, "rope_interleave": False}),
    (
        "qwen2_moe",
        {**WINDOWS, "qkv_bias": False, "num_hidden_layers": 3, "mlp_only_layers": [1], "norm_topk_prob": True},
    ),
    ("qwen2_moe", {**WINDOWS, "max_window_layers": 1, "shared_expert_intermediate_size": 8}),
    ("glm4_moe", {"output_router_logits": True}),
    ("glm4_moe", {"rope_scaling": LINEAR, "partial_rotary_factor": 1.0}),
    ("qwen3_5_text", {"layer_types": ["full_attention"] * 2, "linear_num_value_heads": 3}),
    (
        "glm4_moe",
        {"num_local_experts": 6, "norm_topk_prob": False, "rope_parameters": {**LINEAR, "partial_rotary_factor": 0.25}},
    ),
]
EQUAL += [
    ("smollm3", {"no_rope_layers": [1, 0], "use_sliding_window": True, "sliding_window": 3, "attention_bias": True}),
    ("seed_oss", {"attention_bias": False, "attention_out_bias": True, "mlp_bias": True, "head_dim": None}),
    ("granite", {"attention_multiplier": 0.1, "logits_scaling": 3, "embedding_multiplier": 12, "mlp_bias": True}),
    ("phi3", {"rope_scaling": {"type": "yarn", **LONGROPE}, "original_max_position_embeddings": 32}),
    ("phi3", {"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.75}, "sliding_window": 3}),
    ("olmo3", {"rope_theta": 100.0, "rope_scaling": {"rope_type": "yarn", "factor": 4.0}, "sliding_window": 3}),
    ("olmo3", {"rope_parameters": {"sliding_attention": {"rope_type": "linear", "factor": 2.0}}}),
    ("gemma3_text", {"rope_local_base_freq": 100.0, "rope_scaling": LINEAR, "sliding_window_pattern": 2}),
    ("exaone4", {"sliding_window": None, "layer_types": ["full_attention"] * 2, "sliding_window_pattern": "LLLG"}),
    ("exaone4", {"sliding_window": 3, "sliding_window_pattern": 2, "rope_scaling": LLAMA3, "head_dim": 20}),
    ("gemma2", {"attn_logit_softcapping": 1.0, "final_logit_softcapping": None, "sliding_window": 3}),
    ("gemma2", {"attn_logit_softcapping": None, "final_logit_softcapping": 1.0, "layer_types": ["full_attention"] * 2}),
    ("gpt_oss", {"rope_parameters": None, "swiglu_limit": 0.5, "swiglu_alpha": 1.0, "sliding_window": 3}),
    ("gpt_oss", {"attention_bias": False, "layer_types": ["full_attention"] * 2, "rope_scaling": LINEAR}),
    ("gemma3_text", {"attn_logit_softcapping": 3.0, "hidden_act": "silu", "attention_bias": True, "sliding_window": 3}),
]
REFUSED = [
    ("llama", {"attention_bias": True}),
    ("llama", {"mlp_bias": True}),
    ("llama", {"hidden_act": "gelu"}),
    ("llama", {"num_key_value_heads": 3}),
    ("llama", {"layer_types": ["full_attention"]}),
    ("llama", {"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}, "rope_parameters": {"rope_type": "default"}}),
    ("llama", {"rope_parameters": {**LINEAR, "partial_rotary_factor": 0.5}}),
    ("llama", {"per_layer_config": {"0": {"intermediate_size": 8}}}),
    *(
        (kind, {"rope_scaling": {**scaling, "factor": 4.0}, "original_max_position_embeddings": None})
        for kind in ("llama", "qwen3")
        for scaling in ({"rope_type": "yarn"}, {"rope_type": "llama3", "low_freq_factor": 1.0, "high_freq_factor": 4.0})
    ),
    ("mistral", {"layer_types": ["full_attention", "sliding_attention"]}),
    ("mistral", {"sliding_window": 0}),
    ("qwen2_moe", {"use_sliding_window": True, "sliding_window": None, "max_window_layers": 0}),
    ("qwen3_next", {"head_dim": 20, "rope_scaling": {"rope_type": "yarn", "factor": 2.0}}),
    ("mixtral", {"num_experts": 0}),
    ("mixtral", {"num_experts_per_tok": 5}),
    ("mixtral", {"rope_parameters": {"rope_type": "yarn", "factor": 2.0}}),
    ("qwen2", {"head_dim": None}),
    ("qwen3", {"layer_types": ["sliding_attention", "full_attention"]}),
    ("qwen3_moe", {"decoder_sparse_step": 0}),
    ("qwen3_moe", {"num_key_value_heads": None}),
    ("deepseek_v3", {"num_key_value_heads": 2}),
    ("deepseek_v3", {"rope_scaling": {"type": "yarn", "factor": None, "mscale_all_dim": 1.0}}),
    ("deepseek_v3", {"moe_layer_freq": 2}),
    ("glm4_moe_lite", {"partial_rotary_factor": 0.5}),
    ("glm4_moe_lite", {"num_key_value_heads": None}),
    ("glm4_moe", {"n_group": 3}),
    ("glm4_moe", {"scoring_func": "softmax"}),
    ("glm4_moe", {"partial_rotary_factor": 0.1}),
    ("smollm3", {"no_rope_layers": [1]}),
    ("smollm3", {"layer_types": ["full_attention", "sliding_attention"], "sliding_window": 3}),
    ("granite", {"logits_scaling": 0}),
    ("phi3", {"rope_scaling": {"type": "longrope", **LONGROPE, "short_factor": [1.0]}}),
    ("phi3", {"rope_scaling": LINEAR}),
    ("olmo3", {"rope_parameters": {"full_attention": {"rope_type": "dynamic", "factor": 2.0}}}),
    ("exaone4", {"sliding_window": None}),
    ("exaone4", {"sliding_window_pattern": "LLLG"}),
    ("gpt_oss", {"swiglu_limit": 7}),
    ("gpt_oss", {"sliding_window": None}),
    ("gemma3_text", {"hidden_activation": "gelu"}),
    ("gemma3_text", {"final_logit_softcapping": 30}),
    ("gemma2", {"attn_logit_softcapping": 0.0}),
    ("gemma3_text", {"use_bidirectional_attention": True}),
]


def odd(model_type: str, changes: dict[str, Any]) -> dict[str, Any]:
    names = ARCHITECTURES[model_type].experts_keys
    if "num_experts" not in ARCHITECTURES[model_type].keys:
        experts = {}
    else:
        experts = EXPERTS if names is None or "num_experts" in names else {**EXPERTS, names[0]: 4}
    small_head = {"head_dim": 16} if ARCHITECTURES[model_type].keys["head_dim"] in (128, 256) else {}
    latent = LATENT if "kv_lora_rank" in ARCHITECTURES[model_type].keys else {}
    return {"model_type": model_type, **SMALL, **experts, **small_head, **latent, **changes}


@pytest.mark.parametrize(("model_type", "changes"), EQUAL)
def test_odd_configs_that_are_equal(model_type, changes):
    """As they are published; the drawn ones are also compared as transformers writes them."""
    assert compare(odd(model_type, changes), published=True) == "equal"


# Of every class, and in no class's list of fields.
OF_EVERY_CLASS: list[dict[str, Any]] = [
    *({"is_causal": value} for value in (False, None, 0, {})),
    {"is_encoder_decoder": True},
    {"text_config": {"hidden_size": 8}},
    {"decoder": {}},
    {"pruned_heads": {"0": [1]}},
    {"return_dict": False},
    {"dtype": "int3"},
    {"torch_dtype": 1},
    {"eos_token_id": "2"},
    {"pad_token_id": [0]},
    {"architectures": True},
    {"id2label": {"a": 1}},
    {"num_labels": "x"},
    {"use_cache": None},
    {"initializer_range": 0},
    {"auto_map": None},
    {"fusion_config": {"a": 1}},
    {"transformers_weights": "x"},
    {"is_heterogeneous": False},
    {"quantization_config": {}},
    {"per_layer_config": []},
]
HARMLESS: dict[str, Any] = {
    "is_causal": True,
    "is_decoder": True,
    "add_cross_attention": True,
    "use_bidirectional_attention": True,
    "logit_scale": 0.5,
    "final_logit_softcapping": 3.0,
    "attention_chunk_size": 2,
    "classifier_dropout": 0.5,
    "torchscript": True,
    "pruned_heads": {},
    "text_config": None,
    "output_hidden_states": True,
    "chunk_size_feed_forward": 4,
    "tie_last_hidden_states": False,
}


@pytest.mark.parametrize("changes", OF_EVERY_CLASS, ids=str)
def test_keys_of_every_class_that_make_another_model_or_none_are_refused(changes):
    with pytest.raises(ConfigError, match=next(iter(changes))):
        facts_from_config(odd("llama", changes), "config.json")


@pytest.mark.parametrize("model_type", sorted(ARCHITECTURES))
def test_a_model_that_is_not_causal_is_refused_and_keys_that_nothing_reads_change_nothing(model_type):
    assert compare(odd(model_type, {"is_causal": False}), published=True) == "refused"
    unread = {key: value for key, value in HARMLESS.items() if key not in ARCHITECTURES[model_type].keys}
    for published in (True, False) if model_type == "qwen3" else (True,):
        assert compare(odd(model_type, unread), published=published) == "equal"


def test_what_transformers_made_of_a_config_is_checked_likewise(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(odd("qwen3", {"is_causal": False})))
    with pytest.raises(ConfigError, match=r"is_causal: megarl supports causal attention only"):
        load_hf_config(ModelConfig(path=str(tmp_path)))


@pytest.mark.parametrize(("model_type", "changes"), REFUSED)
def test_odd_configs_that_are_refused(model_type, changes):
    assert compare(odd(model_type, changes), published=True) == "refused"


def test_every_key_of_the_configuration_classes_is_drawn():
    from transformers import AutoConfig, PretrainedConfig

    common = {field.name for field in dataclasses.fields(PretrainedConfig)}
    for model_type, architecture in ARCHITECTURES.items():
        fields = {field.name for field in dataclasses.fields(type(AutoConfig.for_model(model_type)))}
        assert fields - common <= set(KEYS), model_type
        assert set(architecture.keys) <= set(KEYS), model_type
