"""Qwen3-Next: three of four layers have a gated delta net, the others softmax attention with an output gate.

Norms store their factor minus 1, except the norm inside the delta net.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megarl.architectures.base import Refuse
from megarl.models.layers.attention.plain import Attention
from megarl.models.layers.gated_delta.plain import gated_delta_of
from megarl.models.layers.mixer import Mixer

LINEAR, FULL = "linear_attention", "full_attention"
KINDS = (FULL, LINEAR)
#: Keys that this family adds; the sizes are those of its configuration classes.
KEYS: dict[str, Any] = {
    "layer_types": None,
    "full_attention_interval": 4,
    "partial_rotary_factor": 0.25,
    "attention_bias": False,
    "head_dim": 256,
    "max_position_embeddings": 32768,
    "num_attention_heads": 16,
    "num_key_value_heads": 2,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
}


def hybrid_mixers(values: Mapping[str, Any]) -> tuple[Mixer, ...]:
    """Return the mixer of each layer: those of `layer_types`, or softmax attention in every
    `full_attention_interval`-th one."""
    interval, count = values["full_attention_interval"], values["num_hidden_layers"]
    types = values["layer_types"] or [LINEAR if (layer + 1) % interval else FULL for layer in range(count)]
    sizes = {"heads": values["num_attention_heads"], "groups": values["num_key_value_heads"]}
    attention = Attention(**sizes, width=values["head_dim"], qk_norm=True, gate=True)
    delta = gated_delta_of(values)
    return tuple(delta if kind == LINEAR else attention for kind in types)


def refuse_odd_heads(raw: Mapping[str, Any], values: Mapping[str, Any], refuse: Refuse) -> None:
    """Refuse value heads that key heads do not divide, and models without the output gate."""
    keys, heads = values["linear_num_key_heads"], values["linear_num_value_heads"]
    if heads % keys:
        refuse("linear_num_value_heads", heads, f"a multiple of the {keys} key heads")
    if raw.get("attn_output_gate", True) is not True:
        refuse("attn_output_gate", raw["attn_output_gate"], "true", "transformers ignores this key")
