"""The values that an architecture reads from a config.json, and the sizes and windows derived from them."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

from megarl.architectures import ARCHITECTURES
from megarl.architectures.base import FULL, SLIDING
from megarl.models.layers.attention.plain import LOCAL_ROPE, ROPE
from megarl.models.layers.experts.plain import Mixture
from megarl.models.layers.mixer import Mixer
from megarl.models.layers.wiring import Wiring
from megarl.system.errors import ConfigError


def read_keys(raw: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values that the architecture of `raw` (a config.json) reads, with its own defaults for absent keys."""
    model_type = raw["model_type"]
    values = {key: raw.get(key, default) for key, default in ARCHITECTURES[model_type].keys.items()}
    values["model_type"] = model_type
    names = ARCHITECTURES[model_type].experts_keys
    if names is not None:
        field, alias = names
        values["num_experts"] = raw.get(alias, raw.get(field, ARCHITECTURES[model_type].keys["num_experts"]))
    return values


def head_width(values: Mapping[str, Any]) -> int:
    """Return the width of one attention head."""
    width: int | None = values[ARCHITECTURES[values["model_type"]].rope.width_key]
    return values["hidden_size"] // values["num_attention_heads"] if width is None else width


def rotated_width(values: Mapping[str, Any]) -> int:
    """Return how many numbers of a head, from its first one on, RoPE rotates."""
    factor = rope_scaling(values)["partial_rotary_factor"]
    partial = ARCHITECTURES[values["model_type"]].rope.partial and factor is not None
    return int(head_width(values) * factor) if partial else head_width(values)


def key_value_heads(values: Mapping[str, Any]) -> int:
    """Return the number of key/value heads."""
    heads: int | None = values["num_key_value_heads"]
    return values["num_attention_heads"] if heads is None else heads


def sparse_layers(values: Mapping[str, Any]) -> list[bool]:
    """Return, for each layer, whether its MLP is a mixture of experts."""
    count, experts = values["num_hidden_layers"], values.get("num_experts", 0)
    if (types := values.get("mlp_layer_types")) is not None:
        return [kind == "sparse" for kind in types]
    first = values.get("first_k_dense_replace", int("mlp_layer_types" in values))
    dense, step = set(values.get("mlp_only_layers") or ()), values.get("decoder_sparse_step", 1)
    return [experts > 0 and layer >= first and layer not in dense and (layer + 1) % step == 0 for layer in range(count)]


def mixture(values: Mapping[str, Any]) -> Mixture | None:
    """Return the settings of the layers with experts, from the keys of config.json; None if no layer has experts."""
    traits = ARCHITECTURES[values["model_type"]].experts
    return traits.describe(values) if traits is not None and any(sparse_layers(values)) else None


def dense_width(values: Mapping[str, Any]) -> int:
    """Return the width of a dense layer's MLP, `intermediate_size`; 0 if the architecture does not read this key."""
    width: int = values.get("intermediate_size", 0)
    return width


def dimensions(values: Mapping[str, Any]) -> dict[str, int]:
    """Return the model's sizes by the names in the tables of tensors (`megarl.architectures.tensors`)."""
    experts = mixture(values)
    sizes = {
        "one": 1,
        "hidden": values["hidden_size"],
        "joint": 2 * values["hidden_size"],
        "vocab": values["vocab_size"],
        "ffn": dense_width(values),
        "experts": experts.router.experts if experts else 0,
        "expert_ffn": experts.width if experts else dense_width(values),
        "expert_gate_up": 2 * experts.width if experts else 0,
        "shared_ffn": experts.shared_width if experts else 0,
        "gate_up": 2 * dense_width(values),
        "mlp_bias": int(wiring(values).mlp_bias),
    }
    for mixer in dict.fromkeys(mixers(values)):
        sizes |= mixer.dimensions()
    return sizes


def mixers(values: Mapping[str, Any]) -> tuple[Mixer, ...]:
    """Return the mixer (attention or another kind) of each layer, from the values of config.json."""
    known = ARCHITECTURES[values["model_type"]]
    types = layer_types(values) if known.mixers and "layer_types" in values else [FULL] * values["num_hidden_layers"]
    others = {kind: describe(values) for kind, describe in known.mixers.items() if kind in types}
    sizes = values["num_attention_heads"], key_value_heads(values), head_width(values)
    attention = known.attention.with_sizes(values, *sizes)
    layers = zip(types, layer_windows(values), _layer_tables(values), strict=True)
    return tuple(others.get(kind) or replace(attention, window=window, rope=rope) for kind, window, rope in layers)


def wiring(values: Mapping[str, Any]) -> Wiring:
    """Return the differences from Llama outside mixers and experts."""
    return ARCHITECTURES[values["model_type"]].wiring(values)


def layer_types(values: Mapping[str, Any]) -> list[str]:
    """Return the kind of each layer, for classes that read `layer_types`."""
    if values["layer_types"] is not None:
        return list(values["layer_types"])
    known = ARCHITECTURES[values["model_type"]]
    if known.layer_types is not None:
        return known.layer_types(values)
    count = values["num_hidden_layers"]
    most = values.get("max_window_layers", count)
    if known.attention.windows == "every_other":
        return [(FULL, SLIDING)[layer < most and layer % 2 == 0] for layer in range(count)]
    return [(FULL, SLIDING)[layer >= most] for layer in range(count)]


def _layer_tables(values: Mapping[str, Any]) -> list[str | None]:
    """Return the name of the RoPE tables of each layer; None: the layer does not rotate queries and keys."""
    known = ARCHITECTURES[values["model_type"]].rope
    if known.local_theta is not None:
        return [LOCAL_ROPE if kind == SLIDING else ROPE for kind in layer_types(values)]
    count = values["num_hidden_layers"]
    rotating = known.rotating(values) if known.rotating else [True] * count
    return [ROPE if rotates else None for rotates in rotating[:count]]


def layer_windows(values: Mapping[str, Any]) -> tuple[int | None, ...]:
    """Return, for each layer, the largest number of keys that a query sees, itself included; None: all before it."""
    count, kind = values["num_hidden_layers"], ARCHITECTURES[values["model_type"]].attention.windows
    window = values.get("sliding_window") if values.get("use_sliding_window", True) else None
    if kind == "none":
        return (None,) * count
    if kind not in ("chosen", "every_other"):
        return (window,) * count
    return tuple(window if name == SLIDING else None for name in layer_types(values))


def wrong_in_sglang(values: Mapping[str, Any]) -> str | None:
    """Return why SGLang computes another model from the same files; None: it computes the same, at least for sequences
    that fit into all windows."""
    served = ARCHITECTURES[values["model_type"]].served
    wrong = served.wrong(values, mixers(values)) if callable(served.wrong) else served.wrong
    if wrong is not None:
        return wrong
    if values["tie_word_embeddings"] and not served.tied:
        return "SGLang's class has a head of its own, which stays random with tied embeddings (tie_word_embeddings)"
    if served.windows and 1 in layer_windows(values):
        return "SGLang expects sliding windows of at least 2 tokens"
    width = values["hidden_size"] // values["num_attention_heads"]
    if not served.head_dim and head_width(values) != width:
        return f"SGLang expects heads of hidden_size / num_attention_heads = {width} numbers, not {head_width(values)}"
    if (rotated := rotated_width(values)) % 2:
        return f"SGLang expects rotary positions of an even number of a head's numbers, not {rotated}"
    for scaling in rope_tables(values).values():
        kind, theta, factor = scaling["rope_type"], scaling["rope_theta"], scaling.get("attention_factor")
        if served.rope_types is not None and kind not in served.rope_types:
            return f"SGLang's class does not compute rotary positions of the kind {kind}"
        if kind == "linear" and not isinstance(scaling["factor"], float):
            return f"SGLang expects a factor of rotary positions with a decimal point, not {scaling['factor']}"
        if served.rope_theta not in (None, theta):
            return f"SGLang expects a rope_theta of {served.rope_theta:g}, not {theta:g}"
        if factor is not None and not math.isclose(factor, _attention_factor_in_sglang(scaling, values)):
            return f"SGLang does not read the attention_factor of rotary positions, which is {factor:g}"
    return None


def _attention_factor_in_sglang(scaling: Mapping[str, Any], values: Mapping[str, Any]) -> float:
    if scaling["rope_type"] != "longrope":
        return 0.1 * math.log(scaling.get("factor") or 1) + 1
    original = scaling["original_max_position_embeddings"]
    times = values["max_position_embeddings"] / original
    return math.sqrt(1 + math.log(times) / math.log(original)) if times > 1 else 1.0


def needs_gpu_in_sglang(values: Mapping[str, Any]) -> bool:
    """Return whether SGLang computes the model on GPUs only."""
    needs = ARCHITECTURES[values["model_type"]].served.needs_gpu
    return needs(values, mixers(values)) if callable(needs) else needs


ONLY_IN_TRAINING = ("attention_dropout", "residual_dropout", "resid_pdrop", "router_jitter_noise")
"""Keys of numbers that transformers applies in training only."""


def only_in_training(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the keys and values that transformers applies in training only and that this trainer does not apply."""
    ignored = {key: values.get(key) for key in ONLY_IN_TRAINING if values.get(key)}
    if values.get("output_router_logits") and values.get("router_aux_loss_coef"):
        ignored["output_router_logits"] = True
    return ignored


def training_problems(ignored: Iterable[tuple[str, object]], source: str) -> list[ConfigError]:
    """Return an error for each entry of `only_in_training`; `source` names the config."""
    return [
        ConfigError(
            "transformers applies this key in training, but megarl does not, so results would differ",
            where=f"{source}: {key}",
            found=value,
            allowed="false" if value is True else "0.0",
            fix=f"set {key} to the allowed value, which does not change what the model computes in inference",
        )
        for key, value in ignored
    ]


def max_positions(values: Mapping[str, Any]) -> int:
    """Return the longest sequence that the model supports.

    Beyond the original length, longrope's frequencies depend on the longest sequence of a whole batch, so that a
    sequence would depend on its neighbours; megarl supports sequences up to this length only.
    """
    scaling, longest = rope_scaling(values), values["max_position_embeddings"]
    if scaling["rope_type"] != "longrope":
        return int(longest)
    return min(longest, scaling["original_max_position_embeddings"])


def rope_tables(values: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Return the settings of each of the model's RoPE tables, by the tables' names; see `rope_scaling`."""
    tables = {ROPE: rope_scaling(values)}
    local = ARCHITECTURES[values["model_type"]].rope.local_theta
    if local is not None:
        key, default = local
        section = dict((values["rope_parameters"] or {}).get("sliding_attention") or {})
        section.setdefault("rope_theta", values.get(key, default))
        tables[LOCAL_ROPE] = _complete(section, values)
    return tables


def rope_scaling(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return RoPE's settings as transformers composes them; with two tables the settings of layers without a window.

    `rope_scaling`, the older name, takes precedence over `rope_parameters`; the kind is in `rope_type`; keys that may
    also be outside the section are included.
    """
    if ARCHITECTURES[values["model_type"]].rope.local_theta is not None:
        section = (values["rope_parameters"] or {}).get("full_attention") or {}
        # in transformers' objects both names hold one section per kind of layer; in a config.json the older name holds
        # the settings themselves
        older = {} if values["rope_scaling"] == values["rope_parameters"] else values["rope_scaling"] or {}
        return _complete({**section, **older}, values)
    default = ARCHITECTURES[values["model_type"]].keys["rope_parameters"]
    return _complete(dict(values["rope_scaling"] or values["rope_parameters"] or default or {}), values)


def _complete(scaling: dict[str, Any], values: Mapping[str, Any]) -> dict[str, Any]:
    """Add the RoPE settings that a config has outside of its RoPE section, and their defaults."""
    scaling.setdefault("rope_type", scaling.get("type", "default"))
    if scaling["rope_type"] == "yarn" and "longrope" in ARCHITECTURES[values["model_type"]].rope.types:
        scaling["rope_type"] = "longrope"  # an older name of this kind, which transformers also accepts
    for key in ("rope_theta", "partial_rotary_factor"):
        scaling.setdefault(key, values[key])
    if values.get("rotary_dim") and scaling["partial_rotary_factor"] is None:
        scaling["partial_rotary_factor"] = values["rotary_dim"] / head_width(values)
    if values["original_max_position_embeddings"] is not None:
        scaling["original_max_position_embeddings"] = values["original_max_position_embeddings"]
    scaling.setdefault("original_max_position_embeddings", values["max_position_embeddings"])
    return scaling
