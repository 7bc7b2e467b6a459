"""The draft head of a policy (multi-token prediction), for training: one more layer, which predicts the token after the
next one.

    embedding of the next token x(t+1) ---------------- embedding_norm --.
    hidden state h(t) after the policy's final norm --- hidden_norm ----- joint -> layer -> final_norm
                                                                   -> the policy's vocabulary head: logits of x(t+2)

This is the computation of SGLang's draft models (`DeepseekV3ForCausalLMNextN`, `Qwen3_5ForCausalLMMTP` and others).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from megatron.core import tensor_parallel
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.spec_utils import ModuleSpec, build_module
from megatron.core.transformer.transformer_layer import get_transformer_layer_offset
from torch import Tensor

from megarl.models.norm import RMSNorm
from megarl.models.packing import PackedSequences
from megarl.system.device import device

if TYPE_CHECKING:
    from megarl.models.config import PolicyConfig


#: Value of the attribute `shared` of a draft head's parameters; Megatron sets it to True on embeddings that are tied
#: over several stages.
DRAFT = "draft head"


def embed(tokens: Tensor, weight: Tensor, config: PolicyConfig, rank: int) -> Tensor:
    """Return the embeddings [t, 1, h] of tokens int64 [1, t], without autograd; under sequence parallelism those of
    this rank's share of the tokens.

    Args:
        weight: this tensor-parallel rank's rows of the embedding.
        rank: number of the tensor-parallel rank.
    """
    places = tokens - rank * len(weight)
    elsewhere = (places < 0) | (places >= len(weight))
    rows = F.embedding(places.masked_fill(elsewhere, 0), weight).masked_fill(elsewhere[..., None], 0)
    rows = rows.transpose(0, 1).contiguous()
    if config.sequence_parallel:
        return tensor_parallel.reduce_scatter_to_sequence_parallel_region(rows)
    return tensor_parallel.reduce_from_tensor_model_parallel_region(rows)


class DraftHead(MegatronModule):
    """The parameters of a draft head; the policy's embedding and vocabulary head are not among them.

    Args:
        layer: spec of its layer.
        place: number of a layer of the policy, from 0, with the same mixer.
        vp_stage: the last virtual pipeline stage; None without interleaving.
    """

    def __init__(self, config: PolicyConfig, layer: ModuleSpec, place: int, vp_stage: int | None = None) -> None:
        super().__init__(config=config)
        width, eps = config.hidden_size, config.layernorm_epsilon
        self.embedding_norm = RMSNorm(config, width, eps)
        self.hidden_norm = RMSNorm(config, width, eps)
        self.joint = torch.nn.Linear(2 * width, width, bias=False, dtype=config.params_dtype, device=device())
        # All tensor-parallel ranks hold this weight. Under sequence parallelism each has only some of the tokens, so
        # Megatron must sum the weight's gradient over them.
        self.joint.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]
        # Megatron adds the number of layers before this chunk, so it is subtracted here.
        number = place + 1 - get_transformer_layer_offset(config, vp_stage=vp_stage)
        self.layer = build_module(layer, config=config, layer_number=number, vp_stage=vp_stage)
        self.final_norm = RMSNorm(config, width, eps)
        for parameter in self.parameters():
            # Megatron leaves parameters with this mark out of the gradient norm: the policy is clipped as without a
            # draft head, and `megarl.training.optimizer` checks and clips the head's own norm.
            parameter.shared = DRAFT

    def forward(
        self, embedded: Tensor, hidden: Tensor, packed: PackedSequences, padding_mask: Tensor | None = None
    ) -> Tensor:
        """Return the head's hidden states [t, 1, h].

        Args:
            embedded: [t, 1, h], embeddings of the tokens after those of the stream.
            hidden: [t, 1, h], the policy's final hidden states. Under sequence parallelism both have this rank's share.
            packed: the stream, with the RoPE tables that the policy's forward pass put into its cache.
            padding_mask: bool [1, t] for routers that count tokens; None: they do not.
        """
        both = torch.cat([self.embedding_norm(embedded), self.hidden_norm(hidden)], -1)

        def run(states: Tensor) -> Tensor:
            states, _ = self.layer(states, attention_mask=None, packed_seq_params=packed, padding_mask=padding_mask)
            return states

        states = self.joint(both)
        recomputes = self.config.recompute_granularity == "full" and self.training
        return self.final_norm(tensor_parallel.checkpoint(run, False, states) if recomputes else run(states))
