"""Which versions of Transformer Engine work: those whose functions accept what Megatron's layers and megarl pass.

The arguments decide, not the number of the version. tests/models/test_te_double.py compares `CALLS` with the source of
every version since 2.9.
"""

from __future__ import annotations

import importlib
import inspect
from typing import Any

_ROOT = "transformer_engine.pytorch"
_LINEAR = (
    *("sequence_parallel", "fuse_wgrad_accumulation", "tp_group", "tp_size", "get_rng_state_tracker", "init_method"),
    *("bias", "return_bias", "parallel_mode", "params_dtype", "device"),
)
_NORM = ("eps", "sequence_parallel", "zero_centered_gamma", "params_dtype", "device")
_LAYERNORM = ("return_layernorm_output", "zero_centered_gamma")
_ATTENTION = (
    *("num_attention_heads", "kv_channels", "attention_dropout", "attn_mask_type", "sequence_parallel", "tp_size"),
    *("get_rng_state_tracker", "tp_group", "layer_number", "num_gqa_groups", "attention_type", "cp_group"),
    *("cp_global_ranks", "cp_stream", "cp_comm_type", "softmax_scale"),
)
_PACKED = (
    *("qkv_format", "cu_seqlens_q", "cu_seqlens_kv", "cu_seqlens_q_padded", "cu_seqlens_kv_padded"),
    *("max_seqlen_q", "max_seqlen_kv", "attn_mask_type", "pad_between_seqs"),
)
_ROPE = ("tensor_format", "fused", "cu_seqlens", "cp_size", "cp_rank", "interleaved")
#: Module and name of each function of Transformer Engine that Megatron or megarl calls -> number of positional
#: arguments (with `self`), and the names of keyword arguments.
CALLS: dict[tuple[str, str], tuple[int, tuple[str, ...]]] = {
    ("", "Linear"): (0, ("in_features", "out_features", *_LINEAR, "rng_tracker_name")),
    ("", "Linear.forward"): (2, ("is_first_microbatch",)),
    ("", "LayerNormLinear"): (0, ("in_features", "out_features", "eps", *_LINEAR, "normalization", *_LAYERNORM)),
    ("", "LayerNormLinear.forward"): (2, ("is_first_microbatch",)),
    ("", "GroupedLinear"): (3, ("bias", "params_dtype", "device")),
    ("", "GroupedLinear.forward"): (3, ()),
    ("", "RMSNorm"): (0, ("hidden_size", "normalized_shape", *_NORM)),
    (".ops", "SwiGLU"): (0, ()),
    ("", "DotProductAttention"): (0, _ATTENTION),
    ("", "DotProductAttention.forward"): (5, _PACKED),
    (".attention.rope", "apply_rotary_pos_emb"): (2, _ROPE),
    (".optimizers", "FusedAdam"): (1, ("lr", "betas", "eps", "weight_decay")),
    (".distributed", "CudaRNGStatesTracker"): (0, ()),
    (".fp8", "fp8_autocast"): (0, ("enabled", "fp8_recipe", "fp8_group")),
    (".fp8", "fp8_model_init"): (0, ("enabled",)),
}


def other_arguments() -> list[str]:
    """Return what the installed Transformer Engine lacks of `CALLS`, with the names of functions and parameters."""
    missing = []
    for (module, name), (count, keywords) in CALLS.items():
        try:
            called: Any = importlib.import_module(_ROOT + module)
            for part in name.split("."):
                called = getattr(called, part)
        except (ImportError, AttributeError) as error:
            missing.append(f"{_ROOT}{module} has no {name} ({error})")
            continue
        if problem := misfit(inspect.signature(called), count, keywords):
            missing.append(f"{name} {problem}")
    return missing


def misfit(signature: inspect.Signature, count: int, keywords: tuple[str, ...]) -> str | None:
    """Return why a function cannot be called with `count` positional arguments and `keywords`, or None if it can."""
    kinds = [parameter.kind for parameter in signature.parameters.values()]
    unknown = [name for name in keywords if name not in signature.parameters]
    if unknown and inspect.Parameter.VAR_KEYWORD not in kinds:
        return f"has no parameter {', '.join(unknown)}"
    try:
        signature.bind(*[None] * count, **dict.fromkeys(keywords))
    except TypeError as error:
        return f"cannot be called: {error}"
    return None
