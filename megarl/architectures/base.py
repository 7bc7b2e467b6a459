"""The description of an architecture: the config keys it reads, how its layers differ, its tensors, its refusals."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from megarl.models.layers.experts.plain import Mixture
from megarl.models.layers.mixer import Mixer
from megarl.models.layers.rules import WeightRule
from megarl.models.layers.wiring import Wiring

#: refuse(key, found, allowed, problem) raises a ConfigError that names the key.
Refuse = Callable[..., None]
#: fn(config.json, the values that are read from it, refuse)
Refusal = Callable[[Mapping[str, Any], Mapping[str, Any], Refuse], None]


@dataclass(frozen=True)
class Architecture:
    """One model class of transformers."""

    model_type: str  # the architecture's name in config.json
    # keys of config.json that the class reads and that change the computation, with the defaults of its configuration
    # class. The key `num_experts` stands for both names of the number of experts.
    keys: dict[str, Any]
    null: tuple[str, ...]  # keys that may be null
    # layers with a sliding window: `none`; `all`, when `sliding_window` is a number; `all_if_used`, when
    # `use_sliding_window` is also set; `chosen`, those of `layer_types`, by default from layer
    # `max_window_layers` on; `every_other`, those of `layer_types`, by default the first, third, ... before that layer
    windows: Literal["none", "all", "all_if_used", "chosen", "every_other"]
    tensors: tuple[WeightRule, ...]  # rules of the model's weights, without the head
    fields: tuple[str, ...] = ()  # other fields of the configuration class, which do not change the computation here
    # the field and the other name of the number of experts. transformers stores both in one attribute; if a config has
    # both, the name that is not a field of the class is set last and wins.
    experts_keys: tuple[str, str] | None = None
    # the mixer of each layer, from the values of `keys`; None: softmax attention in all layers
    mixers: Callable[[Mapping[str, Any]], tuple[Mixer, ...]] | None = None
    head_key: str = "head_dim"  # the key with the width of the part of a head that RoPE rotates
    # checkpoints may have further layers, which predict more than one token ahead; they are not read
    predicts_ahead: bool = False
    # keys of an exported config.json that transformers does not write and others read, from the values of `keys`
    written: Callable[[Mapping[str, Any]], dict[str, Any]] | None = None
    # the mixtures of experts, from the values of `keys`; None: the class has none
    mixture: Callable[[Mapping[str, Any]], Mixture] | None = None
    qkv_bias: bool | str = False  # the projections to query, key and value have a bias; or the key that says so
    qk_norm: bool | str = False  # queries and keys are normalised per head; or the key that says so
    wide_norm: bool = False  # queries and keys are normalised over all heads together
    out_bias: bool | str = False  # the projection of attention's result has a bias; or the key that says so
    mlp_bias: bool | str = False  # the projections of a dense MLP have biases; or the key that says so
    # the factor of attention's scores, from the values of `keys`; None: 1 / sqrt(width of a head)
    scale: Callable[[Mapping[str, Any]], float] | None = None
    # `layer_types` of a config without it; None: by `max_window_layers`
    layer_types: Callable[[Mapping[str, Any]], list[str]] | None = None
    # whether each layer rotates queries and keys; None: all layers do
    rotating: Callable[[Mapping[str, Any]], list[bool]] | None = None
    # layers with a window have RoPE settings of their own; these are their theta, or the key that has it, and its
    # default. `rope_parameters` then has one section for each kind of layer.
    local_theta: tuple[str, float] | None = None
    rope_types: tuple[str, ...] = ("default", "linear", "llama3", "yarn")  # the supported kinds of RoPE
    # why SGLang 0.5.23 computes another model from the same files; None: it computes the same
    wrong_in_sglang: str | None = None
    # differences from Llama outside mixers and experts, from the values of `keys`; None: none but `mlp_bias`
    wiring: Callable[[Mapping[str, Any]], Wiring] | None = None
    # RoPE rotates the first `partial_rotary_factor` of a head; other classes ignore the key
    partial_rotary: bool = False
    zero_centered_norms: bool = False  # the norms of layers, heads and the end store their factor minus 1
    layer_kinds: tuple[str, ...] = ("full_attention", "sliding_attention")  # the values of `layer_types`
    # the configuration class requires hidden_size to be a multiple of the number of heads, even with `head_dim`
    even_hidden: bool = False
    experts_optional: bool = False  # a config without experts is a dense model
    refusals: tuple[Refusal, ...] = ()  # further refusals, one function each


#: RoPE settings that are read although they are not fields of a configuration class.
ROPE_KEYS: dict[str, Any] = {
    "rope_scaling": None,
    "rope_theta": 10000.0,
    "partial_rotary_factor": None,
    "original_max_position_embeddings": None,
}

#: Keys of config.json that every model class reads.
COMMON: dict[str, Any] = {
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
    **ROPE_KEYS,
}
COMMON_NULL = ("rope_parameters", *ROPE_KEYS)

MISTRAL = {**COMMON, "intermediate_size": 14336, "vocab_size": 32000, "max_position_embeddings": 131072}
QWEN = {
    **COMMON,
    "intermediate_size": 22016,
    "vocab_size": 151936,
    "max_position_embeddings": 32768,
    "num_key_value_heads": 32,
    "use_sliding_window": False,
    "sliding_window": 4096,
}
LAYER_WINDOWS = {"max_window_layers": 28, "layer_types": None}
ROUTER = {"output_router_logits": False, "router_aux_loss_coef": 0.001}
