"""The description of an architecture: the config keys it reads, how its layers differ, its tensors, its refusals."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from megarl.architectures.draft import DraftForm
from megarl.architectures.served import ServedClass
from megarl.models.layers.attention.plain import AttentionTraits
from megarl.models.layers.experts.plain import MixtureTraits
from megarl.models.layers.mixer import Mixer
from megarl.models.layers.rules import WeightRule
from megarl.models.layers.wiring import LLAMA, Wiring

#: refuse(key, found, allowed, problem) raises a ConfigError that names the key.
Refuse = Callable[..., None]
#: fn(config.json, the values that megarl reads from it, a function `Refuse`)
Refusal = Callable[[Mapping[str, Any], Mapping[str, Any], Refuse], None]


#: The types of layers in `layer_types`.
FULL, SLIDING, LINEAR = "full_attention", "sliding_attention", "linear_attention"


@dataclass(frozen=True)
class RopeTraits:
    """The rotary positions of a class of models."""

    types: tuple[str, ...] = ("default", "linear", "llama3", "yarn")  # the supported kinds of RoPE
    width_key: str = "head_dim"  # the key with the width of the part of a head that RoPE rotates
    # whether RoPE rotates only the share `partial_rotary_factor` of a head, its beginning; other classes ignore the key
    partial: bool = False
    # key and default of the theta of layers with a window, if they have RoPE settings of their own; `rope_parameters`
    # then has one section for each kind of layer. None: all layers have the same settings.
    local_theta: tuple[str, float] | None = None
    # whether each layer rotates queries and keys, from the values of `keys`; None: all layers do
    rotating: Callable[[Mapping[str, Any]], list[bool]] | None = None


@dataclass(frozen=True)
class Architecture:
    """One model class of transformers: its kinds of layers and their rules, and what its config.json means."""

    model_type: str  # the architecture's name in config.json
    # keys of config.json that the class reads and that change the computation, with the defaults of its configuration
    # class. The key `num_experts` stands for both names of the number of experts.
    keys: dict[str, Any]
    null: tuple[str, ...]  # keys that may be null
    tensors: tuple[WeightRule, ...]  # rules of the model's weights, without the head
    attention: AttentionTraits = field(default_factory=AttentionTraits)  # the softmax attention of the class
    rope: RopeTraits = field(default_factory=RopeTraits)
    experts: MixtureTraits | None = None  # the mixtures of experts of the class; None: it has none
    # type of layers whose mixer is not softmax attention -> function from the values of `keys` to the mixer. A class
    # whose `keys` lack `layer_types` has only layers of the type `FULL`.
    mixers: Mapping[str, Callable[[Mapping[str, Any]], Mixer]] = field(default_factory=dict)
    # returns the types of layers for a config without `layer_types`; None: they follow from `max_window_layers`
    layer_types: Callable[[Mapping[str, Any]], list[str]] | None = None
    # differences from Llama outside mixers and experts, from the values of `keys`
    wiring: Callable[[Mapping[str, Any]], Wiring] = lambda values: LLAMA
    fields: tuple[str, ...] = ()  # other fields of the configuration class, which do not change the computation here
    # the configuration class requires hidden_size to be a multiple of the number of heads, even with `head_dim`
    even_hidden: bool = False
    draft: DraftForm | None = None  # the draft head (multi-token prediction) that checkpoints may have
    # keys of an exported config.json that transformers does not write and others read, from the values of `keys`
    written: Callable[[Mapping[str, Any]], dict[str, Any]] | None = None
    served: ServedClass = field(default_factory=ServedClass)  # SGLang's class
    refusals: tuple[Refusal, ...] = ()  # further refusals, one function each

    @property
    def experts_keys(self) -> tuple[str, str] | None:
        """Two names for the number of experts: the field of the configuration class, and the key of older config.json
        files. None: both are `num_experts`, or there are no experts."""
        return None if self.experts is None else self.experts.names

    @property
    def legal_types(self) -> tuple[str, ...]:
        """The types of layers that `layer_types` may have."""
        others = [kind for kind in self.mixers if kind != FULL]
        return (FULL, *others) if others else (FULL, SLIDING)


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
