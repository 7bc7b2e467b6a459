"""The `te` form of a layer: Megatron's Transformer Engine modules. Import only where Transformer Engine is installed.

    residual --[norm + qkv]--> q, k, v --[RoPE]--> [attention over the packed stream] --[proj]--> +
             --[norm + gate, up]--[SwiGLU]--[down]--> +             each bracket is one call of Transformer Engine

The rows of all experts are multiplied by Transformer Engine's GroupedLinear, in FP8 where that is on. In bf16, where
torch has one kernel for all experts that leaves row counts on the device, they are computed as in the `local` form.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import torch
from megatron.core.extensions.transformer_engine import TEDotProductAttention, TENorm, fused_apply_rotary_pos_emb_thd
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_with_transformer_engine_spec
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.spec_utils import ModuleSpec
from torch import Tensor
from transformer_engine.pytorch import GroupedLinear as TEGroupedLinear
from transformer_engine.pytorch.ops import SwiGLU

from megarl.models.config import PolicyConfig
from megarl.models.layer_forms import expert_unit, parts_of
from megarl.models.layers.attention.scores import Scores
from megarl.models.layers.attention.training import attend, of_all_ranks
from megarl.models.layers.experts.training import GroupedExperts, GroupedLinear, is_one_kernel
from megarl.models.packing import PackedSequences
from megarl.system.device import device

FINAL_NORM = TENorm


def te_layer_spec(config: PolicyConfig, experts: ModuleSpec | None) -> ModuleSpec:
    """Return the spec of one transformer layer; its MLP is dense, or the mixture `experts`."""
    spec = get_gpt_layer_with_transformer_engine_spec(qk_layernorm=config.qk_layernorm)
    parts = spec.submodules
    parts.self_attention.submodules.core_attention = TEPackedAttention
    if experts is None:
        parts_of(parts.mlp).activation_func = FusedSwiGLU
    else:
        parts_of(experts).experts = ModuleSpec(module=TEExperts)
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


class TEExpertLinear(GroupedLinear):
    """The projection of every expert by Transformer Engine, whose weights are parts of this module's one parameter."""

    def __init__(self, config: PolicyConfig, experts: int, out: int, width: int, split: int) -> None:
        super().__init__(config, experts, out, width, split)
        kernel = TEGroupedLinear(experts, width, out, bias=False, params_dtype=config.params_dtype, device="meta")
        for number in range(experts):
            delattr(kernel, f"weight{number}")
            setattr(kernel, f"bias{number}", torch.empty(0, dtype=config.params_dtype, device=device()))
        self._kernel = (kernel,)  # in a tuple: not a part of this module's state

    def multiply(self, x: Tensor, splits: list[int]) -> Tensor:
        """Multiply each row of `x` [n, in] by its expert's transposed weight: [n, out]; `splits` are rows by expert."""
        (kernel,) = self._kernel
        kernel.train(self.training)
        for number, weight in enumerate(self.stacked.unbind()):
            setattr(kernel, f"weight{number}", weight)
        return kernel(x, splits)


class TEExperts(GroupedExperts):
    """The experts of this process by Transformer Engine's grouped products, which need row counts on the host.

    In FP8 each expert's rows are padded with zeros to the multiple that FP8 products need (`expert_unit`).
    """

    linear = TEExpertLinear

    def forward(self, rows: Tensor, counts: Tensor, probs: Tensor) -> tuple[Tensor, None]:
        """Return the output [n, h] of the experts for rows [n, h] grouped by expert, times each row's probability; and
        None, because the experts have no bias that is added later."""
        linears = (self.linear_fc1, self.linear_fc2)
        if not self.config.fp8 and all(is_one_kernel(linear.stacked, rows.dtype) for linear in linears):
            return super().forward(rows, counts, probs)
        splits, unit = counts.tolist(), expert_unit(self.config)
        total, padded = sum(splits), [-(-count // unit) * unit for count in splits]
        if total == 0:  # the kernels reject zero rows; the base class gives every weight a zero gradient
            return super().forward(rows, counts, probs)
        if padded == splits and total == len(rows):
            return self._multiply(rows, probs, splits), None
        shifts = [a - b for a, b in zip(accumulate(padded, initial=0), accumulate(splits, initial=0), strict=True)]
        places = torch.tensor(shifts[:-1], device=rows.device).repeat_interleave(counts, output_size=total)
        places = places + torch.arange(total, device=rows.device)
        x = rows.new_zeros(sum(padded), rows.shape[1]).index_copy(0, places, rows[:total])
        weights = probs.new_zeros(sum(padded)).index_copy(0, places, probs[:total])
        out = self._multiply(x, weights, padded).index_select(0, places)
        return torch.cat([out, out.new_zeros(len(rows) - total, out.shape[1])]), None

    def _multiply(self, rows: Tensor, probs: Tensor, splits: list[int]) -> Tensor:
        return self.linear_fc2.multiply(self.activation(self.linear_fc1.multiply(rows, splits), probs), splits)


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
        """Rotate queries and keys, and return the attention's output [t, 1, heads * d] with heads of width d. `query`:
        [t, 1, heads, d]; `key` and `value`: [t, 1, groups, d]."""
        packed = packed_seq_params
        angles, at = packed.cache["angles"], (packed.cp_size, packed.cp_rank)
        q, k = (fused_apply_rotary_pos_emb_thd(x.squeeze(1), packed.cu_seqlens_q, angles, *at) for x in (query, key))
        v = value.squeeze(1)
        window = self.window if self.window and self.window < packed.max_seqlen_q else None
        mixed = any(packed.open_from) or (window is not None and bool(packed.open_from))
        if mixed or (window is not None and packed.cp_size > 1):
            out = attend(q, *of_all_ranks(k, v, packed, self.ranks), packed, Scores(self.scale), window)
        else:
            self.window_size = None if window is None else (window - 1, 0)
            mask = AttnMaskType.no_mask if packed.open_from else AttnMaskType.causal
            out = super().forward(q, k, v, None, mask, packed_seq_params=_for_kernels(packed))
        return out.reshape(len(q), 1, -1)


def _for_kernels(packed: PackedSequences) -> PackedSeqParams:
    """Return the stream's layout in Transformer Engine's form, computed once for all layers."""
    if "te" not in packed.cache:
        cu, longest = packed.cu_seqlens_q, packed.max_seqlen_q
        padded = cu if packed.cp_size > 1 else None  # sequences include their padding, so both offsets are equal
        packed.cache["te"] = PackedSeqParams("thd", cu, cu, padded, padded, longest, longest)
        # megatron-core reads this attribute since 0.19. Without it Transformer Engine compares the offsets with and
        # without padding on the host.
        packed.cache["te"].pad_between_seqs = False
    return packed.cache["te"]


def add_into_main_grad(chunks: Sequence[torch.nn.Module]) -> None:
    """Make Transformer Engine's layers add weight gradients to Megatron's float32 buffers within the matrix product.

    Call it after the chunks have their buffers."""
    for chunk in chunks:
        for module in chunk.modules():
            # Set each layer's attribute, because Megatron's switch `gradient_accumulation_fusion` would make its head
            # layer require Apex.
            if hasattr(module, "fuse_wgrad_accumulation"):
                setattr(module, "fuse_wgrad_accumulation", True)  # noqa: B010 (a module of another package)
