"""Multi-head latent attention over a packed stream, in place of Megatron's self-attention.

Shapes: t tokens of this rank, s tokens whose hidden states it holds (t / tp under sequence parallelism, else t), T
tokens of all context-parallel ranks, one rank after the other, H heads of this rank.

    hidden [s, h] --kv down--> latent, rope key [s, rk], [s, dr] --norm, RoPE--> (gathered) [T, ...] --kv up--> k, v
    hidden [s, h] --q down, norm, q up--> q [t, H, dn + dr]

Down projections and norms are whole on every tensor-parallel rank and read the tokens that the rank holds, so that
ranks exchange the narrow latents and not the hidden states. Context parallelism exchanges the latent and the rope key,
before they are expanded to the keys and values of all heads.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from megatron.core.tensor_parallel.mappings import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
)
from megatron.core.transformer.spec_utils import ModuleSpec
from torch import Tensor

from megarl.models.layers.attention.scores import Scores
from megarl.models.layers.attention.training import attend
from megarl.models.layers.linear import ReplicatedLinear
from megarl.models.layers.mixer import Mixer
from megarl.models.layers.mla.plain import MLA
from megarl.models.layers.packed_mixer import PackedMixer
from megarl.models.norm import RMSNorm
from megarl.models.packing import PackedSequences

if TYPE_CHECKING:
    from megarl.models.config import PolicyConfig


class LatentAttention(PackedMixer[MLA]):
    """Causal multi-head latent attention within each sequence of a packed stream."""

    kind = MLA

    def build(self, mixer: MLA, config: PolicyConfig) -> None:
        """Create the parameters, in the order in which they are initialised."""
        hidden, heads = config.hidden_size, mixer.heads
        if mixer.q_rank is None:
            self.linear_q_proj = self.columns(hidden, heads * mixer.key)
        else:
            self.linear_q_down_proj = ReplicatedLinear(hidden, mixer.q_rank, config)
            self.q_layernorm = RMSNorm(config, mixer.q_rank, mixer.eps)
            self.linear_q_up_proj = self.columns(mixer.q_rank, heads * mixer.key)
        self.linear_kv_down_proj = ReplicatedLinear(hidden, mixer.cached, config)
        self.kv_layernorm = RMSNorm(config, mixer.kv_rank, mixer.eps)
        self.linear_kv_up_proj = self.columns(mixer.kv_rank, heads * (mixer.nope + mixer.value))
        self.linear_proj = self.rows(heads * mixer.value, hidden)

    def forward(
        self, hidden: Tensor, attention_mask: Tensor | None = None, *, packed_seq_params: PackedSequences, **_: object
    ) -> tuple[Tensor, None]:
        """Return the output [s, 1, h] of this layer's attention for `hidden` [s, 1, h]."""
        cos, sin = packed_seq_params.cache["rope"]
        q = rotate_end(self._queries(hidden), cos, sin, self.mixer.interleaved)
        k, v = self._keys_and_values(hidden, cos, sin, packed_seq_params.cp_size)

        def context(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return attend(q, k, v, packed_seq_params, Scores(self.mixer.scale), None)

        out = self.recomputed(context, q, k, v)
        return self.linear_proj(out.reshape(len(out), 1, -1))[0], None

    def _queries(self, hidden: Tensor) -> Tensor:
        """Return the queries [t, H, dn + dr] before RoPE."""
        if self.mixer.q_rank is None:
            q = self.linear_q_proj(hidden)[0]
        else:
            q = self.linear_q_up_proj(self.q_layernorm(self.linear_q_down_proj(hidden)[0]))[0]
        return q.view(len(q), -1, self.mixer.key)

    def _keys_and_values(self, hidden: Tensor, cos: Tensor, sin: Tensor, cp: int) -> tuple[Tensor, Tensor]:
        """Return the keys [T, H, dn + dr] after RoPE and the values [T, H, dv] of this rank's heads, for the tokens of
        all `cp` context-parallel ranks."""
        mixer = self.mixer
        latent, rope_key = self.linear_kv_down_proj(hidden)[0].split([mixer.kv_rank, mixer.rope], -1)
        latent = self.kv_layernorm(latent)
        if self.config.sequence_parallel:
            # Each rank's heads give a part of the gradient, which the gather's backward pass sums.
            rope_key = gather_from_sequence_parallel_region(
                rope_key, tensor_parallel_output_grad=True, group=self.groups.tp
            )
        else:
            rope_key = copy_to_tensor_model_parallel_region(rope_key, group=self.groups.tp)
        rope_key = rotate_end(rope_key, cos, sin, mixer.interleaved)
        if cp > 1:
            latent, rope_key = (
                gather_from_sequence_parallel_region(x.contiguous(), group=self.groups.cp) for x in (latent, rope_key)
            )
        expanded = self.linear_kv_up_proj(latent)[0]
        if self.config.sequence_parallel and cp > 1:
            # The tokens are in the order (tp, cp, s), because the projection has gathered them over tp last.
            expanded = expanded.unflatten(0, (-1, cp, len(hidden))).transpose(0, 1).flatten(0, 2)
        nope_key, v = expanded.view(len(expanded), -1, mixer.nope + mixer.value).split([mixer.nope, mixer.value], -1)
        return torch.cat([nope_key, rope_key.expand(-1, nope_key.shape[1], -1)], -1), v


def latent_attention(mixer: Mixer) -> ModuleSpec:
    """Return Megatron's spec of `LatentAttention`, which takes the place of self-attention in a layer."""
    return ModuleSpec(module=LatentAttention)


def rotate_end(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> Tensor:
    """Apply RoPE to the end of each head: `x` [t, heads, d], `cos` and `sin` [t, r] for the last 2 r numbers.

    The result has the two halves after each other, whatever the order of the input: if `interleaved`, the input has the
    pairs (0, 1), (2, 3), ... Queries and keys are in the same order, so their products are those of the pairs.
    """
    return _RotateEnd.apply(x, cos.unsqueeze(-2), sin.unsqueeze(-2), interleaved)


def _pairs(x: Tensor, rotated: int, interleaved: bool) -> tuple[Tensor, Tensor]:
    """Return views of the first and of the second number of each pair that RoPE rotates; the pairs are the last
    2 * `rotated` numbers of `x`."""
    end = x[..., -2 * rotated :]
    return (end[..., ::2], end[..., 1::2]) if interleaved else (end[..., :rotated], end[..., rotated:])


class _RotateEnd(torch.autograd.Function):
    """Copies the input and applies RoPE to its last numbers; the backward pass rotates them by the opposite angle."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> Tensor:
        ctx.save_for_backward(cos, sin)
        ctx.interleaved, rotated, out = interleaved, cos.shape[-1], x.clone()
        (x1, x2), (y1, y2) = _pairs(x, rotated, interleaved), _pairs(out, rotated, False)
        torch.mul(x1, cos, out=y1).addcmul_(x2, sin, value=-1)
        torch.mul(x2, cos, out=y2).addcmul_(x1, sin)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        cos, sin = ctx.saved_tensors
        rotated, dx = cos.shape[-1], grad.clone()
        (g1, g2), (d1, d2) = _pairs(grad, rotated, False), _pairs(dx, rotated, ctx.interleaved)
        torch.mul(g1, cos, out=d1).addcmul_(g2, sin)
        torch.mul(g2, cos, out=d2).addcmul_(g1, sin, value=-1)
        return dx, None, None, None
