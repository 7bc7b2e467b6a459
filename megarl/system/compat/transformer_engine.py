"""Which versions of Transformer Engine work: tested versions, and others that accept the same arguments.

megatron-core 0.16.1 names versions only in its metadata; its code checks a minimum. So a newer version works if
everything that Megatron's layers and megarl call accepts the arguments that they pass.
"""

from __future__ import annotations

import importlib
import inspect
from typing import Any

from packaging.version import Version

SINCE, BELOW = "2.9.0a0", "2.12.0"
"""The range of Transformer Engine versions in the metadata of megatron-core 0.16.1."""

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
    *("max_seqlen_q", "max_seqlen_kv", "attn_mask_type"),
)
#: Module and name of each function of Transformer Engine that megarl calls -> number of positional arguments (with
#: `self`), and the names of keyword arguments.
CALLS: dict[tuple[str, str], tuple[int, tuple[str, ...]]] = {
    ("", "Linear"): (0, ("in_features", "out_features", *_LINEAR, "rng_tracker_name")),
    ("", "Linear.forward"): (2, ("is_first_microbatch",)),
    ("", "LayerNormLinear"): (0, ("in_features", "out_features", "eps", *_LINEAR, "normalization", *_LAYERNORM)),
    ("", "LayerNormLinear.forward"): (2, ("is_first_microbatch",)),
    ("", "RMSNorm"): (0, ("hidden_size", *_NORM)),
    (".ops", "SwiGLU"): (0, ()),
    ("", "DotProductAttention"): (0, _ATTENTION),
    ("", "DotProductAttention.forward"): (5, _PACKED),
    (".attention.rope", "apply_rotary_pos_emb"): (2, ("tensor_format", "fused", "cu_seqlens", "cp_size", "cp_rank")),
    (".optimizers", "FusedAdam"): (1, ("lr", "betas", "eps", "weight_decay")),
    (".distributed", "CudaRNGStatesTracker"): (0, ()),
}


def is_tested(version: str) -> bool:
    """Return whether this version is in the range that megatron-core supports."""
    return Version(SINCE) <= Version(version) < Version(BELOW)


def too_old(version: str) -> bool:
    """Return whether this version is older than the range that megatron-core supports."""
    return Version(version) < Version(SINCE)


def other_arguments() -> list[str]:
    """Return the functions and arguments in `CALLS` that the installed Transformer Engine lacks."""
    missing = []
    for (module, name), (count, keywords) in CALLS.items():
        try:
            called: Any = importlib.import_module(_ROOT + module)
            for part in name.split("."):
                called = getattr(called, part)
            inspect.signature(called).bind(*[None] * count, **dict.fromkeys(keywords))
        except (ImportError, AttributeError) as error:
            missing.append(f"{_ROOT}{module} has no {name} ({error})")
        except TypeError as error:
            missing.append(f"{name}: {error}")
    return missing
