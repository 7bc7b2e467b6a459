"""The values that an architecture reads from a config.json, and the sizes and windows derived from them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from megarl.architectures import ARCHITECTURES
from megarl.models.layers.attention.plain import Attention
from megarl.models.layers.experts.plain import Mixture
from megarl.models.layers.mixer import Mixer
from megarl.system.errors import ConfigError

# the first `max_window_layers` layers have full attention, the others a sliding window
_BY_POSITION = ("full_attention", "sliding_attention")


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
    width: int | None = values[ARCHITECTURES[values["model_type"]].head_key]
    return values["hidden_size"] // values["num_attention_heads"] if width is None else width


def rotated_width(values: Mapping[str, Any]) -> int:
    """Return how many numbers of a head, from its first one on, RoPE rotates."""
    factor = rope_scaling(values)["partial_rotary_factor"]
    partial = ARCHITECTURES[values["model_type"]].partial_rotary and factor is not None
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
    """Return the mixture of the layers that have one; None if no layer has experts."""
    described = ARCHITECTURES[values["model_type"]].mixture
    return described(values) if described is not None and any(sparse_layers(values)) else None


def dense_width(values: Mapping[str, Any]) -> int:
    """Return the width of a dense layer's MLP; 0 if the architecture has no dense layers."""
    width: int = values.get("intermediate_size", 0)
    return width


def dimensions(values: Mapping[str, Any]) -> dict[str, int]:
    """Return the sizes that the tables of tensors use (`megarl.architectures.tensors`)."""
    experts = mixture(values)
    sizes = {
        "one": 1,
        "hidden": values["hidden_size"],
        "vocab": values["vocab_size"],
        "ffn": dense_width(values),
        "experts": experts.router.experts if experts else 0,
        "expert_ffn": experts.width if experts else dense_width(values),
        "shared_ffn": experts.shared_width if experts else 0,
    }
    for mixer in dict.fromkeys(mixers(values)):
        sizes |= mixer.dimensions()
    return sizes


def mixers(values: Mapping[str, Any]) -> tuple[Mixer, ...]:
    """Return the mixer of each layer."""
    known = ARCHITECTURES[values["model_type"]]
    if known.mixers is not None:
        return known.mixers(values)
    sizes = values["num_attention_heads"], key_value_heads(values), head_width(values)
    optional = flag(values, known.qk_norm), flag(values, known.qkv_bias)
    wide = known.wide_norm
    return tuple(Attention(window, *sizes, *optional, wide_norm=wide) for window in layer_windows(values))


def flag(values: Mapping[str, Any], given: bool | str) -> bool:
    """Return a property of an architecture that is the same for all its models, or the value of a key."""
    return values[given] if isinstance(given, str) else given


def layer_windows(values: Mapping[str, Any]) -> tuple[int | None, ...]:
    """Return, for each layer, the largest number of keys that a query sees, itself included; None: all before it."""
    count, kind = values["num_hidden_layers"], ARCHITECTURES[values["model_type"]].windows
    window = values.get("sliding_window") if values.get("use_sliding_window", True) else None
    if kind == "none":
        return (None,) * count
    if kind not in ("chosen", "every_other"):
        return (window,) * count
    types = values["layer_types"]
    if types is None:
        most = values.get("max_window_layers", count)
        if kind == "chosen":
            types = [_BY_POSITION[layer >= most] for layer in range(count)]
        else:
            types = [_BY_POSITION[layer < most and layer % 2 == 0] for layer in range(count)]
    return tuple(window if name == "sliding_attention" else None for name in types)


def only_in_training(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the keys and values that transformers applies in training only and that this trainer does not apply."""
    ignored = {key: values.get(key) for key in ("attention_dropout", "router_jitter_noise") if values.get(key)}
    if values.get("output_router_logits") and values["router_aux_loss_coef"]:
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
            fix="set it to this value, which does not change what the model computes in inference",
        )
        for key, value in ignored
    ]


def rope_scaling(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return RoPE's settings as transformers composes them.

    `rope_scaling`, the older name, takes precedence over `rope_parameters`; the kind is in `rope_type`; keys that may
    also be outside the section are included.
    """
    scaling = dict(values["rope_scaling"] or values["rope_parameters"] or {})
    scaling.setdefault("rope_type", scaling.get("type", "default"))
    for key in ("rope_theta", "partial_rotary_factor"):
        scaling.setdefault(key, values[key])
    if values.get("rotary_dim") and scaling["partial_rotary_factor"] is None:
        scaling["partial_rotary_factor"] = values["rotary_dim"] / head_width(values)
    if values["original_max_position_embeddings"] is not None:
        scaling["original_max_position_embeddings"] = values["original_max_position_embeddings"]
    scaling.setdefault("original_max_position_embeddings", values["max_position_embeddings"])
    return scaling
