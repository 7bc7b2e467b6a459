"""Small configurations of every architecture, drawn by hypothesis, and the models that transformers makes of them.

A new architecture needs its row in `tests.models.tiny.EXTRA`, and here what its class reads and no other one does: in
`SWITCHES`, or in a function like `_experts` where the values depend on each other.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from hypothesis import strategies as st

from megarl.architectures import ARCHITECTURES
from megarl.architectures.base import Architecture
from megarl.architectures.values import read_keys
from megarl.artifacts.facts import ModelFacts
from megarl.config.model import LoraConfig, ModelConfig, ParallelConfig
from megarl.config.training import EngineConfig
from tests.models.vlm_tiny import config_of

VOCABULARIES = (131, 136)
LONGEST = 64
LENGTH = 20  # tokens of a sequence

THETA = st.sampled_from([100.0, 1e4, 1e6])
#: Keys whose values depend on no other key; each is left out of half of the configurations.
SWITCHES: dict[str, st.SearchStrategy[Any]] = {
    "tie_word_embeddings": st.booleans(),
    "rms_norm_eps": st.sampled_from([1e-6, 1e-5, 1e-2]),
    "rope_theta": THETA,
    "attention_bias": st.booleans(),
    "attention_out_bias": st.booleans(),
    "qkv_bias": st.booleans(),
    "mlp_bias": st.booleans(),
    "use_qk_norm": st.booleans(),
    "norm_topk_prob": st.booleans(),
    "routed_scaling_factor": st.sampled_from([0.5, 1.0, 2.5]),
    "rope_interleave": st.booleans(),
    "swiglu_limit": st.sampled_from([0.5, 7.0]),
    "swiglu_alpha": st.sampled_from([0.5, 1.702]),
    "embedding_multiplier": st.sampled_from([0.5, 3, 12.0]),
    "logits_scaling": st.sampled_from([0.3, 1.0, 8]),
    "residual_multiplier": st.sampled_from([0.22, 1.0]),
    "attention_multiplier": st.sampled_from([0.015625, 0.3]),
    "query_pre_attn_scalar": st.sampled_from([4, 16, 256]),
    "rope_local_base_freq": THETA,
    "attn_logit_softcapping": st.sampled_from([None, 3.0]),
    "final_logit_softcapping": st.sampled_from([None, None, 3.0]),
    "max_window_layers": st.integers(0, 3),
    "sliding_window_pattern": st.integers(1, 3),
    "no_rope_layer_interval": st.integers(1, 3),
    "full_attention_interval": st.integers(1, 3),
    "decoder_sparse_step": st.integers(1, 3),
    "linear_conv_kernel_dim": st.sampled_from([2, 3, 4]),
    "output_router_logits": st.booleans(),
    "attention_dropout": st.just(0.0),
    "residual_dropout": st.just(0.0),
}
Draw = Callable[[st.SearchStrategy[Any]], Any]


@st.composite
def fitting(draw: st.DrawFn, model_type: str) -> dict[str, Any]:
    """A config.json of the class with values that fit each other; megarl may refuse it for what it does not support."""
    spec = ARCHITECTURES[model_type]
    raw = {
        "model_type": model_type,
        "max_position_embeddings": LONGEST,
        "pad_token_id": None,
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    for key, values in SWITCHES.items():
        if key in spec.keys and draw(st.booleans()):
            raw[key] = draw(values)
    for part in (_sizes, _latent, _delta, _experts, _layers, _rope):
        part(draw, spec, raw)
    return raw


def _sizes(draw: Draw, spec: Architecture, raw: dict[str, Any]) -> None:
    # Most configurations have heads and layers that two processes can share.
    groups = draw(st.sampled_from([2, 4, 2, 1, 6, 3]))
    heads = groups * draw(st.sampled_from([2, 1, 3] if groups < 3 else [1, 2] if groups < 4 else [1]))
    raw["num_attention_heads"], raw["num_key_value_heads"] = heads, groups
    raw["num_hidden_layers"] = draw(st.sampled_from([2, 4, 3, 1]))
    raw["vocab_size"] = draw(st.sampled_from(VOCABULARIES))
    raw["hidden_size"] = heads * draw(st.sampled_from([8, 12, 16]))
    if "intermediate_size" in spec.keys:
        raw["intermediate_size"] = draw(st.sampled_from([24, 40]))
    # Classes without this field have heads of hidden_size / num_attention_heads; latent attention has widths of its own
    if spec.model_type not in ("phi3", "deepseek_v3", "glm4_moe_lite") and draw(st.sampled_from([True, True, False])):
        raw["head_dim"] = draw(st.sampled_from([8, 12, 20]))
    elif spec.keys["head_dim"] is not None:
        raw["head_dim"] = 16


def _latent(draw: Draw, spec: Architecture, raw: dict[str, Any]) -> None:
    if "kv_lora_rank" not in spec.keys:
        return
    raw["num_key_value_heads"] = raw["num_attention_heads"]
    raw["q_lora_rank"] = draw(st.sampled_from([None, 12, 20]))
    raw["kv_lora_rank"] = draw(st.sampled_from([8, 20]))
    raw["qk_nope_head_dim"] = draw(st.sampled_from([4, 12]))
    raw["qk_rope_head_dim"] = draw(st.sampled_from([2, 8]))
    raw["v_head_dim"] = draw(st.sampled_from([4, 30]))


def _delta(draw: Draw, spec: Architecture, raw: dict[str, Any]) -> None:
    if "linear_num_key_heads" not in spec.keys:
        return
    raw["linear_num_key_heads"] = draw(st.sampled_from([2, 4, 2, 1]))
    raw["linear_num_value_heads"] = raw["linear_num_key_heads"] * draw(st.sampled_from([1, 2, 3]))
    raw["linear_key_head_dim"] = draw(st.sampled_from([8, 16]))
    raw["linear_value_head_dim"] = draw(st.sampled_from([6, 16]))


def _experts(draw: Draw, spec: Architecture, raw: dict[str, Any]) -> None:
    if "num_experts" not in spec.keys:
        return
    groups = draw(st.sampled_from([1, 2, 3])) if "n_group" in spec.keys else 1
    experts = groups * draw(st.sampled_from([4, 2, 3]))
    chosen = draw(st.integers(1, groups))
    raw[(spec.experts_keys or ("num_experts",))[0]] = experts
    raw["num_experts_per_tok"] = draw(st.integers(1, min(4, experts // groups * chosen)))
    if "n_group" in spec.keys:
        raw["n_group"], raw["topk_group"] = groups, chosen
    if "n_shared_experts" in spec.keys:
        raw["n_shared_experts"] = draw(st.integers(1, 2))
    for key in ("moe_intermediate_size", "shared_expert_intermediate_size"):
        if key in spec.keys:
            raw[key] = draw(st.sampled_from([8, 24]))
    layers = raw["num_hidden_layers"]
    if "first_k_dense_replace" in spec.keys and (dense := draw(st.sampled_from([1, 0, layers - 1, None]))) is not None:
        raw["first_k_dense_replace"] = dense
    if "mlp_only_layers" in spec.keys and draw(st.booleans()):
        raw["mlp_only_layers"] = draw(st.lists(st.integers(0, layers - 1), unique=True, max_size=2))
    if "mlp_layer_types" in spec.keys and draw(st.booleans()):
        kinds = st.sampled_from(["sparse", "dense"])
        raw["mlp_layer_types"] = draw(st.lists(kinds, min_size=layers, max_size=layers))


def _layers(draw: Draw, spec: Architecture, raw: dict[str, Any]) -> None:
    layers = raw["num_hidden_layers"]
    if "use_sliding_window" in spec.keys:
        raw["use_sliding_window"] = draw(st.booleans())
    if "sliding_window" in spec.keys:
        raw["sliding_window"] = draw(st.sampled_from([3, 8, 1]))
        if "sliding_window" in spec.null and draw(st.booleans()):
            raw["sliding_window"] = None
    if "no_rope_layers" in spec.keys and draw(st.booleans()):
        raw["no_rope_layers"] = draw(st.lists(st.integers(0, 1), min_size=layers, max_size=layers))
    if "layer_types" in spec.keys and draw(st.booleans()):
        windows = raw.get("use_sliding_window", True) and raw.get("sliding_window", 1) is not None
        kinds = spec.legal_types if windows else ("full_attention",)
        raw["layer_types"] = draw(st.lists(st.sampled_from(kinds), min_size=layers, max_size=layers))


def _rope(draw: Draw, spec: Architecture, raw: dict[str, Any]) -> None:
    if spec.rope.partial and "rotary_dim" not in spec.keys and draw(st.booleans()):
        raw["partial_rotary_factor"] = draw(st.sampled_from([0.5, 1.0]))
    if "rotary_dim" in spec.keys:
        raw["rotary_dim"] = draw(st.sampled_from([None, 2, 4]))
    kind = draw(st.sampled_from(spec.rope.types))
    numbers: dict[str, st.SearchStrategy[Any]] = {
        "linear": st.fixed_dictionaries({"factor": st.sampled_from([2.0, 4])}),
        "llama3": st.fixed_dictionaries(
            {
                "factor": st.just(8.0),
                "low_freq_factor": st.just(1.0),
                "high_freq_factor": st.sampled_from([4.0, 2.0]),
                "original_max_position_embeddings": st.sampled_from([16, 32]),
            }
        ),
        "yarn": st.fixed_dictionaries(
            {"factor": st.sampled_from([4.0, 2.0])},
            optional={
                "original_max_position_embeddings": st.sampled_from([16, 32]),
                "attention_factor": st.just(0.5),
                "beta_fast": st.just(16.0),
                "mscale": st.just(0.7),
                "mscale_all_dim": st.sampled_from([0.9, 1.0]),
                "truncate": st.booleans(),
            },
        ),
    }
    if kind == "longrope":
        width = raw["hidden_size"] // raw["num_attention_heads"]
        count = int(width * raw.get("partial_rotary_factor", 1)) // 2
        factors = st.lists(st.sampled_from([1.0, 1.5, 4.0]), min_size=count, max_size=count)
        raw["original_max_position_embeddings"] = draw(st.sampled_from([56, LONGEST]))
        values = {"rope_type": kind, "short_factor": draw(factors), "long_factor": draw(factors)}
    elif kind == "default":
        values = {"rope_type": kind}
    else:
        values = {"rope_type": kind, **draw(numbers[kind])}
    if kind != "default" or draw(st.booleans()):
        # the older name has one section for all layers, or for those without a window
        name = draw(st.sampled_from(["rope_scaling", "rope_parameters"]))
        nested = name == "rope_parameters" and spec.rope.local_theta is not None
        sections = {"full_attention": values, "sliding_attention": {"rope_type": "default"}}
        raw[name] = sections if nested else values


@st.composite
def fitting_images(draw: st.DrawFn, kind: str) -> dict[str, Any]:
    """A config.json of a vision-language model; heads rotate 16 numbers, for which config_of has sections."""
    raw = config_of(kind)
    text, vision = raw["text_config"], raw["vision_config"]
    heads, layers = draw(st.sampled_from([4, 2, 3])), draw(st.integers(1, 4))
    text |= {"num_attention_heads": heads, "hidden_size": 16 * heads, "num_hidden_layers": layers}
    text["num_key_value_heads"] = draw(st.sampled_from([n for n in range(1, heads + 1) if heads % n == 0]))
    text["intermediate_size"] = draw(st.sampled_from([24, 40]))
    text["rms_norm_eps"] = draw(st.sampled_from([1e-6, 1e-2]))
    text["rope_parameters"]["rope_theta"] = draw(THETA)
    sections = [[2, 3, 3], [4, 2, 2], [3, 3, 2]][draw(st.integers(0, 2)) :]
    text["rope_parameters"]["mrope_section"] = sections[0] if kind in ("qwen2_vl", "qwen2_5_vl") else sections[-1]
    if "layer_types" in text:
        kinds = st.sampled_from(["linear_attention", "full_attention"])
        text["layer_types"] = draw(st.lists(kinds, min_size=layers, max_size=layers))
    if "num_experts" in text:
        text["num_experts"] = draw(st.integers(2, 5))
        text["num_experts_per_tok"] = draw(st.integers(1, text["num_experts"]))
        text["moe_intermediate_size"] = draw(st.sampled_from([8, 24]))
    if "mlp_only_layers" in text:
        text["mlp_only_layers"] = draw(st.lists(st.integers(0, layers - 1), unique=True, max_size=2))
    if draw(st.booleans()):
        raw["tie_word_embeddings"] = text["tie_word_embeddings"] = True
    vision["hidden_size" if kind == "qwen2_vl" else "out_hidden_size"] = 16 * heads
    vision["num_heads"], vision["depth"] = draw(st.sampled_from([1, 2, 4])), draw(st.integers(1, 4))
    vision["patch_size"], vision["spatial_merge_size"] = (
        draw(st.sampled_from([14, 4])),
        draw(st.sampled_from([2, 1, 3])),
    )
    blocks = st.lists(st.integers(0, vision["depth"] - 1), unique=True, max_size=min(layers, vision["depth"]))
    if "fullatt_block_indexes" in vision:
        side = vision["patch_size"] * vision["spatial_merge_size"]
        vision |= {"fullatt_block_indexes": draw(blocks), "window_size": side * draw(st.integers(1, 3))}
    if "deepstack_visual_indexes" in vision:
        vision["deepstack_visual_indexes"] = draw(blocks)
    if "num_position_embeddings" in vision:
        vision["num_position_embeddings"] = draw(st.sampled_from([16, 49, 64]))
    return raw


def token_ids(length: int, vocab: int, seed: int = 3) -> torch.Tensor:
    """Random token ids [length]."""
    return torch.randint(0, vocab, (length,), generator=torch.Generator().manual_seed(seed))


def reference(
    raw: dict[str, Any], folder: Path, *, critic: bool = False
) -> tuple[torch.nn.Module, torch.Tensor] | None:
    """What transformers makes of `raw`: the model, saved to `folder`, and its outputs; None when it cannot."""
    from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForTokenClassification

    (folder / "config.json").write_text(json.dumps(raw))
    kind = AutoModelForTokenClassification if critic else AutoModelForCausalLM
    moe = "num_experts" in ARCHITECTURES[raw["model_type"]].keys
    centered = ARCHITECTURES[raw["model_type"]].wiring(read_keys(raw)).zero_centered  # but for those of delta nets
    try:
        config = AutoConfig.from_pretrained(folder)
        if critic:
            config.num_labels = 1
        config._attn_implementation = config._experts_implementation = "eager"
        torch.manual_seed(1)
        model = as_megarl(kind.from_config(config).float().eval())
        with torch.no_grad():
            for name, param in model.named_parameters():
                # Large enough that every part shows in the outputs.
                param.copy_(torch.randn_like(param) * (0.3 if param.dim() == 1 else 1 / math.sqrt(param.shape[-1])))
                if "norm" in name and not (centered and "linear_attn" not in name):
                    param.add_(1.0)
            for name, buffer in model.named_buffers():
                if name.endswith("e_score_correction_bias"):
                    buffer.normal_(0.0, 0.1)
            # Of no layer with experts transformers fails to compute the loss that this would add.
            lossless = {"output_router_logits": False} if moe and not critic else {}
            ids = token_ids(LENGTH, config.vocab_size)
            outputs = model(input_ids=ids[None], use_cache=False, **lossless).logits[0]
    except Exception:  # whatever a configuration or a model raises that does not run
        return None
    if not outputs.isfinite().all():
        return None
    model.save_pretrained(folder)
    return model, outputs


def as_megarl(model: torch.nn.Module) -> torch.nn.Module:
    """Give the norms of latents the epsilon of the config, which is 1e-6 in transformers whatever the config says."""
    for name, module in model.named_modules():
        if name.endswith("_a_layernorm"):
            module.variance_epsilon = model.config.rms_norm_eps
    return model


def read(folder: Path) -> torch.nn.Module:
    """The model that transformers reads from `folder`."""
    from transformers import AutoModelForCausalLM

    settings = {"attn_implementation": "eager", "experts_implementation": "eager"}
    return as_megarl(AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, **settings).eval())


def with_adapters(folder: Path, facts: ModelFacts) -> Any:
    """The model in `folder` with random adapters on all layers that can have some, and nothing else that learns."""
    from megarl.models.build import build_policy
    from megarl.models.config import load_hf_config, transformer_config
    from megarl.models.lora import freeze_base, init_adapters
    from megarl.models.weights import load_weights

    hf = load_hf_config(ModelConfig(path=str(folder), vision=facts.encoder is not None))
    names = ["attention", *(["mlp"] if not facts.is_moe or not all(facts.sparse) else [])]
    if facts.encoder is not None:
        names += ["tower", "merger"]
    elif facts.is_moe:
        names += ["experts"]
    lora = LoraConfig(rank=2, alpha=3, targets=names)
    config = transformer_config(hf, ParallelConfig(), dtype=torch.float32, engine=EngineConfig(), lora=lora)
    chunks = build_policy(hf, config)
    init_adapters(chunks, lora, 0)
    load_weights(chunks, folder)
    for name, parameter in chunks[0].named_parameters():
        if name.endswith("adapter.b"):
            torch.nn.init.normal_(parameter, std=0.1, generator=torch.Generator().manual_seed(len(name)))
    freeze_base(chunks)
    return chunks[0]


def of_transformers(model: torch.nn.Module, parts: list[torch.Tensor]) -> list[torch.Tensor]:
    """Logits of each sequence, one forward pass for each."""
    return [model(input_ids=part[None], use_cache=False, output_router_logits=False).logits[0] for part in parts]


def last_place(model: torch.nn.Module, parts: list[torch.Tensor]) -> float:
    """How far log-probs move when every weight moves by its last place: no other computation comes nearer."""
    with torch.no_grad():
        before = [part.log_softmax(-1) for part in of_transformers(model, parts)]
        values = [parameter.clone() for parameter in model.parameters()]
        for number, parameter in enumerate(model.parameters()):
            sign = torch.rand(parameter.shape, generator=torch.Generator().manual_seed(number)).round() * 2 - 1
            parameter.mul_(1 + sign * torch.finfo(torch.float32).eps)
        after = [part.log_softmax(-1) for part in of_transformers(model, parts)]
        for parameter, value in zip(model.parameters(), values, strict=True):
            parameter.copy_(value)
    return max((a - b).abs().max().item() for a, b in zip(before, after, strict=True))
