"""Mistral 7B and its relatives: Llama's layers, all with one sliding window, or all without."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megarl.architectures.base import COMMON_NULL, MISTRAL, Architecture, Refuse
from megarl.architectures.tensors import OUTER
from megarl.models.layers.attention.plain import AttentionTraits, attention_rules
from megarl.models.layers.mlp.plain import DENSE


def _no_layer_types(raw: Mapping[str, Any], values: Mapping[str, Any], refuse: Refuse) -> None:
    if "layer_types" in raw:
        why = "transformers treats a mistral with layer_types as a ministral"
        refuse("layer_types", raw["layer_types"], "no such key", why)


ARCHITECTURE = Architecture(
    model_type="mistral",
    keys={**MISTRAL, "sliding_window": 4096},
    null=(*COMMON_NULL, "head_dim", "sliding_window"),
    tensors=OUTER + attention_rules() + DENSE,
    attention=AttentionTraits(windows="all"),
    refusals=(_no_layer_types,),
)
