"""Phi-3 and Phi-4-mini: checkpoints have queries, keys and values as one tensor, gate and up as another.

With longrope, sequences may have `original_max_position_embeddings` tokens: beyond, transformers chooses the
frequencies of a sequence by the longest one of its batch.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megarl.architectures.base import COMMON, COMMON_NULL, Architecture, Refuse, RopeTraits
from megarl.architectures.tensors import OUTER
from megarl.models.layers.attention.plain import AttentionTraits, attention_rules
from megarl.models.layers.mlp.plain import FUSED


def refuse_factors(raw: Mapping[str, Any], values: Mapping[str, Any], refuse: Refuse) -> None:
    """Refuse lists of longrope that do not have one number for each rotated pair of a head."""
    key = "rope_scaling" if values["rope_scaling"] else "rope_parameters"
    scaling = values[key] or {}
    width = values["hidden_size"] // values["num_attention_heads"]
    partial = scaling.get("partial_rotary_factor", values["partial_rotary_factor"])
    count = int(width * (1 if partial is None else partial)) // 2
    needed = scaling.get("rope_type", scaling.get("type", "default")) != "default"
    for name in ("short_factor", "long_factor"):
        given: Any = scaling.get(name)
        numbers = isinstance(given, list) and all(isinstance(number, (int, float)) for number in given)
        if (given is not None or needed) and not (numbers and len(given) == count):
            refuse(key, {name: given}, f"{name}: {count} numbers")


ARCHITECTURE = Architecture(
    model_type="phi3",
    keys={
        **COMMON,
        "hidden_size": 3072,
        "num_key_value_heads": None,
        "intermediate_size": 8192,
        "vocab_size": 32064,
        "max_position_embeddings": 4096,
        "original_max_position_embeddings": 4096,
        "rms_norm_eps": 1e-5,
        "resid_pdrop": 0.0,
        "sliding_window": None,
    },
    null=(*COMMON_NULL, "num_key_value_heads", "sliding_window"),
    tensors=OUTER + attention_rules(fused=True) + FUSED,
    attention=AttentionTraits(windows="all"),
    rope=RopeTraits(partial=True, types=("default", "longrope")),
    fields=("embd_pdrop", "original_max_position_embeddings"),
    refusals=(refuse_factors,),
)
