"""Gemma 2: the layers of Gemma 3 without norms of queries and keys, a window in every other layer, one kind of rotary
positions, and soft caps of attention scores and logits.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from megarl.architectures.base import FULL, SLIDING, Architecture
from megarl.architectures.gemma3 import CAPS, GEMMA, GEMMA_NULL, no_head_in_sglang, refuse_variants, scale, wiring
from megarl.architectures.served import ServedClass
from megarl.architectures.tensors import OUTER
from megarl.models.layers.attention.plain import Attention, AttentionTraits, attention_rules
from megarl.models.layers.mixer import Mixer
from megarl.models.layers.mlp.plain import DENSE


def layer_types(values: Mapping[str, Any]) -> list[str]:
    """Return the kinds of layers of a config without `layer_types`: sliding and full attention alternate."""
    return [FULL if layer % 2 else SLIDING for layer in range(values["num_hidden_layers"])]


def other_in_sglang(values: Mapping[str, Any], mixers: Sequence[Mixer]) -> str | None:
    """Return why SGLang's layers would differ from the model's; None if they are the same."""
    if any(mixer.cap is None for mixer in mixers if isinstance(mixer, Attention)):
        return "SGLang expects a number in attn_logit_softcapping"
    if any((mixer.window is None) != bool(layer % 2) for layer, mixer in enumerate(mixers)):
        return "SGLang expects windows in the first, third, ... layer, and this model has them in other layers"
    return no_head_in_sglang(values, mixers)


ARCHITECTURE = Architecture(
    model_type="gemma2",
    keys={
        **GEMMA,
        "vocab_size": 256000,
        "max_position_embeddings": 8192,
        "final_logit_softcapping": 30.0,
        "attn_logit_softcapping": 50.0,
    },
    null=(*GEMMA_NULL, *CAPS),
    tensors=OUTER + attention_rules(norms="both") + DENSE,
    attention=AttentionTraits(
        windows="chosen",
        qkv_bias="attention_bias",
        out_bias="attention_bias",
        scale=scale,
        cap="attn_logit_softcapping",
    ),
    layer_types=layer_types,
    wiring=wiring,
    even_hidden=True,
    # SGLang reads the activation under the name that published files also have
    written=lambda values: {"hidden_act": values["hidden_activation"]},
    served=ServedClass(wrong=other_in_sglang, windows=True, rope_types=("default",), needs_gpu=True),
    refusals=(refuse_variants,),
)
