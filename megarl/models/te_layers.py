"""The `te` form of a layer: Megatron's Transformer Engine modules. Import only where Transformer Engine is installed.

    residual --[norm + qkv]--> q, k, v --[RoPE]--> [attention over the packed stream] --[proj]--> +
             --[norm + gate, up]--[SwiGLU]--[down]--> +             each bracket is one call of Transformer Engine

Experts are computed as in the `local` form; the modules around them are Transformer Engine's.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from megatron.core.extensions.transformer_engine import TEDotProductAttention, TENorm, fused_apply_rotary_pos_emb_thd
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_with_transformer_engine_spec
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.spec_utils import ModuleSpec
from torch import Tensor
from transformer_engine.pytorch.ops import SwiGLU

from megarl.models.config import PolicyConfig
from megarl.models.layer_forms import parts_of
from megarl.models.layers.attention.training import attend_over_ranks
from megarl.models.packing import PackedSequences

FINAL_NORM = TENorm


def te_layer_spec(config: PolicyConfig, experts: ModuleSpec | None) -> ModuleSpec:
    """Return the spec of one transformer layer; its MLP is dense, or the mixture `experts`."""
    spec = get_gpt_layer_with_transformer_engine_spec(qk_layernorm=config.qk_layernorm)
    parts = spec.submodules
    parts.self_attention.submodules.core_attention = TEPackedAttention
    if experts is None:
        parts_of(parts.mlp).activation_func = FusedSwiGLU
    else:
        parts.mlp, parts.pre_mlp_layernorm = experts, TENorm
        # Megatron's plain layer and dense layers use this checkpoint key for the norm.
        parts.sharded_state_dict_keys_map = {"pre_mlp_layernorm.": "mlp.linear_fc1.layer_norm_"}
    return spec


class FusedSwiGLU(SwiGLU):
    """Transformer Engine's SwiGLU with the interface of Megatron's MLP: built from its config, with a sharded state."""

    def __init__(self, config: PolicyConfig) -> None:
        super().__init__()

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: tuple[Any, ...] = (), metadata: dict[str, Any] | None = None
    ) -> dict[str, Any]:
        """Return an empty dict: SwiGLU has no parameters."""
        return {}


class TEPackedAttention(TEDotProductAttention):
    """Self-attention within each sequence of a packed stream by Transformer Engine, with its RoPE and context
    parallelism.

    Under context parallelism keys and values go round the ranks. `layers.attention` computes what the kernels cannot:
    streams of causal and bidirectional tokens, and sliding windows under context parallelism.
    """

    def __init__(
        self,
        config: PolicyConfig,
        layer_number: int,
        *,
        softmax_scale: float,
        pg_collection: ProcessGroupCollection,
        cp_comm_type: str | None = None,
        **settings: Any,
    ) -> None:
        settings |= {"softmax_scale": softmax_scale, "pg_collection": pg_collection}
        super().__init__(config, layer_number, cp_comm_type=cp_comm_type or "p2p", **settings)
        self.window = config.mixers[layer_number - 1].window if config.mixers else None
        self.scale, self.ranks = softmax_scale, pg_collection.cp

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, *_: object, packed_seq_params: PackedSequences, **__: object
    ) -> Tensor:
        """Apply RoPE and attention: `query` [t, 1, heads, d], `key` and `value` [t, 1, groups, d] -> [t, 1, heads *
        d]."""
        packed = packed_seq_params
        angles, at = packed.cache["angles"], (packed.cp_size, packed.cp_rank)
        q, k = (fused_apply_rotary_pos_emb_thd(x.squeeze(1), packed.cu_seqlens_q, angles, *at) for x in (query, key))
        v = value.squeeze(1)
        window = self.window if self.window and self.window < packed.max_seqlen_q else None
        mixed = any(packed.open_from) or (window is not None and bool(packed.open_from))
        if mixed or (window is not None and packed.cp_size > 1):
            out = attend_over_ranks(q, k, v, packed, self.scale, window, self.ranks)
        else:
            self.window_size = None if window is None else (window - 1, 0)
            mask = AttnMaskType.no_mask if packed.open_from else AttnMaskType.causal
            out = super().forward(q, k, v, None, mask, packed_seq_params=_for_kernels(packed))
        return out.reshape(len(q), 1, -1)


def _for_kernels(packed: PackedSequences) -> PackedSeqParams:
    """Return the stream's layout in Transformer Engine's form, computed once for all layers."""
    if "te" not in packed.cache:
        cu, longest = packed.cu_seqlens_q, packed.max_seqlen_q
        padded = cu if packed.cp_size > 1 else None  # `lengths` include all padding
        packed.cache["te"] = PackedSeqParams("thd", cu, cu, padded, padded, longest, longest)
        # Read from megatron-core 0.19 on. Without it Transformer Engine compares both lengths on the host.
        packed.cache["te"].pad_between_seqs = False
    return packed.cache["te"]


def add_into_main_grad(chunks: Sequence[torch.nn.Module]) -> None:
    """Make Transformer Engine's layers add weight gradients to Megatron's float32 buffers within the matrix product.

    Call it after the chunks have their buffers."""
    for chunk in chunks:
        for module in chunk.modules():
            # Megatron's own switch for this would make its head layer require Apex.
            if hasattr(module, "fuse_wgrad_accumulation"):
                setattr(module, "fuse_wgrad_accumulation", True)  # noqa: B010 (a module of another package)
