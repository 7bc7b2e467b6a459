"""EXAONE 4: norms after attention and MLP only, queries and keys normalised per head, and in larger models three layers
with a window to one without. Where there are windows, layers without one have no rotary positions.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from megarl.architectures.base import COMMON, COMMON_NULL, FULL, SLIDING, Architecture, Refuse, RopeTraits
from megarl.architectures.served import ServedClass
from megarl.architectures.tensors import OUTER
from megarl.architectures.window_pattern import odd_windows, pattern_types, refuse_no_pattern
from megarl.models.layers.attention.plain import Attention, AttentionTraits, attention_rules
from megarl.models.layers.mixer import Mixer
from megarl.models.layers.mlp.plain import DENSE
from megarl.models.layers.wiring import Wiring


def layer_types(values: Mapping[str, Any]) -> list[str]:
    """Return the default kind of each layer."""
    return pattern_types(values) if values["sliding_window"] is not None else [FULL] * values["num_hidden_layers"]


def rotating(values: Mapping[str, Any]) -> list[bool]:
    """Return, for each layer, whether RoPE rotates its queries and keys; without windows it does so in every layer."""
    kinds = values["layer_types"] or layer_types(values)
    return [values["sliding_window"] is None or kind == SLIDING for kind in kinds]


def refuse_unclear_layers(raw: Mapping[str, Any], values: Mapping[str, Any], refuse: Refuse) -> None:
    """Refuse a `sliding_window_pattern` of a wrong type. Also refuse configs with neither windows nor `layer_types`:
    transformers cannot compute the kinds of their layers."""
    pattern = values["sliding_window_pattern"]
    if isinstance(pattern, bool) or not isinstance(pattern, (int, str, type(None))):
        refuse("sliding_window_pattern", pattern, "integer > 0, text, or null")
    if values["layer_types"] is None and values["sliding_window"] is None:
        text = "transformers cannot compute the kinds of layers of a model without windows"
        refuse("layer_types", None, "full_attention for each layer", text)


def pattern_of_layers(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the key from which SGLang reads which layers have a window: an L for each layer before the first without a
    window, then G."""
    kinds = values["layer_types"]
    if SLIDING not in kinds:
        return {"sliding_window_pattern": None}
    return {"sliding_window_pattern": "L" * (kinds.index(FULL) if FULL in kinds else len(kinds)) + "G"}


def other_in_sglang(values: Mapping[str, Any], mixers: Sequence[Mixer]) -> str | None:
    """Return why SGLang's layers would differ from the model's; None if they are the same."""
    windows = any(mixer.window is not None for mixer in mixers)
    if not windows and any(mixer.rope is None for mixer in mixers if isinstance(mixer, Attention)):
        return "SGLang gives rotary positions to all layers of a model without windows, and this model has them in none"
    return odd_windows(mixers)


ARCHITECTURE = Architecture(
    model_type="exaone4",
    keys={
        **COMMON,
        "vocab_size": 102400,
        "num_key_value_heads": 32,
        "intermediate_size": 16384,
        "max_position_embeddings": 2048,
        "rms_norm_eps": 1e-5,
        "sliding_window": 4096,
        "sliding_window_pattern": 4,
        "layer_types": None,
    },
    null=(*COMMON_NULL, "sliding_window", "sliding_window_pattern", "layer_types"),
    tensors=OUTER + attention_rules(norms="after") + DENSE,
    attention=AttentionTraits(windows="chosen", qk_norm=True),
    rope=RopeTraits(rotating=rotating),
    layer_types=layer_types,
    wiring=lambda values: Wiring(norms="after"),
    written=pattern_of_layers,
    # transformers' configuration has no attribute `rope_theta`, for which SGLang then takes its default
    served=ServedClass(wrong=other_in_sglang, windows=True, head_dim=False, rope_theta=1e6, needs_gpu=True),
    refusals=(refuse_unclear_layers, refuse_no_pattern),
)
