"""Config keys that transformers reads for every model class, with their valid values for the models here.

No class lists them as fields, so no other check covers them. They were found by recording the look-ups of transformers
5.23 while it loads and runs a model; a test repeats this.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from megarl.architectures.base import Refuse

#: (function that accepts valid values, allowed values, problem of other values)
_Rule = tuple[Callable[[Any], bool], str, str]
_DTYPES = ("float32", "bfloat16", "float16", "float64", "float", "half", "double", "float8_e4m3fn", "float8_e5m2")
_ILLEGAL = "transformers cannot load a model with this value"


def _empty(value: Any) -> bool:
    return value is None or value == {}


def _whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _token(value: Any) -> bool:
    return value is None or _whole(value)


def _tokens(value: Any) -> bool:
    return _token(value) or (isinstance(value, list) and all(map(_whole, value)))


def _names(value: Any) -> bool:
    return value is None or (isinstance(value, list) and all(isinstance(name, str) for name in value))


def _labels(value: Any) -> bool:
    return value is None or (isinstance(value, Mapping) and all(str(key).lstrip("-").isdigit() for key in value))


def _dtype(value: Any) -> bool:
    return value is None or value in _DTYPES if not isinstance(value, (list, dict)) else False


_INSIDE: _Rule = (lambda value: value is None, "null", "transformers would read the model's sizes from this section")
_DTYPE: _Rule = (_dtype, ", ".join(_DTYPES[:4]), _ILLEGAL)

#: Keys that change the model; transformers keeps them as attributes.
MEANINGS: dict[str, _Rule] = {
    "is_causal": (
        lambda value: value is True,
        "true",
        "megarl supports causal attention only",
    ),
    "is_encoder_decoder": (lambda value: value is False, "false", "encoder-decoder models are not supported"),
    **dict.fromkeys(("text_config", "decoder", "generator", "text_encoder"), _INSIDE),
    "pruned_heads": (_empty, "null", "pruned attention heads are not supported"),
    "return_dict": (lambda value: value is True, "true", "transformers cannot run a model without it"),
}
#: Keys that do not change the model, but must have the right type.
_TYPES: dict[str, _Rule] = {
    **dict.fromkeys(("dtype", "torch_dtype"), _DTYPE),
    **dict.fromkeys(("bos_token_id", "pad_token_id"), (_token, "integer, or null", _ILLEGAL)),
    "eos_token_id": (_tokens, "integer, a list of them, or null", _ILLEGAL),
    "architectures": (_names, "a list of names, or null", _ILLEGAL),
    "id2label": (_labels, "a mapping from numbers to names, or null", _ILLEGAL),
    "num_labels": (lambda value: _whole(value) and value > 0, "integer > 0", _ILLEGAL),
    "use_cache": (lambda value: isinstance(value, bool), "true, false", _ILLEGAL),
    "initializer_range": (lambda value: isinstance(value, float), "number, with a decimal point", _ILLEGAL),
    "auto_map": (lambda value: isinstance(value, Mapping), "a mapping, or no such key", _ILLEGAL),
    # Other checks cover mappings that are not empty.
    "quantization_config": (lambda value: value is None or bool(value), "a mapping, or null", _ILLEGAL),
    "per_layer_config": (lambda value: bool(value) or _empty(value), "null", _ILLEGAL),
    "fusion_config": (_empty, "null", "fused layers are not supported"),
    "transformers_weights": (
        lambda value: value is None or (isinstance(value, str) and value.endswith((".safetensors", ".json"))),
        "the name of a .safetensors file or of an index, or null",
        _ILLEGAL,
    ),
    # Properties of transformers' configuration class, which config.json cannot set.
    **dict.fromkeys(
        ("attribute_map", "is_heterogeneous", "per_layer_attributes", "sub_configs", "use_return_dict"),
        (lambda value: False, "no such key", _ILLEGAL),
    ),
}
GENERIC = MEANINGS | _TYPES


def check_generic(raw: Mapping[str, Any], refuse: Refuse) -> None:
    """Refuse values that change the model in an unsupported way, or with which transformers cannot load it."""
    for key, (legal, allowed, wrong) in GENERIC.items():
        if key in raw and not legal(raw[key]):
            refuse(key, raw[key], allowed, wrong)
