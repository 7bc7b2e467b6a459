"""Draft heads (multi-token prediction): layers of a checkpoint after the model's own, which predict the token after the
next one from the model's last hidden state and the next token's embedding. Engines use them for speculative decoding.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from megarl.models.layers.mixer import Mixer
from megarl.models.layers.rules import COPY, HF, MCORE, WeightRule, WeightSource

_AFTER = re.compile(r"model\.layers\.(\d+)\.")
_APART = re.compile(r"mtp\.(?:layers\.(\d+)\.)?")


@dataclass(frozen=True)
class DraftForm:
    """Where checkpoints and configs of an architecture have a draft head.

    pattern: matches the beginning of its tensors' names; the group is the number of its layer. follows: layers are
    numbered on from those of the model. keys: keys of config.json with the number of its layers; the first one is
    written. outer, layer: beginnings of the names of tensors outside and inside its only layer, where `{n}` is the
    number of the model's layers. names: the tensors outside the layer, by parameter of `megarl.models.draft_head`.
    """

    pattern: re.Pattern[str]
    follows: bool
    keys: tuple[str, ...]
    outer: str
    layer: str
    names: Mapping[str, str]

    def layers_in(self, raw: Mapping[str, Any]) -> int:
        """Return the number of layers of the draft head that a config.json states; 0 if it has no key for it, as in
        Qwen3-Next."""
        return next((int(raw[key] or 0) for key in self.keys if key in raw), 0)

    def layer_of(self, name: str, layers: int) -> int | None:
        """Return the number of the head's layer to which a tensor belongs, 0 if to none; None: not the head's.

        >>> AFTER_LAYERS.layer_of("model.layers.61.enorm.weight", 61), APART.layer_of("mtp.fc.weight", 48)
        (0, 0)

        Args:
            layers: number of layers of the model.
        """
        match = self.pattern.match(name)
        if match is None:
            return None
        number = int(match[1] or 0) - (layers if self.follows else 0)
        return number if number >= 0 else None

    def rules(self, of_layers: Iterable[WeightRule], parts: tuple[str, ...], layers: int) -> tuple[WeightRule, ...]:
        """Return the rules of the weights of a draft head that has one layer.

        Args:
            of_layers: rules of the model's weights.
            parts: the parts that the head's layer has, such as `layer`, `mla` and `moe`.
            layers: number of layers of the model.
        """
        outer, inner = self.outer.format(n=layers), self.layer.format(n=layers)
        outside = (
            WeightRule(f"draft.{param}.weight", "draft", COPY, (WeightSource(f"{outer}{name}.weight", shape),))
            for (param, name), shape in zip(self.names.items(), _SHAPES, strict=True)
        )
        inside = (
            replace(
                rule,
                param=rule.param.replace(MCORE, "draft.layer."),
                sources=tuple(replace(source, name=source.name.replace(HF, inner)) for source in rule.sources),
            )
            for rule in of_layers
            if rule.part in parts
        )
        return (*outside, *inside)


_PARAMS = ("joint", "embedding_norm", "hidden_norm", "final_norm")
_SHAPES = (("hidden", "joint"), ("hidden",), ("hidden",), ("hidden",))
#: The form of DeepSeek-V3 and GLM: after N layers, the draft head's tensors are named `model.layers.N.*`.
AFTER_LAYERS = DraftForm(
    _AFTER,
    True,
    ("num_nextn_predict_layers", "num_mtp_layers"),
    "model.layers.{n}.",
    "model.layers.{n}.",
    dict(zip(_PARAMS, ("eh_proj", "enorm", "hnorm", "shared_head.norm"), strict=True)),
)
#: The form of Qwen3-Next and Qwen3.5: the draft head's tensors are named `mtp.*`.
APART = DraftForm(
    _APART,
    False,
    ("mtp_num_hidden_layers",),
    "mtp.",
    "mtp.layers.0.",
    dict(zip(_PARAMS, ("fc", "pre_fc_norm_embedding", "pre_fc_norm_hidden", "norm"), strict=True)),
)


def draft_place(mixers: Sequence[Mixer]) -> int:
    """Return the number of the last layer with the mixer of the draft head's layer, which has no recurrent state."""
    return max(place for place, mixer in enumerate(mixers) if not mixer.state_bytes(1, 1))
