"""Gemma 3, text: norms before and after attention and MLP, with their factor minus 1 stored; a gate with GELU; scaled
embeddings; five layers with a window and rotary positions of their own to one without.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from megarl.architectures.base import COMMON, COMMON_NULL, Architecture, Refuse, RopeTraits
from megarl.architectures.served import ServedClass
from megarl.architectures.tensors import OUTER
from megarl.architectures.window_pattern import pattern_types, refuse_no_pattern
from megarl.models.layers.attention.plain import AttentionTraits, attention_rules
from megarl.models.layers.mixer import Mixer
from megarl.models.layers.mlp.plain import DENSE
from megarl.models.layers.wiring import Wiring


def wiring(values: Mapping[str, Any]) -> Wiring:
    """Return the places of the norms, the factor of the embeddings, the activation, and the cap of the logits."""
    return Wiring(
        norms="both",
        embedding=values["hidden_size"] ** 0.5,
        embedding_rounded=True,
        logit_cap=values["final_logit_softcapping"],
        activation="gelu_tanh",
        zero_centered=True,
    )


def scale(values: Mapping[str, Any]) -> float:
    """Return the factor of the attention scores."""
    return float(values["query_pre_attn_scalar"] ** -0.5)


def no_head_in_sglang(values: Mapping[str, Any], mixers: Sequence[Mixer]) -> str | None:
    """Return why SGLang would compute logits with another output layer than ours; None if it uses the same."""
    if values["tie_word_embeddings"]:
        return None
    return "SGLang's class loads no head of its own, only the embeddings (tie_word_embeddings: true)"


def refuse_variants(raw: Mapping[str, Any], values: Mapping[str, Any], refuse: Refuse) -> None:
    """Refuse other activations, caps that are not numbers above 0, and bidirectional attention."""
    why = "this variant is not supported"
    if values["hidden_activation"] not in ("gelu_pytorch_tanh", "gelu_tanh"):
        refuse("hidden_activation", values["hidden_activation"], "gelu_pytorch_tanh", why)
    for key in CAPS:
        cap = values.get(key)
        if cap is not None and not (isinstance(cap, float) and cap > 0):  # transformers refuses integers
            refuse(key, cap, "number > 0, with a decimal point, or null")
    if values["use_bidirectional_attention"]:
        refuse("use_bidirectional_attention", values["use_bidirectional_attention"], "false", why)


CAPS = ("final_logit_softcapping", "attn_logit_softcapping")
"""Keys with the soft caps of the logits and of the attention scores."""
GEMMA: dict[str, Any] = {
    **{key: value for key, value in COMMON.items() if key != "hidden_act"},
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_hidden_layers": 26,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "tie_word_embeddings": True,
    "hidden_activation": "gelu_pytorch_tanh",
    "attention_bias": False,
    "query_pre_attn_scalar": 256,
    "sliding_window": 4096,
    "layer_types": None,
    "use_bidirectional_attention": False,
}
"""Keys that Gemma 2 and 3 have, with their defaults."""
GEMMA_NULL = (*COMMON_NULL, "layer_types", "attention_dropout", "use_bidirectional_attention")
"""Keys of both that may be null."""
ARCHITECTURE = Architecture(
    model_type="gemma3_text",
    keys={
        **GEMMA,
        "vocab_size": 262208,
        "max_position_embeddings": 131072,
        "rope_theta": 1000000.0,
        "rope_local_base_freq": 10000.0,
        "sliding_window_pattern": 6,
        "final_logit_softcapping": None,
    },
    null=(*GEMMA_NULL, "final_logit_softcapping"),
    tensors=OUTER + attention_rules(norms="both") + DENSE,
    attention=AttentionTraits(
        windows="chosen", qkv_bias="attention_bias", out_bias="attention_bias", qk_norm=True, scale=scale
    ),
    rope=RopeTraits(local_theta=("rope_local_base_freq", 10000.0)),
    # transformers stores attn_logit_softcapping, but does not apply it
    fields=("attn_logit_softcapping",),
    layer_types=pattern_types,
    wiring=wiring,
    even_hidden=True,
    served=ServedClass(wrong=no_head_in_sglang, windows=True),
    refusals=(refuse_variants, refuse_no_pattern),
)
