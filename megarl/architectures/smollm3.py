"""SmolLM3: every fourth layer has no rotary positions; the config may name other layers, windows and biases."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megarl.architectures.base import COMMON, COMMON_NULL, Architecture, Refuse, RopeTraits
from megarl.architectures.tensors import OUTER
from megarl.models.layers.attention.plain import AttentionTraits, attention_rules
from megarl.models.layers.mlp.plain import DENSE
from megarl.models.layers.wiring import Wiring


def rotating(values: Mapping[str, Any]) -> list[bool]:
    """Return whether each layer rotates queries and keys: a 1 in `no_rope_layers` means that it does."""
    given, interval = values["no_rope_layers"], values["no_rope_layer_interval"]
    if given is not None:
        return [bool(rotates) for rotates in given]
    return [(layer + 1) % interval != 0 for layer in range(values["num_hidden_layers"])]


def layer_types(values: Mapping[str, Any]) -> list[str]:
    """Return each layer's default kind. With a sliding window, the layers without rotary positions use it."""
    count = values["num_hidden_layers"]
    windows = values["use_sliding_window"] and values["sliding_window"] is not None
    return ["full_attention" if rotates or not windows else "sliding_attention" for rotates in rotating(values)[:count]]


def refuse_short_lists(raw: Mapping[str, Any], values: Mapping[str, Any], refuse: Refuse) -> None:
    """Refuse lists of layers that do not have an entry for each layer."""
    given, count = values["no_rope_layers"], values["num_hidden_layers"]
    fits = given is None or (isinstance(given, list) and all(entry in (0, 1) for entry in given))
    if not fits or (given is not None and len(given) < count):
        refuse("no_rope_layers", given, f"a list of at least {count} numbers, 0 or 1, or null")


ARCHITECTURE = Architecture(
    model_type="smollm3",
    keys={
        **COMMON,
        "hidden_size": 2048,
        "intermediate_size": 11008,
        "num_hidden_layers": 36,
        "num_attention_heads": 16,
        "num_key_value_heads": 4,
        "vocab_size": 128256,
        "max_position_embeddings": 32768,
        "tie_word_embeddings": True,
        "rope_theta": 2000000.0,
        "use_sliding_window": False,
        "sliding_window": None,
        "no_rope_layers": None,
        "no_rope_layer_interval": 4,
        "layer_types": None,
        "attention_bias": False,
        "mlp_bias": False,
    },
    null=(*COMMON_NULL, "num_key_value_heads", "sliding_window", "layer_types", "no_rope_layers"),
    tensors=OUTER + attention_rules() + DENSE,
    attention=AttentionTraits(windows="chosen", qkv_bias="attention_bias", out_bias="attention_bias"),
    rope=RopeTraits(rotating=rotating),
    wiring=lambda values: Wiring(mlp_bias=values["mlp_bias"]),
    layer_types=layer_types,
    refusals=(refuse_short_lists,),
)
