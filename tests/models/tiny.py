"""Tiny random models of every architecture, made by transformers."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from megarl.config.model import ModelConfig, ParallelConfig
from megarl.config.training import EngineConfig

COMMON = {
    "hidden_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 96,
    "vocab_size": 131,
    "max_position_embeddings": 128,
    "tie_word_embeddings": False,
    "rms_norm_eps": 1e-6,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": None,  # the default of some classes is a token beyond the small vocabulary
}
_HYBRID = {
    "head_dim": 32,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 16,
}
_SHARED = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 48,
    "shared_expert_intermediate_size": 32,
}
EXTRA: dict[str, dict[str, Any]] = {
    "deepseek_v3": {
        "num_key_value_heads": 4,
        "q_lora_rank": 24,
        "kv_lora_rank": 32,
        "qk_nope_head_dim": 16,
        "qk_rope_head_dim": 8,
        "v_head_dim": 12,
        "n_routed_experts": 8,
        "num_experts_per_tok": 3,
        "n_group": 4,
        "topk_group": 2,
        "moe_intermediate_size": 32,
        "n_shared_experts": 2,
        "first_k_dense_replace": 1,
        "rope_scaling": {
            "type": "yarn",
            "factor": 4.0,
            "mscale": 0.7,
            "mscale_all_dim": 1.0,
            "original_max_position_embeddings": 32,
        },
    },
    "exaone4": {"head_dim": 24, "sliding_window": 8, "sliding_window_pattern": 2},
    "gemma2": {
        "head_dim": 32,
        "query_pre_attn_scalar": 9,
        "sliding_window": 8,
        "attention_bias": True,
        "attn_logit_softcapping": 2.0,
        "final_logit_softcapping": 3.0,
    },
    "gemma3_text": {
        "final_logit_softcapping": 3.0,
        "head_dim": 32,
        "query_pre_attn_scalar": 9,
        "sliding_window": 8,
        "sliding_window_pattern": 2,
        "attention_bias": True,
        "rope_scaling": {"rope_type": "linear", "factor": 8.0},
        "hidden_activation": "gelu_pytorch_tanh",
    },
    "glm4_moe": {
        "head_dim": 24,
        "use_qk_norm": True,
        "attention_bias": True,
        "n_routed_experts": 8,
        "num_experts_per_tok": 3,
        "n_group": 4,
        "topk_group": 2,
        "moe_intermediate_size": 32,
        "n_shared_experts": 2,
        "routed_scaling_factor": 1.5,
    },
    "glm4_moe_lite": {
        "num_key_value_heads": 4,
        "q_lora_rank": None,
        "kv_lora_rank": 32,
        "qk_nope_head_dim": 8,
        "qk_rope_head_dim": 8,
        "v_head_dim": 24,
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 32,
    },
    "gpt_oss": {
        "head_dim": 32,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "intermediate_size": 48,
        "sliding_window": 8,
        "swiglu_limit": 1.5,
        "rope_scaling": {
            "rope_type": "yarn",
            "factor": 4.0,
            "truncate": False,
            "original_max_position_embeddings": 32,
        },
    },
    "granite": {
        "embedding_multiplier": 3.0,
        "logits_scaling": 2.0,
        "residual_multiplier": 0.3,
        "attention_multiplier": 0.1,
        "attention_bias": True,
        "mlp_bias": True,
    },
    "llama": {"head_dim": 16, "rms_norm_eps": 1e-5},
    "minimax_m2": {"head_dim": 16, "num_local_experts": 8, "num_experts_per_tok": 3, "rotary_dim": 8},
    "mistral": {"head_dim": 16, "sliding_window": 8},
    "mixtral": {"head_dim": 16, "num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": None},
    "olmo2": {"attention_bias": True},
    "olmo3": {
        "sliding_window": 8,
        "rope_scaling": {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 32},
        "rope_theta": 1e4,
        "attention_bias": True,
    },
    "phi3": {
        "original_max_position_embeddings": 64,
        "partial_rotary_factor": 0.5,
        "rope_scaling": {"type": "longrope", "short_factor": [1.0, 1.1, 1.2, 1.3], "long_factor": [2.0] * 4},
        "sliding_window": 8,
    },
    "qwen2": {},
    "qwen2_moe": {
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 32,
        "shared_expert_intermediate_size": 40,  # the compiled kernels process 16 numbers at once
        "decoder_sparse_step": 1,
    },
    "qwen3": {"head_dim": 32},
    "qwen3_5_text": _HYBRID,
    "qwen3_5_moe_text": {**_HYBRID, **_SHARED},
    "qwen3_next": {**_HYBRID, **_SHARED},
    "qwen3_moe": {
        "head_dim": 16,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 48,
        "norm_topk_prob": True,
        "mlp_only_layers": [],
        "decoder_sparse_step": 1,
    },
    "seed_oss": {
        "head_dim": 24,
        "attention_out_bias": True,
        "mlp_bias": True,
        "attention_dropout": 0.0,
        "residual_dropout": 0.0,
    },
    "smollm3": {"no_rope_layer_interval": 2, "use_sliding_window": True, "sliding_window": 8},
}
ARCHITECTURES = sorted(EXTRA)


LOCAL_ONLY = (
    *("deepseek_v3", "exaone4", "gemma2", "gemma3_text", "glm4_moe_lite", "gpt_oss", "granite", "minimax_m2"),
    *("olmo2", "olmo3", "phi3", "qwen3_5_moe_text", "qwen3_5_text", "qwen3_next", "seed_oss", "smollm3"),
)
"""Models whose layers Transformer Engine does not have."""


def tiny_dict(model_type: str, **changes: Any) -> dict[str, Any]:
    """`model.hf_config` of a tiny model."""
    return {"model_type": model_type, **COMMON, **EXTRA[model_type], **changes}


def two_layers(model_type: str) -> dict[str, Any]:
    """Changes of `tiny_dict` for two layers, one of each kind where the architecture has two."""
    changes: dict[str, Any] = {"num_hidden_layers": 2}
    if "linear_num_key_heads" in EXTRA[model_type]:
        changes["full_attention_interval"] = 2
    if model_type == "olmo3":
        changes["layer_types"] = ["sliding_attention", "full_attention"]
    return changes


def tiny_drafting() -> dict[str, Any]:
    """`model.hf_config` of a model with a draft head: one layer with four experts, and the head's layer 1."""
    experts = {"n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1}
    return tiny_dict("glm4_moe", num_hidden_layers=1, first_k_dense_replace=0, **experts)


def tiny_hf(model_type: str, **changes: Any):
    """transformers model with weights large enough that every part of it shows in the logits."""
    from transformers import AutoModelForCausalLM

    from megarl.models.hf import load_hf_config

    config = load_hf_config(ModelConfig(path=None, hf_config=tiny_dict(model_type, **changes)))
    config._attn_implementation = "eager"
    torch.manual_seed(1)
    model = AutoModelForCausalLM.from_config(config).float().eval()
    with torch.no_grad():
        for name, param in model.named_parameters():
            if param.dim() == 1 or name.endswith("_bias"):  # stacked biases have two dimensions
                param.add_(torch.randn_like(param) * (0.1 if "norm" in name else 0.3))
            else:
                param.mul_(3.0)
        for name, buffer in model.named_buffers():
            if name.endswith("e_score_correction_bias"):
                buffer.normal_(0.0, 0.1)
    return model


def save_tiny(folder: Path, model_type: str, **changes: Any):
    """Save a tiny model to `folder` and return it."""
    model = tiny_hf(model_type, **changes)
    model.save_pretrained(folder)
    return model


def build_tiny(
    folder: Path | str,
    dtype: torch.dtype = torch.float32,
    value_head: bool = False,
    vision: bool | None = None,
    **layout: int,
):
    """Load `folder` into Megatron chunks under the parallel state that is set up now."""
    from megarl.models.build import build_policy
    from megarl.models.config import load_hf_config, transformer_config
    from megarl.models.weights import load_weights

    hf = load_hf_config(ModelConfig(path=str(folder), vision=vision))
    config = transformer_config(hf, ParallelConfig(**layout), dtype=dtype, engine=EngineConfig())
    chunks = build_policy(hf, config, value_head=value_head)
    load_weights(chunks, folder)
    return chunks


def single_experts(name: str, stacked: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
    """The tensors of a checkpoint that transformers holds as one parameter."""
    block, _, projection = name.rpartition("experts.")
    if projection not in ("gate_up_proj", "down_proj"):
        yield name, stacked
        return
    parts = ("gate_proj", "up_proj") if projection == "gate_up_proj" else (projection,)
    for expert, matrices in enumerate(stacked):
        for part, matrix in zip(parts, matrices.chunk(len(parts)), strict=True):
            yield f"{block}experts.{expert}.{part}.weight", matrix
