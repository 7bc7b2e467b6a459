"""Checks of all config.json values that an architecture reads: they are valid, and Megatron computes the same."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megarl.architectures import architecture
from megarl.architectures.base import FULL, SLIDING, Architecture, Refuse
from megarl.architectures.generic import check_generic
from megarl.architectures.values import (
    head_width,
    key_value_heads,
    layer_types,
    layer_windows,
    read_keys,
    rope_scaling,
    rope_tables,
    rotated_width,
    sparse_layers,
    wiring,
)
from megarl.system.errors import ConfigError

# Numbers that each kind of RoPE requires; yarn's factor may be null, and is then a ratio of lengths.
_ROPE_NEEDS = {
    "default": (),
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor"),
    "yarn": ("factor",),
    "longrope": (),
}
_OPTIONAL = {
    "yarn": ("factor", "attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim"),
    "longrope": ("factor", "attention_factor"),
}

_SIZES = (
    "hidden_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "intermediate_size",
    "vocab_size",
    "max_position_embeddings",
    "original_max_position_embeddings",
    "num_experts_per_tok",
    "moe_intermediate_size",
    "decoder_sparse_step",
    "q_lora_rank",
    "kv_lora_rank",
    "qk_nope_head_dim",
    "qk_rope_head_dim",
    "v_head_dim",
    "n_shared_experts",
    "n_group",
    "topk_group",
    "shared_expert_intermediate_size",
    "full_attention_interval",
    "linear_num_key_heads",
    "linear_num_value_heads",
    "linear_key_head_dim",
    "linear_value_head_dim",
    "linear_conv_kernel_dim",
    "no_rope_layer_interval",
)
_FLAGS = (
    *("tie_word_embeddings", "use_sliding_window", "norm_topk_prob", "output_router_logits"),
    *("attention_bias", "qkv_bias", "use_qk_norm", "rope_interleave", "attention_out_bias", "mlp_bias"),
)
# for these keys transformers refuses integers such as 0
_FLOATS = ("rms_norm_eps", "router_aux_loss_coef", "router_jitter_noise")


def check_keys(raw: Mapping[str, Any], source: str) -> dict[str, Any]:
    """Return the values of `read_keys`. Raise ConfigError if one is invalid."""
    known = architecture(raw.get("model_type"), source)
    values = read_keys(raw)

    def refuse(key: str, value: object, allowed: object, what: str | None = None) -> None:
        # the recipe key, or the file and its key
        where = f"{source}.{key}" if source == "model.hf_config" else f"{source}: {key}"
        shown = "null" if value is None else value
        raise ConfigError(what or f"invalid value of {key}", where=where, found=shown, allowed=str(allowed))

    check_generic(raw, refuse)
    value: Any
    for key in _SIZES:
        value = values.get(key)
        left_out = value is None and (key in known.null or key not in raw)
        if key in values and not left_out and not (_whole(value) and value >= 1):
            refuse(key, value, "integer > 0", f"{key} must be a positive integer")
    for key in _FLAGS:
        if key in values and not isinstance(values[key], bool):
            refuse(key, values[key], "true, false")
    for key in _FLOATS:
        if key in values and not (isinstance(values[key], float) and values[key] >= 0):
            refuse(key, values[key], "number >= 0, with a decimal point")
    dropout = values["attention_dropout"]
    if not (_number(dropout) and 0 <= dropout <= 1) and not (dropout is None and "attention_dropout" in known.null):
        refuse("attention_dropout", dropout, "number from 0 to 1")
    read = {"attention_bias": known.attention.qkv_bias, "mlp_bias": wiring(values).mlp_bias}
    for key, expected in read.items():
        if key in values and expected != key and values[key] is not expected:
            refuse(key, values[key], str(expected).lower(), "this variant is not supported")
    if values.get("hidden_act", "silu") not in ("silu", "swish"):  # silu and swish are the same function
        refuse("hidden_act", values["hidden_act"], "silu", "this variant is not supported")
    if raw.get("per_layer_config"):
        refuse("per_layer_config", raw["per_layer_config"], "null", "layers of different sizes are not supported")
    _check_heads(values, known, refuse)
    _check_experts(values, known, refuse)
    _check_windows(raw, values, known, refuse)
    _check_rope(raw, values, known, refuse)
    _check_factors(values, refuse)
    for refusal in known.refusals:
        refusal(raw, values, refuse)
    return values


def _whole(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _check_heads(values: dict[str, Any], found: Architecture, refuse: Refuse) -> None:
    heads, hidden, groups = values["num_attention_heads"], values["hidden_size"], key_value_heads(values)
    if heads % groups:
        refuse("num_key_value_heads", groups, f"a divisor of the {heads} attention heads")
    if found.even_hidden and hidden % heads:
        refuse("hidden_size", hidden, f"a multiple of the {heads} attention heads")
    if head_width(values) % 2 or not head_width(values):
        # RoPE rotates the two halves of a head, so its width must be even. Where transformers rotates only a part of a
        # head, the error must not call the width invalid.
        text = "this variant is not supported" if found.rope.partial else None
        refuse(found.rope.width_key, head_width(values), "even number > 0", text)


def _check_experts(values: dict[str, Any], found: Architecture, refuse: Refuse) -> None:
    if "num_experts" not in values:
        return
    dense, first = values.get("mlp_only_layers"), values.get("first_k_dense_replace", 0)
    if dense is not None and not (isinstance(dense, (list, tuple)) and all(_whole(layer) for layer in dense)):
        refuse("mlp_only_layers", dense, "a list of layer numbers")
    if not _whole(first) or first < 0:
        refuse("first_k_dense_replace", first, "integer >= 0")
    types, layers = values.get("mlp_layer_types"), values["num_hidden_layers"]
    if types is not None and not (isinstance(types, (list, tuple)) and set(types) <= {"dense", "sparse"}):
        refuse("mlp_layer_types", types, "a list of dense and sparse, or null")
    if types is not None and len(types) != layers:
        refuse("mlp_layer_types", len(types), f"one for each of the {layers} layers")
    if not any(sparse_layers({**values, "num_experts": 1})):
        return  # all layers are dense, whatever the numbers of experts are
    experts, chosen = values["num_experts"], values["num_experts_per_tok"]
    least = 0 if found.experts and found.experts.optional else 1
    if not _whole(experts) or experts < least:
        refuse("num_experts", experts, f"integer >= {least}")
    if experts and chosen > experts:
        refuse("num_experts_per_tok", chosen, f"at most the {experts} experts")


def _check_windows(raw: Mapping[str, Any], values: dict[str, Any], known: Architecture, refuse: Refuse) -> None:
    types, count, kinds = raw.get("layer_types"), values["num_hidden_layers"], known.legal_types
    if types is not None and not (isinstance(types, (list, tuple)) and all(kind in kinds for kind in types)):
        refuse("layer_types", types, f"a list of {', '.join(kinds)}", "this variant is not supported")
    if types is not None and len(types) != count:
        refuse("layer_types", len(types), f"one for each of the {count} layers")
    if "max_window_layers" in values and not _whole(values["max_window_layers"]):
        refuse("max_window_layers", values["max_window_layers"], "integer")
    window = values.get("sliding_window")
    if "sliding_window" in values and window is not None and not _whole(window):
        refuse("sliding_window", window, "integer > 0, or null")
    if any(size is not None and size < 1 for size in layer_windows(values)):
        refuse("sliding_window", window, "integer > 0, or null")
    if known.attention.windows == "every_other" and values["use_sliding_window"] and window is None:
        # transformers makes the mask for layers with a window even if no layer has one, and needs the number
        refuse("sliding_window", None, "integer > 0, or use_sliding_window: false")
    wanted = layer_types(values) if known.layer_types else values.get("layer_types") or ()
    if SLIDING in wanted and all(size is None for size in layer_windows(values)):
        refuse(
            "layer_types",
            SLIDING,
            "full_attention, or use_sliding_window: true and a number in sliding_window",
            "the config has layers with a sliding window, but no window size",
        )


def _check_factors(values: dict[str, Any], refuse: Refuse) -> None:
    for key in ("embedding_multiplier", "logits_scaling", "residual_multiplier", "attention_multiplier"):
        if key in values and not (_number(values[key]) and values[key] > 0):
            refuse(key, values[key], "number > 0")
    for key in ("residual_dropout", "resid_pdrop"):
        if key in values and not (_number(values[key]) and 0 <= values[key] <= 1):
            refuse(key, values[key], "number from 0 to 1")


def _check_rope(raw: Mapping[str, Any], values: dict[str, Any], known: Architecture, refuse: Refuse) -> None:
    key = "rope_scaling" if values["rope_scaling"] else "rope_parameters"
    if values[key] is not None and not isinstance(values[key], Mapping):
        refuse(key, values[key], "a mapping, or null")
    if known.rope.local_theta is None:
        return _check_table(raw, values, known, refuse, key, rope_scaling(values))
    sections = values["rope_parameters"]
    names = {FULL, SLIDING}
    if sections is not None and not all(isinstance(sections.get(name, {}), Mapping) for name in names):
        refuse("rope_parameters", sections, "mappings for full_attention and sliding_attention")
    if sections and (sections.keys() - names or (values["rope_scaling"] and "full_attention" not in sections)):
        why = "one section for all layers is not supported"
        refuse("rope_parameters", sorted(sections), "full_attention and sliding_attention", why)
    for table in rope_tables(values).values():
        _check_table(raw, values, known, refuse, key, table)
    return None


def _check_table(
    raw: Mapping[str, Any],
    values: dict[str, Any],
    known: Architecture,
    refuse: Refuse,
    key: str,
    scaling: dict[str, Any],
) -> None:
    kind, theta = scaling["rope_type"], scaling["rope_theta"]
    if kind not in known.rope.types:
        refuse(key, kind, ", ".join(known.rope.types), "this variant is not supported")
    if any(isinstance(value, Mapping) for value in scaling.values()):
        refuse(key, sorted(scaling), "one set of numbers for all layers", "this variant is not supported")
    least = 1 if kind == "yarn" else 0  # yarn divides by the logarithm of theta
    if not _number(theta) or theta <= least:
        refuse("rope_theta", theta, f"number > {least}")
    partial = scaling["partial_rotary_factor"]
    if known.rope.partial and not (partial is None or (_number(partial) and 0 < partial <= 1)):
        refuse("partial_rotary_factor", partial, "number above 0, at most 1")
    if not rotated_width(values):
        allowed = f"a factor that makes one or more of the {head_width(values)} numbers of a head rotate"
        refuse("partial_rotary_factor", partial, allowed, "this variant is not supported")
    if kind == "default":
        return
    beside = "original_max_position_embeddings"
    if kind in ("llama3", "yarn") and beside in raw and raw[beside] is None:
        text = "transformers would use this null, and not the number in RoPE's settings"
        refuse(beside, None, "integer > 0, or no such key", text)
    if partial not in (None, 1) and not known.rope.partial:
        refuse("partial_rotary_factor", partial, "1", "this variant is not supported")
    if not _whole(scaling["original_max_position_embeddings"]) or scaling["original_max_position_embeddings"] < 1:
        refuse(key, scaling, "original_max_position_embeddings: integer > 0")
    if kind == "yarn" and rotated_width(values) % 2:
        allowed = f"for yarn a factor that makes an even number of the {head_width(values)} numbers of a head rotate"
        refuse("partial_rotary_factor", partial, allowed)
    numbers = {name: scaling.get(name) for name in _ROPE_NEEDS[kind]}
    optional = {name for name in _OPTIONAL.get(kind, ()) if name in scaling}
    for name in (*numbers, *optional):
        value: Any = scaling.get(name)
        may_be_null = name in optional
        if not (_number(value) and value > 0) and not (value is None and may_be_null):
            refuse(key, {name: value}, f"{name}: number > 0" + (", or null" if may_be_null else ""))
    if kind == "llama3" and scaling["high_freq_factor"] <= scaling["low_freq_factor"]:
        refuse(key, scaling["high_freq_factor"], f"high_freq_factor above low_freq_factor {scaling['low_freq_factor']}")
