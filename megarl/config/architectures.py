"""What each supported architecture reads of a Hugging Face config: keys, defaults, legal values, derived sizes.

A key that the model class of transformers does not read has no effect here either, whatever it says. Plain data without
torch and transformers, so that a dry run and the workers decide by the same functions: both go through `read_keys`.
Source: the configuration and modelling files of these models in transformers 5.23.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from megarl.errors import ConfigError, close_matches

ROPE_TYPES = ("default", "linear", "llama3", "yarn")
"""Kinds of RoPE scaling that are supported."""

# Numbers that each kind of scaling cannot do without; yarn's factor may be null (a ratio of lengths then).
_ROPE_NEEDS = {
    "default": (),
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor"),
    "yarn": ("factor",),
}
_YARN_NUMBERS = ("factor", "attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim")


@dataclass(frozen=True)
class Architecture:
    """One model class.

    keys: all that it reads and that changes what the model computes, with the defaults of its configuration class.
    null: which of them may be null. windows: which layers see a sliding window: `none`; `all`, when `sliding_window` is
    a number; `all_if_used`, when `use_sliding_window` says so too; `chosen`, those of `layer_types`.
    """

    keys: dict[str, Any]
    null: tuple[str, ...]
    windows: Literal["none", "all", "all_if_used", "chosen"]
    qkv_bias: bool = False
    qk_norm: bool = False
    even_hidden: bool = False
    """Its configuration class wants hidden_size to be a multiple of the heads, `head_dim` or not."""


# Read by every class. `num_experts` stands for both spellings, see `read_keys`.
_COMMON: dict[str, Any] = {
    "hidden_size": 4096,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": None,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
    "attention_dropout": 0.0,
    "rope_parameters": None,
    "rope_scaling": None,
    "rope_theta": 10000.0,
    "partial_rotary_factor": None,
    "original_max_position_embeddings": None,
}
_NULL = ("rope_parameters", "rope_scaling", "rope_theta", "partial_rotary_factor", "original_max_position_embeddings")
_MISTRAL = {**_COMMON, "intermediate_size": 14336, "vocab_size": 32000, "max_position_embeddings": 131072}
_QWEN = {
    **_COMMON,
    "intermediate_size": 22016,
    "vocab_size": 151936,
    "max_position_embeddings": 32768,
    "num_key_value_heads": 32,
    "use_sliding_window": False,
    "sliding_window": 4096,
}
_LAYER_WINDOWS = {"max_window_layers": 28, "layer_types": None}
_ROUTER = {"output_router_logits": False, "router_aux_loss_coef": 0.001}

ARCHITECTURES: dict[str, Architecture] = {
    "llama": Architecture(
        {
            **_COMMON,
            "intermediate_size": 11008,
            "vocab_size": 32000,
            "max_position_embeddings": 2048,
            "num_key_value_heads": None,
            "attention_bias": False,
            "mlp_bias": False,
        },
        (*_NULL, "num_key_value_heads", "head_dim", "attention_dropout"),
        "none",
        even_hidden=True,
    ),
    "mistral": Architecture({**_MISTRAL, "sliding_window": 4096}, (*_NULL, "head_dim", "sliding_window"), "all"),
    "mixtral": Architecture(
        {
            **_MISTRAL,
            **_ROUTER,
            "rms_norm_eps": 1e-5,
            "rope_theta": 1000000.0,
            "sliding_window": None,
            "num_experts": 8,
            "num_experts_per_tok": 2,
            "router_jitter_noise": 0.0,
        },
        (*_NULL, "head_dim", "sliding_window"),
        "all",
    ),
    "qwen2": Architecture(
        {**_QWEN, **_LAYER_WINDOWS},
        (*_NULL, "num_key_value_heads", "sliding_window", "layer_types"),
        "chosen",
        qkv_bias=True,
    ),
    "qwen3": Architecture(
        {**_QWEN, **_LAYER_WINDOWS, "head_dim": 128, "attention_bias": False},
        (*_NULL, "num_key_value_heads", "sliding_window", "layer_types"),
        "chosen",
        qk_norm=True,
    ),
    "qwen3_moe": Architecture(
        {
            **_QWEN,
            **_ROUTER,
            "hidden_size": 2048,
            "num_hidden_layers": 24,
            "num_key_value_heads": 4,
            "intermediate_size": 6144,
            "attention_bias": False,
            "num_experts": 128,
            "num_experts_per_tok": 8,
            "moe_intermediate_size": 768,
            "norm_topk_prob": False,
            "decoder_sparse_step": 1,
            "mlp_only_layers": None,
        },
        (*_NULL, "sliding_window", "mlp_only_layers"),
        "all_if_used",
        qk_norm=True,
    ),
}
# Both names are one attribute in transformers. Where a config has both, the one that is no field of the class is set
# last and wins.
_FIELD_AND_ALIAS = {
    "mixtral": ("num_local_experts", "num_experts"),
    "qwen3_moe": ("num_experts", "num_local_experts"),
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
)
_FLAGS = ("tie_word_embeddings", "use_sliding_window", "norm_topk_prob", "output_router_logits")
_FLOATS = ("rms_norm_eps", "router_aux_loss_coef", "router_jitter_noise")  # transformers takes no 0 for 0.0 here
_KINDS = ("full_attention", "sliding_attention")


def architecture(model_type: object, source: str) -> Architecture:
    """The architecture of that name; `source` names the config in errors. ConfigError when it is not supported."""
    if model_type not in ARCHITECTURES:
        near = close_matches(str(model_type), ARCHITECTURES)
        raise ConfigError(
            "the model's architecture is not supported" if model_type else "the model's config has no model_type",
            where=source,
            found=model_type,
            allowed=sorted(ARCHITECTURES),
            fix=f"did you mean {near[0]}?" if near else None,
        )
    return ARCHITECTURES[str(model_type)]


def read_keys(raw: Mapping[str, Any]) -> dict[str, Any]:
    """What the architecture of `raw` (a config.json) reads of it, with its own defaults for the keys left out."""
    model_type = raw["model_type"]
    values = {key: raw.get(key, default) for key, default in ARCHITECTURES[model_type].keys.items()}
    values["model_type"] = model_type
    if model_type in _FIELD_AND_ALIAS:
        field, alias = _FIELD_AND_ALIAS[model_type]
        values["num_experts"] = raw.get(alias, raw.get(field, ARCHITECTURES[model_type].keys["num_experts"]))
    return values


def head_width(values: Mapping[str, Any]) -> int:
    """Width of one attention head."""
    width: int | None = values["head_dim"]
    return values["hidden_size"] // values["num_attention_heads"] if width is None else width


def key_value_heads(values: Mapping[str, Any]) -> int:
    """Key/value heads."""
    heads: int | None = values["num_key_value_heads"]
    return values["num_attention_heads"] if heads is None else heads


def sparse_layers(values: Mapping[str, Any]) -> list[bool]:
    """For each layer, whether its feed-forward part is a mixture of experts."""
    count, experts = values["num_hidden_layers"], values.get("num_experts", 0)
    dense, step = set(values.get("mlp_only_layers") or ()), values.get("decoder_sparse_step", 1)
    return [experts > 0 and layer not in dense and (layer + 1) % step == 0 for layer in range(count)]


def expert_count(values: Mapping[str, Any]) -> int:
    """Routed experts of a layer that has some; 0 when no layer has."""
    return values["num_experts"] if any(sparse_layers(values)) else 0


def expert_width(values: Mapping[str, Any]) -> int:
    """Width of one expert's feed-forward part; of the dense one where there are no experts."""
    width: int = values.get("moe_intermediate_size", values["intermediate_size"])
    return width if expert_count(values) else values["intermediate_size"]


def layer_windows(values: Mapping[str, Any]) -> tuple[int | None, ...]:
    """Keys that a query of each layer sees at most, itself included; None: all before it."""
    count, kind = values["num_hidden_layers"], ARCHITECTURES[values["model_type"]].windows
    window = values.get("sliding_window") if values.get("use_sliding_window", True) else None
    if kind == "none":
        return (None,) * count
    if kind != "chosen":
        return (window,) * count
    types = values["layer_types"]
    if types is None:
        types = [_KINDS[layer >= values["max_window_layers"]] for layer in range(count)]
    return tuple(window if name == "sliding_attention" else None for name in types)


def only_in_training(values: Mapping[str, Any]) -> dict[str, Any]:
    """Keys that transformers obeys in training only, and that ask for what this trainer does not do."""
    asked = {key: values.get(key) for key in ("attention_dropout", "router_jitter_noise") if values.get(key)}
    if values.get("output_router_logits") and values["router_aux_loss_coef"]:
        asked["output_router_logits"] = True
    return asked


def training_problems(asked: Iterable[tuple[str, object]], source: str) -> list[ConfigError]:
    """An error for each key and value of `only_in_training`; `source` names the config."""
    return [
        ConfigError(
            "transformers obeys this key when it trains, and megarl does not: the training would be another one",
            where=f"{source}: {key}",
            found=value,
            allowed="false" if value is True else "0.0",
            fix="set it to that; what the model computes without training stays the same",
        )
        for key, value in asked
    ]


def check_keys(raw: Mapping[str, Any], source: str) -> dict[str, Any]:
    """`read_keys`, and every value checked.

    Raises:
        ConfigError: an architecture that is not supported, a value that is none or that transformers does not run
            with, or a variant that the Megatron model would compute differently; `source` names the config.
    """
    found = architecture(raw.get("model_type"), source)
    values = read_keys(raw)

    def refuse(key: str, value: object, allowed: object, what: str | None = None) -> None:
        where = f"{source}.{key}" if source == "model.hf_config" else f"{source}: {key}"  # a dotted key, or in a file
        shown = "null" if value is None else value
        raise ConfigError(what or f"{key} has no legal value", where=where, found=shown, allowed=str(allowed))

    value: Any
    for key in _SIZES:
        value = values.get(key)
        left_out = value is None and (key in found.null or key not in raw)
        if key in values and not left_out and not (_whole(value) and value >= 1):
            refuse(key, value, "whole number > 0", f"{key} is not a size")
    for key in _FLAGS:
        if key in values and not isinstance(values[key], bool):
            refuse(key, values[key], "true, false")
    for key in _FLOATS:
        if key in values and not (isinstance(values[key], float) and values[key] >= 0):
            refuse(key, values[key], "number >= 0, with a decimal point")
    dropout = values["attention_dropout"]
    if not (_number(dropout) and 0 <= dropout <= 1) and not (dropout is None and "attention_dropout" in found.null):
        refuse("attention_dropout", dropout, "number from 0 to 1")
    for key in ("attention_bias", "mlp_bias"):
        if key in values and values[key] is not False:
            refuse(key, values[key], "false", "this variant is not supported")
    if values["hidden_act"] not in ("silu", "swish"):  # two names of one function
        refuse("hidden_act", values["hidden_act"], "silu", "this variant is not supported")
    if raw.get("per_layer_config"):
        refuse("per_layer_config", raw["per_layer_config"], "null", "layers of different sizes are not supported")
    _check_heads(values, found, refuse)
    _check_experts(values, refuse)
    _check_windows(raw, values, refuse)
    _check_rope(values, refuse)
    return values


def _whole(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _check_heads(values: dict[str, Any], found: Architecture, refuse: Any) -> None:
    heads, hidden, groups = values["num_attention_heads"], values["hidden_size"], key_value_heads(values)
    if heads % groups:
        refuse("num_key_value_heads", groups, f"a divisor of the {heads} attention heads")
    if found.even_hidden and hidden % heads:
        refuse("hidden_size", hidden, f"a multiple of the {heads} attention heads")
    if head_width(values) % 2 or not head_width(values):
        # RoPE rotates the two halves of a head against each other.
        refuse("head_dim", head_width(values), "even number > 0")


def _check_experts(values: dict[str, Any], refuse: Any) -> None:
    if "num_experts" not in values:
        return
    experts, chosen = values["num_experts"], values["num_experts_per_tok"]
    least = 0 if "mlp_only_layers" in values else 1  # Qwen3-MoE without experts is a dense model
    if not _whole(experts) or experts < least:
        refuse("num_experts", experts, f"whole number >= {least}")
    if experts and chosen > experts:
        refuse("num_experts_per_tok", chosen, f"at most the {experts} experts")
    dense = values.get("mlp_only_layers")
    if dense is not None and not (isinstance(dense, (list, tuple)) and all(_whole(layer) for layer in dense)):
        refuse("mlp_only_layers", dense, "a list of layer numbers")


def _check_windows(raw: Mapping[str, Any], values: dict[str, Any], refuse: Any) -> None:
    types, count = raw.get("layer_types"), values["num_hidden_layers"]
    if values["model_type"] == "mistral" and "layer_types" in raw:
        refuse("layer_types", types, "no such key", "transformers takes a mistral with layer_types for a ministral")
    if types is not None and not (isinstance(types, (list, tuple)) and all(kind in _KINDS for kind in types)):
        refuse("layer_types", types, f"a list of {', '.join(_KINDS)}", "this variant is not supported")
    if types is not None and len(types) != count:
        refuse("layer_types", len(types), f"one for each of the {count} layers")
    if "max_window_layers" in values and not _whole(values["max_window_layers"]):
        refuse("max_window_layers", values["max_window_layers"], "whole number")
    window = values.get("sliding_window")
    if "sliding_window" in values and window is not None and not _whole(window):
        refuse("sliding_window", window, "whole number > 0, or null")
    if any(size is not None and size < 1 for size in layer_windows(values)):
        refuse("sliding_window", window, "whole number > 0, or null")
    wanted = values.get("layer_types") or ()
    if "sliding_attention" in wanted and all(size is None for size in layer_windows(values)):
        refuse(
            "layer_types",
            "sliding_attention",
            "full_attention, or use_sliding_window: true and a number in sliding_window",
            "some layers have a sliding window, and the config gives it no size",
        )


def rope_scaling(values: Mapping[str, Any]) -> dict[str, Any]:
    """RoPE as transformers puts it together: `rope_scaling` (the older name) before `rope_parameters`, with its kind in
    `rope_type` and with the keys that may also stand beside it."""
    scaling = dict(values["rope_scaling"] or values["rope_parameters"] or {})
    scaling.setdefault("rope_type", scaling.get("type", "default"))
    for key in ("rope_theta", "partial_rotary_factor"):
        scaling.setdefault(key, values[key])
    if values["original_max_position_embeddings"] is not None:
        scaling["original_max_position_embeddings"] = values["original_max_position_embeddings"]
    scaling.setdefault("original_max_position_embeddings", values["max_position_embeddings"])
    return scaling


def _check_rope(values: dict[str, Any], refuse: Any) -> None:
    key = "rope_scaling" if values["rope_scaling"] else "rope_parameters"
    if values[key] is not None and not isinstance(values[key], Mapping):
        refuse(key, values[key], "a mapping, or null")
    scaling = rope_scaling(values)
    kind, theta = scaling["rope_type"], scaling["rope_theta"]
    if kind not in ROPE_TYPES:
        refuse(key, kind, ", ".join(ROPE_TYPES), "this variant is not supported")
    if any(isinstance(value, Mapping) for value in scaling.values()):
        refuse(key, sorted(scaling), "one set of numbers for all layers", "this variant is not supported")
    least = 1 if kind == "yarn" else 0  # yarn divides by the logarithm
    if not _number(theta) or theta <= least:
        refuse("rope_theta", theta, f"number > {least}")
    if kind == "default":
        return
    if scaling["partial_rotary_factor"] not in (None, 1):
        refuse("partial_rotary_factor", scaling["partial_rotary_factor"], "1", "this variant is not supported")
    if not _whole(scaling["original_max_position_embeddings"]) or scaling["original_max_position_embeddings"] < 1:
        refuse(key, scaling, "original_max_position_embeddings: whole number > 0")
    numbers = {name: scaling.get(name) for name in _ROPE_NEEDS[kind]}
    optional = {name for name in _YARN_NUMBERS if name in scaling} if kind == "yarn" else set()
    for name in (*numbers, *optional):
        value: Any = scaling.get(name)
        may_be_null = name in optional
        if not (_number(value) and value > 0) and not (value is None and may_be_null):
            refuse(key, {name: value}, f"{name}: number > 0" + (", or null" if may_be_null else ""))
    if kind == "yarn" and values["model_type"] == "mixtral" and values["head_dim"] is None:
        # transformers 5.23 fails there: only this class does not work out its own head_dim.
        refuse("head_dim", None, f"{head_width(values)}, written out: transformers needs it for yarn")
    if kind == "llama3" and scaling["high_freq_factor"] <= scaling["low_freq_factor"]:
        refuse(key, scaling["high_freq_factor"], f"high_freq_factor above low_freq_factor {scaling['low_freq_factor']}")
