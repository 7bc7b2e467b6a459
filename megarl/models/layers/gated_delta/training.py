"""The gated delta net over a packed stream, in place of Megatron's self-attention.

Shapes: t tokens of this rank, s tokens whose hidden states it holds (t / tp under sequence parallelism, else t); G key
heads of this rank, r value heads per key head, dk and dv widths of their heads.

    hidden [s, 1, h] --in_proj--> Q K V z b a [t, ...] --conv--> q, k [t, G, dk], v [t, G, r, dv] --rule-->
    [t, G, r, dv] --norm, silu(z)--> out_proj --> [s, 1, h]

Under context parallelism the convolution and the rule read all tokens of whole sequences, for a part of the G heads
(`megarl.models.layers.gated_delta.exchange`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from megatron.core import parallel_state as mpu
from megatron.core.dist_checkpointing.mapping import ReplicaId, ShardedTensor, ShardedTensorFactory
from megatron.core.tensor_parallel.layers import set_tensor_model_parallel_attributes
from megatron.core.tensor_parallel.mappings import copy_to_tensor_model_parallel_region
from megatron.core.transformer.spec_utils import ModuleSpec
from torch import Tensor

from megarl.models.layers.gated_delta.exchange import Exchange
from megarl.models.layers.gated_delta.plain import GatedDelta
from megarl.models.layers.gated_delta.rule import DeltaInputs, causal_conv, delta_rule, gated_norm, log_decay
from megarl.models.layers.mixer import Mixer
from megarl.models.layers.packed_mixer import PackedMixer
from megarl.models.norm import RMSNorm
from megarl.models.packing import PackedSequences
from megarl.system.device import device

if TYPE_CHECKING:
    from megarl.models.config import PolicyConfig


class GatedDeltaNet(PackedMixer[GatedDelta]):
    """The gated delta net within each sequence of a packed stream."""

    kind = GatedDelta

    def build(self, mixer: GatedDelta, config: PolicyConfig) -> None:
        """Create the parameters, in the order in which they are initialised."""
        tp = self.groups.tp.size()
        self.sections = mixer.sections(tp)
        self.in_proj = self.columns(config.hidden_size, tp * sum(self.sections.values()))
        self.conv1d = _Convolution(mixer.channels(tp), mixer.taps, config.params_dtype)
        self.A_log, self.dt_bias = (_split_parameter(config.params_dtype, self.sections["beta"]) for _ in range(2))
        self.out_norm = RMSNorm(config, mixer.value, config.layernorm_epsilon)
        # `forward` sums the gradient of this weight over ranks, so Megatron must not do so too.
        self.out_norm.weight.sequence_parallel = False  # type: ignore[attr-defined]
        self.out_proj = self.rows(mixer.value_heads * mixer.value, config.hidden_size)

    def forward(
        self, hidden: Tensor, attention_mask: Tensor | None = None, *, packed_seq_params: PackedSequences, **_: object
    ) -> tuple[Tensor, None]:
        """Return the output [s, 1, h] of this layer's mixer for `hidden` [s, 1, h]."""
        projected = self.in_proj(hidden)[0].squeeze(1)
        qkv, z, b, a = split_projection(projected, self.mixer, self.sections)
        taps: Tensor = self.conv1d.weight.squeeze(1)
        a_log: Tensor = self.A_log
        dt_bias: Tensor = self.dt_bias
        exchange = None
        if packed_seq_params.cp_size > 1:
            exchange = Exchange.of(packed_seq_params, self.groups.cp, hidden.device)
            widths = list(self.sections.values())[:3]
            *parts, b, a = exchange.heads_for_tokens([*qkv.split(widths, -1), b, a])
            qkv, taps = torch.cat(parts, -1), exchange.share(taps, widths)
            a_log, dt_bias = (exchange.share(x, [len(x)]) for x in (a_log, dt_bias))

        def outputs(qkv: Tensor, b: Tensor, a: Tensor) -> Tensor:
            lengths, memo = packed_seq_params.lengths, packed_seq_params.cache
            mixed = causal_conv(qkv, taps, lengths, memo)
            inputs = delta_inputs(mixed, b, a, a_log, dt_bias, self.mixer)
            return delta_rule(inputs, lengths, memo)[0].flatten(1)

        out = self.recomputed(outputs, qkv, b, a)
        if exchange is not None:
            out = exchange.tokens_for_heads(out)
        # Each rank has a part of the heads, and so of the gradient of the norm's weight.
        weight = copy_to_tensor_model_parallel_region(self.out_norm.weight, group=self.groups.tp)
        normed = gated_norm(out.view_as(z), z, weight, self.config.layernorm_epsilon)
        return self.out_proj(normed.flatten(1).unsqueeze(1))[0], None

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: tuple[Any, ...] = (), metadata: dict[str, Any] | None = None
    ) -> dict[str, Any]:
        """Return the slices of the whole tensors; each section of the input projection and of the convolution is a
        tensor of its own, because a rank's rows are not contiguous in the whole tensor."""
        state = super().sharded_state_dict(prefix, sharded_offsets, metadata)
        rank, ways, axis = self.groups.tp.rank(), self.groups.tp.size(), len(sharded_offsets)
        replica = (0, 0, mpu.get_data_parallel_rank(with_context_parallel=True))

        def slice_of(key: str, part: Tensor) -> ShardedTensor:
            offsets = (*sharded_offsets, (axis, rank, ways))
            return ShardedTensor.from_rank_offsets(key, part, *offsets, replica_id=replica, prepend_axis_num=axis)

        def build(key: str, weight: Tensor, _: ReplicaId, __: slice | None) -> list[ShardedTensor]:
            names = list(self.sections)[: 3 if "conv1d" in key else None]
            parts = weight.split([self.sections[name] for name in names])
            return [slice_of(f"{key}.{name}", part) for name, part in zip(names, parts, strict=True)]

        for name in ("in_proj.weight", "conv1d.weight"):
            weight = self.get_parameter(name).data
            state[prefix + name] = ShardedTensorFactory(prefix + name, weight, build, torch.cat, replica)
        for name in ("A_log", "dt_bias"):
            state[prefix + name] = slice_of(prefix + name, self.get_parameter(name).data)
        return state


class _Convolution(torch.nn.Module):
    """The weight of a depthwise convolution on this rank's channels, [channels, 1, taps]."""

    def __init__(self, channels: int, taps: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight = _split_parameter(dtype, channels, 1, taps)


def _split_parameter(dtype: torch.dtype, *shape: int) -> torch.nn.Parameter:
    """Return an uninitialised parameter that tensor parallelism splits along its first dimension."""
    parameter = torch.nn.Parameter(torch.empty(shape, dtype=dtype, device=device()))
    set_tensor_model_parallel_attributes(parameter, is_parallel=True, dim=0, stride=1)
    return parameter


def split_projection(
    projected: Tensor, mixer: GatedDelta, sections: dict[str, int]
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the input of the convolution [t, channels], z [t, heads, dv], b and a [t, heads] from the projection."""
    sizes = list(sections.values())
    qkv, z, b, a = projected.split([sum(sizes[:3]), *sizes[3:]], -1)
    return qkv, z.unflatten(-1, (-1, mixer.value)), b, a


def delta_inputs(mixed: Tensor, b: Tensor, a: Tensor, a_log: Tensor, dt_bias: Tensor, mixer: GatedDelta) -> DeltaInputs:
    """Return the inputs of the gated delta rule from the convolution's result [t, channels] (queries, keys and values)
    and the projections `b` (beta) and `a` (decay)."""
    values = b.shape[-1] * mixer.value
    keys = (mixed.shape[-1] - values) // 2
    q, k, v = mixed.split([keys, keys, values], -1)
    g, beta = log_decay(a, a_log, dt_bias), torch.sigmoid(b.to(torch.promote_types(b.dtype, torch.float32)))
    return DeltaInputs(
        q.unflatten(-1, (-1, mixer.key)),
        k.unflatten(-1, (-1, mixer.key)),
        v.unflatten(-1, (-1, mixer.per, mixer.value)),
        *(x.unflatten(-1, (-1, mixer.per)) for x in (g, beta)),
    )


def gated_delta_net(mixer: Mixer) -> ModuleSpec:
    """Return Megatron's spec of `GatedDeltaNet`, which takes the place of self-attention in a layer."""
    return ModuleSpec(module=GatedDeltaNet)
