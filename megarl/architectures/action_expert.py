"""Sizes of a flow-matching action expert, the second transformer of pi0: its tokens are a state and a chunk of actions.

    pictures, instruction -> language model -> keys and values of every layer
                                                   |
    state, noisy actions, flow time -> expert: in layer i its tokens attend to these of layer i and to themselves
                                                   |
                                                velocities of the actions

Names of tensors are those of transformers' `PI0ForConditionalGeneration` (Black et al. 2024, "pi0: A Vision-Language-
Action Flow Model for General Robot Control"). Nothing here imports torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from megarl.system.errors import ConfigError

#: The section of a policy's config.json with the sizes of its action expert.
SECTION = "action_expert"
#: The only model type of a language model whose keys and values an action expert can read.
_LANGUAGE_MODEL = "llama"
_SIZES = ("hidden_size", "intermediate_size", "action_dim", "state_dim")
_MIN_PERIOD, _MAX_PERIOD = 4e-3, 4.0  # defaults of the two fields of ExpertShape: the values of pi0
_PERIODS = {"min_period": _MIN_PERIOD, "max_period": _MAX_PERIOD}


@dataclass(frozen=True)
class ExpertShape:
    """The sizes of an action expert. Its layers, heads and RoPE match the language model, whose keys it attends to."""

    width: int  # width of the expert's hidden states
    mlp: int  # width of the hidden layer of its MLPs
    action: int  # length of an action vector, D
    state: int  # length of the robot's state vector
    layers: int
    heads: int
    groups: int  # number of key and value heads
    head: int  # width of a head
    theta: float  # base of RoPE's frequencies
    min_period: float = _MIN_PERIOD  # shortest period of the sinusoids that encode the flow time (0 to 1)
    max_period: float = _MAX_PERIOD  # longest period of these sinusoids

    @property
    def tensors(self) -> dict[str, tuple[str, tuple[int, ...]]]:
        """By parameter name: the name and shape of its tensor in a checkpoint."""
        width, queries, keys = self.width, self.heads * self.head, self.groups * self.head
        shapes: dict[str, tuple[int, ...]] = {}
        for layer in range(self.layers):
            before = f"dit.layers.{layer}."
            for name, size in (("q", queries), ("k", keys), ("v", keys)):
                shapes[f"{before}self_attn.{name}_proj.weight"] = (size, width)
            shapes[f"{before}self_attn.o_proj.weight"] = (width, queries)
            shapes |= {f"{before}mlp.{name}_proj.weight": (self.mlp, width) for name in ("gate", "up")}
            shapes[f"{before}mlp.down_proj.weight"] = (width, self.mlp)
            shapes |= {f"{before}{name}_layernorm.weight": (width,) for name in ("input", "post_attention")}
        shapes["dit.norm.weight"] = (width,)
        maps = {"action_in_proj": self.action, "state_proj": self.state}
        maps |= {"action_time_mlp_in": 2 * width, "action_time_mlp_out": width}
        for name, size in maps.items():
            shapes |= {f"embed_action_time.{name}.weight": (width, size), f"embed_action_time.{name}.bias": (width,)}
        shapes |= {"action_out_proj.weight": (self.action, width), "action_out_proj.bias": (self.action,)}
        return {name: (f"model.{name}" if name.startswith("dit.") else name, shape) for name, shape in shapes.items()}

    @classmethod
    def from_config(cls, config: Mapping[str, Any], where: str) -> ExpertShape | None:
        """Return the sizes of the action expert in `config`, a policy's config.json; None if it has no section
        `action_expert`."""
        section, text = config.get(SECTION), config.get("text_config")
        if section is None:
            return None
        place, known = f"{where}.{SECTION}", (*_SIZES, *_PERIODS)
        if not isinstance(section, Mapping) or sorted(section.keys() - set(known)) or set(_SIZES) - section.keys():
            raise ConfigError(
                "the sizes of the action expert are incomplete or have unknown names",
                where=place,
                found=list(section) if isinstance(section, Mapping) else section,
                allowed=f"{', '.join(_SIZES)}, and optionally min_period and max_period",
            )
        for name in _SIZES:
            _check_size(section[name], f"{place}.{name}")
        if section["hidden_size"] % 2:
            raise ConfigError(
                "the action expert's width must be even: one half encodes the flow time as sines, the other as cosines",
                where=f"{place}.hidden_size",
                found=section["hidden_size"],
                allowed="an even integer",
            )
        width, mlp, action, state = (int(section[name]) for name in _SIZES)
        layers, heads, groups, head, theta = _attention(
            text if isinstance(text, Mapping) else {}, f"{where}.text_config"
        )
        low, high = (float(section.get(name, default)) for name, default in _PERIODS.items())
        shape = cls(width, mlp, action, state, layers, heads, groups, head, theta, low, high)
        if not 0 < shape.min_period < shape.max_period:
            raise ConfigError(
                "invalid periods of the sinusoids that encode the flow time",
                where=f"{place}.min_period",
                found=(shape.min_period, shape.max_period),
                allowed="0 < min_period < max_period",
            )
        return shape


def _attention(text: Mapping[str, Any], where: str) -> tuple[int, int, int, int, float]:
    """Return the language model's number of layers, of heads, and of key/value heads, the head width, and RoPE's base.

    Raise ConfigError at `where` if an action expert cannot read the keys of the language model with config `text`.
    """
    kind = text.get("model_type", _LANGUAGE_MODEL)
    if kind != _LANGUAGE_MODEL:
        raise ConfigError(
            "a policy with an action expert needs a language model with plain attention in every layer",
            where=f"{where}.model_type",
            found=kind,
            allowed=_LANGUAGE_MODEL,
        )
    if not text.get("tie_word_embeddings", False):
        raise ConfigError(
            "a policy with an action expert predicts no tokens, so its language model cannot have an output embedding",
            where=f"{where}.tie_word_embeddings",
            found=text.get("tie_word_embeddings"),
            allowed="true",
            fix="set tie_word_embeddings to true",
        )
    for name in ("num_hidden_layers", "num_attention_heads", "hidden_size"):
        _check_size(text.get(name), f"{where}.{name}")
    heads = text["num_attention_heads"]
    rope = text.get("rope_parameters") or {}
    if rope.get("rope_type", "default") != "default" or text.get("rope_scaling"):
        raise ConfigError(
            "a policy with an action expert needs a language model with default RoPE",
            where=f"{where}.rope_parameters",
            found=rope.get("rope_type") or text.get("rope_scaling"),
            allowed="rope_type: default",
        )
    theta = float(rope.get("rope_theta", text.get("rope_theta", 10000.0)))
    head = text.get("head_dim") or text["hidden_size"] // heads
    return text["num_hidden_layers"], heads, text.get("num_key_value_heads") or heads, head, theta


def _check_size(value: Any, where: str) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ConfigError("this size must be a positive integer", where=where, found=value, allowed="1 or more")
