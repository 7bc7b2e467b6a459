"""OLMo 2: norms after attention and MLP only; queries and keys are normalised over all heads."""

from __future__ import annotations

from megarl.architectures.base import COMMON, COMMON_NULL, Architecture
from megarl.architectures.served import ServedClass
from megarl.architectures.tensors import OUTER
from megarl.models.layers.attention.plain import AttentionTraits, attention_rules
from megarl.models.layers.mlp.plain import DENSE
from megarl.models.layers.wiring import Wiring

#: Keys of all OLMo models of this form, and those of them that may be null.
OLMO = {
    **COMMON,
    "num_key_value_heads": None,
    "intermediate_size": 11008,
    "vocab_size": 50304,
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-5,
    "attention_bias": False,
}
OLMO_NULL = (*COMMON_NULL, "num_key_value_heads")

ARCHITECTURE = Architecture(
    model_type="olmo2",
    keys=OLMO,
    null=OLMO_NULL,
    tensors=OUTER + attention_rules(norms="after") + DENSE,
    attention=AttentionTraits(qkv_bias="attention_bias", out_bias="attention_bias", wide_norm=True),
    wiring=lambda values: Wiring(norms="after"),
    served=ServedClass(head_dim=False),
)
