"""Attention while decoding and while prefilling prompts.

Shapes: n rows (one new position each), m prompts of up to P tokens, G key/value heads of this rank, q query heads per
key/value head, D head size, L cached positions.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from types import ModuleType
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from megarl.kernels.gpu import layer_kernels
from megarl.models.layers.attention.cache import KVCache
from megarl.models.layers.attention.capped import capped_attention
from megarl.models.layers.attention.plain import Attention
from megarl.models.layers.attention.scores import Scores
from megarl.models.layers.attention.sinks import sink_key, with_sink_column
from megarl.models.layers.attention.training import varlen_attention
from megarl.models.layers.attention.wide_norm import wide_norm
from megarl.models.layers.mesh import Mesh
from megarl.models.layers.passes import DecodeStep, Pass, Preparation, Prompts, RopeTables
from megarl.models.norm import rms_norm
from megarl.models.packing import pack_stream
from megarl.models.rope import rotate
from megarl.models.soft_cap import capped


@dataclass(frozen=True)
class HeadNorm:
    """The RMS norm of query and key heads; `weights` [2, D] (query, key) is None in models without one.

    The weights may have a wider dtype than the heads.
    """

    weights: Tensor | None
    eps: float

    def split(self, qkv: Tensor, rope: RopeTables) -> tuple[Tensor, Tensor, Tensor]:
        """Return the normed and rotated q [t, G, q, D] and k [t, G, D], and v [t, G, D], from qkv [t, G, q + 2, D]."""
        kernels = layer_kernels(qkv)
        if kernels is not None:
            return self._split_on_gpu(kernels, qkv, rope)
        qk, size, turned = qkv[:, :, :-1], qkv.shape[3], 2 * rope.cos.shape[-1]
        if self.weights is not None:  # norm and weight in one pass, rounded once, as in training
            parts = (qk[:, :, :-1], self.weights[0]), (qk[:, :, -1:], self.weights[1])
            qk = torch.cat([rms_norm(part, weight, self.eps) for part, weight in parts], dim=2)
        cos, sin = rope.wide
        whole, qk = qk, qk[..., :turned]
        swapped = torch.cat((qk[..., turned // 2 :], qk[..., : turned // 2]), dim=-1)
        qk = torch.addcmul(qk * cos, swapped, sin)
        if turned < size:
            qk = torch.cat((qk, whole[..., turned:]), dim=-1)
        return qk[:, :, :-1], qk[:, :, -1], qkv[:, :, -1]

    def _split_on_gpu(self, kernels: ModuleType, qkv: Tensor, rope: RopeTables) -> tuple[Tensor, Tensor, Tensor]:
        """Do the same as `split`, which norms and rotates queries and keys, with the GPU kernels of training."""
        turned = []
        for number, part in enumerate((qkv[:, :, :-2], qkv[:, :, -2:-1])):
            rows = part.contiguous().view(-1, part.shape[-1])
            if self.weights is not None:
                rows = kernels.rms_norm(rows, self.weights[number], self.eps)
            heads = rows.view(len(qkv), -1, part.shape[-1])
            turned.append(rotate(heads, rope.cos, rope.sin, 1.0).view(part.shape))
        return turned[0], turned[1][:, :, 0], qkv[:, :, -1]


class Attend(Protocol):
    """Computes the attention of each layer in one forward pass: it applies norm and RoPE to the queries and keys of the
    new tokens, caches keys and values, and returns the attention's output.
    """

    def __call__(
        self, layer: int, window: int | None, qkv: Tensor, norm: HeadNorm, rope: RopeTables, sinks: Tensor | None
    ) -> Tensor:
        """Attend: qkv [t, G, q + 2, D] -> [t, G*q*D]; `layer` counts this process's layers, `sinks` are float32 [G*q]
        or None."""


class DecodeKernels(Protocol):
    """The kernels of a decode step: `megarl.kernels.cpu.CpuKernels`, or the module `megarl.kernels.decode_gpu`."""

    @property
    def add_norm(self) -> Callable[[Tensor, Tensor | None, Tensor, float], Tensor]:
        """The kernel that adds to the residual stream and norms it, as `megarl.kernels.cpu.add_norm_reference`."""

    @property
    def silu_mul(self) -> Callable[[Tensor], Tensor]:
        """The kernel of the gated product, as `megarl.kernels.cpu.silu_mul_reference`."""

    @property
    def attend(self) -> Callable[..., Tensor]:
        """The kernel of decode attention, as `megarl.kernels.cpu.CpuKernels.attend`."""


class AttentionDecoder:
    """Softmax attention of one layer while decoding; see `MixerDecoder`."""

    def __init__(
        self,
        module: Any,
        mixer: Attention,
        number: int,
        mesh: Mesh,
        prepared: Preparation,
        kernels: DecodeKernels | None,
    ) -> None:
        self._number, self._window, self._kernels, self._gated = number, mixer.window, kernels, mixer.gate
        self._heads = (mixer.groups // mesh.tp.size, -1, mixer.width)
        self._scores = Scores(mixer.factor, cap=mixer.cap)
        self._rope, self._sinks = mixer.rope, None
        if mixer.sinks:
            self._sinks = module.core_attention.softmax_offset.detach().float()
        self._qkv, self._proj = prepared.layer(module.linear_qkv), prepared.layer(module.linear_proj)
        weights = None
        if mixer.qk_norm:
            weights = torch.stack([prepared.norm(n.weight) for n in (module.q_layernorm, module.k_layernorm)])
        self._head_norm = HeadNorm(weights, module.config.layernorm_epsilon)
        self._mesh, self._wide = mesh, None
        if mixer.wide_norm:
            parts = (module.q_layernorm, mixer.heads), (module.k_layernorm, mixer.groups)
            self._wide = [(prepared.cast(part.weight), heads * mixer.width) for part, heads in parts]

    def _normed(self, qkv: Tensor, norms: list[tuple[Tensor, int]]) -> Tensor:
        """Return qkv [n, G, q + 2, D] with queries and keys normalised over the heads of all ranks."""
        parts = qkv.split((qkv.shape[2] - 2, 1, 1), 2)
        wide = [part.to(torch.promote_types(part.dtype, torch.float32)) for part in parts[:2]]
        squares = self._mesh.tp.all_sum(torch.stack([part.square().sum((1, 2, 3)) for part in wide]))
        normed = [
            wide_norm(part.flatten(1, 2), total, weight, width, self._head_norm.eps).to(qkv.dtype).view(like.shape)
            for part, like, total, (weight, width) in zip(wide, parts[:2], squares, norms, strict=True)
        ]
        return torch.cat((*normed, parts[2]), 2)

    def __call__(self, x: Tensor, step: Pass) -> Tensor:
        """Return the layer's output [n, h] of hidden states x [n, h], before the sum over tensor-parallel ranks, and
        cache their keys and values."""
        # Megatron stores the query heads, their gates (if there are any), key and value of a group side by side.
        # Decoding needs this order without the gates.
        qkv = self._qkv(x).view(len(x), *self._heads)
        if self._gated:
            per = (qkv.shape[2] - 2) // 2
            gate, qkv = qkv[:, :, per : 2 * per], torch.cat([qkv[:, :, :per], qkv[:, :, 2 * per :]], 2)
        if self._wide is not None:
            qkv = self._normed(qkv, self._wide)
        attend: Attend | None = step.memo.get(Attention.kind)
        if attend is None:
            attend = step.memo[Attention.kind] = self._attend(step)
        rope = step.other_ropes.get(self._rope, step.rope)
        context = attend(self._number, self._window, qkv, self._head_norm, rope, self._sinks)
        if self._gated:
            context = (context * torch.sigmoid(gate.reshape(context.shape).float())).to(context.dtype)
        return self._proj(context)

    def _attend(self, step: Pass) -> Attend:
        """Return the function with which all layers compute attention in this forward pass."""
        cache: KVCache = step.caches[Attention.kind]
        if isinstance(step, Prompts):
            return PromptAttention(cache, step.lengths, step.rows, self._scores)
        if not isinstance(step, DecodeStep):
            return ExtendAttention(cache, step.lengths, step.starts, step.rows, self._scores)
        if self._kernels is not None:
            return KernelAttention(self._kernels, cache, step.positions, self._scores.scale)
        return DecodeAttention(cache, step.positions, step.length, self._scores)


class KernelAttention:
    """Decode attention of one new token per row at `positions` [n], with a kernel that reads only the cached positions
    of each row up to its new one."""

    def __init__(self, kernels: DecodeKernels, cache: KVCache, positions: Tensor, scale: float) -> None:
        self._kernels, self._cache, self._scale = kernels, cache, scale
        self._positions = positions.contiguous()

    def __call__(
        self, layer: int, window: int | None, qkv: Tensor, norm: HeadNorm, rope: RopeTables, sinks: Tensor | None
    ) -> Tensor:
        """Attend to the cached positions with the kernel: qkv [n, G, q + 2, D] -> [n, G*q*D]; the kernel also caches
        the new keys and values."""
        return self._kernels.attend(
            qkv,
            norm.weights,
            (rope.cos, rope.sin),
            self._cache.keys(layer),
            self._cache.values(layer),
            self._positions,
            window=window,
            scale=self._scale,
            eps=norm.eps,
            sinks=sinks,
        )


class DecodeAttention:
    """Decode attention in torch of one new token per row at `positions` [n], over `length` cached positions."""

    def __init__(self, cache: KVCache, positions: Tensor, length: int, scores: Scores) -> None:
        self._cache, self._positions, self._length, self._scores = cache, positions, length, scores
        self._index = cache.flat_index(positions)
        self._bias: dict[int | None, Tensor] = {}

    def __call__(
        self, layer: int, window: int | None, qkv: Tensor, norm: HeadNorm, rope: RopeTables, sinks: Tensor | None
    ) -> Tensor:
        """Cache the new keys and values, and attend to the cached positions: qkv [n, G, q + 2, D] -> [n, G*q*D]."""
        q, k, v = norm.split(qkv, rope)
        n, groups, per, size = q.shape
        self._cache.append(layer, self._index, k, v)
        keys, values = self._cache.keys(layer)[:n], self._cache.values(layer)[:n]
        if window not in self._bias:
            bias = length_bias(self._positions, self._length, window, q.dtype)
            wide = bias[:, None, None]
            if not self._cache.fixed:
                wide = wide.expand(-1, groups, per, -1).reshape(n * groups, per, -1)
            self._bias[window] = wide
        if self._cache.fixed:
            keys, values = keys[:, :, : self._length], values[:, :, : self._length]
            bias = self._bias[window]
            scores = replace(self._scores, sinks=sinks)
            if sinks is None and scores.cap is None:
                return attend_gpu(q, keys, values, bias, scores.scale).reshape(n, -1)
            out = attend_prompts(q[:, :, :, None], keys, values, bias, scores)
            return out.reshape(n, -1)
        keys, values = (x.view(n * groups, self._length, size) for x in (keys, values))
        queries = q.reshape(n * groups, per, size)
        if sinks is not None:
            sinks = sinks.view(groups, per).repeat(n, 1)[..., None]
        return attend_cpu(queries, keys, values, self._bias[window], replace(self._scores, sinks=sinks)).view(n, -1)


class Padding:
    """The index between a packed stream [t] and its m sequences padded to the longest, [m, P].

    Padding repeats the first token of its sequence: it is finite, and overwritten or masked wherever it is used.

    Attributes:
        real: bool [m, P], True at places with a token of the stream.
    """

    def __init__(self, lengths: Sequence[int], device: torch.device) -> None:
        self.shape = (len(lengths), max(lengths))
        sizes = torch.tensor(lengths)
        place = torch.arange(self.shape[1])
        self.real = place < sizes[:, None]
        start = (sizes.cumsum(0) - sizes)[:, None]
        self._padded = torch.where(self.real, start + place, start).flatten().to(device)
        self._packed = self.real.flatten().nonzero()[:, 0].to(device)

    def pad(self, x: Tensor) -> Tensor:
        """Return packed x [t, ...] as [m, P, ...]."""
        return x[self._padded].view(*self.shape, *x.shape[1:])

    def unpad(self, x: Tensor) -> Tensor:
        """Return x [m, P, ...] without its padding, as packed tokens [t, ...]."""
        return x.reshape(math.prod(self.shape), *x.shape[2:])[self._packed]

    def attend(self, q: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None, scores: Scores) -> Tensor:
        """Return the attention [t, G*q*D] of packed queries q [t, G, q, D], which are padded to the keys' form."""
        out = attend_prompts(self.pad(q).permute(0, 2, 3, 1, 4), keys, values, mask, scores)
        return self.unpad(out.permute(0, 3, 1, 2, 4)).flatten(1)


class PromptAttention:
    """The attention of packed prompts that start at position 0; each prompt's keys and values go to all of its rows.

    Args:
        lengths: tokens of each prompt in the stream.
        rows: cache rows of each prompt.
    """

    def __init__(self, cache: KVCache, lengths: Sequence[int], rows: Sequence[Sequence[int]], scores: Scores) -> None:
        self._cache, self._scores = cache, scores
        device = cache.device
        self._padding = Padding(lengths, device)
        self._stream = pack_stream(lengths, device=device).params
        self._rows = torch.tensor([row for group in rows for row in group], device=device)
        self._source = torch.tensor([i for i, group in enumerate(rows) for _ in group], device=device)

    def __call__(
        self, layer: int, window: int | None, qkv: Tensor, norm: HeadNorm, rope: RopeTables, sinks: Tensor | None
    ) -> Tensor:
        """Attend within each prompt: packed qkv [t, G, q + 2, D] -> [t, G*q*D]; cache the keys and values in
        all rows."""
        q, k, v = norm.split(qkv, rope)
        scores = replace(self._scores, sinks=sinks)
        out = varlen_attention(q.flatten(1, 2), k, v, self._stream, scores, window)
        k, v = (self._padding.pad(x).transpose(1, 2) for x in (k, v))
        self._cache.fill(layer, self._rows, k[self._source], v[self._source])
        if out is not None:
            return out.flatten(1)
        return self._padding.attend(q, k, v, window_mask(k.shape[2], window, q.device), scores)


class NewPlaces:
    """The places of new tokens in caches that already hold the earlier positions of their sequences.

    Attributes:
        padding: the index between the packed and the padded new tokens.
    """

    def __init__(
        self, lengths: Sequence[int], starts: Sequence[int], rows: Sequence[int], device: torch.device
    ) -> None:
        self.padding = Padding(lengths, device)
        sizes, first, real = torch.tensor(lengths), torch.tensor(starts)[:, None], self.padding.real
        positions = torch.where(real, first + torch.arange(real.shape[1]), first)
        self._positions = positions.to(device)
        self._rows = torch.tensor(list(rows), device=device)
        self._token_rows = torch.repeat_interleave(self._rows, sizes.to(device))
        self._token_positions = positions[real].to(device)
        self._reach = int((first[:, 0] + sizes).max())
        self._bias: dict[int | None, Tensor] = {}

    def write(self, cache: Tensor, new: Tensor) -> Tensor:
        """Write `new` [t, G, D] to a cache [rows, G, L, D], and return the cached positions of the sequences, [m, G, L,
        D]."""
        cache[self._token_rows, :, self._token_positions] = new
        return cache[self._rows, :, : self._reach]

    def bias(self, window: int | None, dtype: torch.dtype) -> Tensor:
        """Return the bias [m, 1, P, L] of the scores of padded new tokens: 0 at the last `window` positions up to the
        token's own (None: at all of them), else -inf.
        """
        if window not in self._bias:
            bias = length_bias(self._positions.flatten(), self._reach, window, dtype)
            m, longest = self.padding.shape
            self._bias[window] = bias.view(m, 1, longest, self._reach)
        return self._bias[window]


class ExtendAttention:
    """The attention of packed new tokens of sequences whose earlier positions are cached; see `Extension`."""

    def __init__(
        self, cache: KVCache, lengths: Sequence[int], starts: Sequence[int], rows: Sequence[int], scores: Scores
    ) -> None:
        self._cache, self._scores = cache, scores
        self._places = NewPlaces(lengths, starts, rows, cache.device)

    def __call__(
        self, layer: int, window: int | None, qkv: Tensor, norm: HeadNorm, rope: RopeTables, sinks: Tensor | None
    ) -> Tensor:
        """Cache the new keys and values, and attend to these and the earlier positions: packed qkv [t, G, q + 2, D] ->
        [t, G*q*D]."""
        q, k, v = norm.split(qkv, rope)
        keys = self._places.write(self._cache.keys(layer), k)
        values = self._places.write(self._cache.values(layer), v)
        bias = self._places.bias(window, q.dtype)
        return self._places.padding.attend(q, keys, values, bias, replace(self._scores, sinks=sinks))


def length_bias(positions: Tensor, length: int, window: int | None, dtype: torch.dtype) -> Tensor:
    """Return the bias [n, L]: 0 at the last `window` positions up to the row's own (None: all of them), else -inf."""
    at = torch.arange(length, device=positions.device)
    hidden = at > positions[:, None]
    if window is not None:
        hidden |= at <= positions[:, None] - window
    return torch.zeros(hidden.shape, dtype=dtype, device=positions.device).masked_fill_(hidden, -torch.inf)


def attend_cpu(q: Tensor, keys: Tensor, values: Tensor, bias: Tensor, scores: Scores) -> Tensor:
    """Return the attention of one query position per row, as two batched matmuls: 5 to 12 times faster than SDPA.

    Args:
        q: [n*G, q, D].
        keys, values: [n*G, L, D], contiguous.
        bias: [n*G, q, L].
        scores: scale, cap and sinks of the scores; the sinks are [n*G, q, 1].

    Returns:
        [n*G, q, D].
    """
    if scores.cap is None:
        products = torch.baddbmm(bias, q, keys.transpose(1, 2), alpha=scores.scale)
    else:
        wide = torch.promote_types(q.dtype, torch.float32)  # training also caps scores in at least float32
        products = torch.bmm(q, keys.transpose(1, 2)).to(wide).mul_(scores.scale)
        products = capped(products, scores.cap).add_(bias)
    chances = torch.softmax(products, dim=-1) if scores.sinks is None else with_sink_column(products, scores.sinks)
    return torch.bmm(chances.to(values.dtype), values)


def attend_gpu(q: Tensor, keys: Tensor, values: Tensor, bias: Tensor, scale: float) -> Tensor:
    """Return the result of `attend_cpu`, [n, G, q, D], from SDPA with the query heads of a group as query positions.

    Args:
        q: [n, G, q, D].
        keys, values: [n, G, L, D].
        bias: [n, 1, 1, L].
    """
    return F.scaled_dot_product_attention(q, keys, values, attn_mask=bias.expand(-1, -1, q.shape[2], -1), scale=scale)


def window_mask(length: int, window: int | None, device: torch.device) -> Tensor | None:
    """Return bool [length, length], the positions that each prompt position attends to; None: all earlier ones."""
    if window is None or length <= window:
        return None
    at = torch.arange(length, device=device)
    return (at <= at[:, None]) & (at > at[:, None] - window)


def attend_prompts(q: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None, scores: Scores) -> Tensor:
    """Return the attention over right-padded prompts.

    Args:
        q: [m, G, q, P, D].
        keys, values: [m, G, L, D].
        mask: SDPA mask, broadcast to [m, G*q, P, L]; None: causal, with L = P.

    Returns:
        [m, G, q, P, D]; padding rows have arbitrary finite values.
    """
    if scores.cap is not None:
        given = q.flatten(1, 2), keys, values, mask, scores.scale, scores.cap
        return capped_attention(*given, causal=mask is None).view(q.shape)
    if scores.sinks is not None:
        if mask is None:
            mask = torch.ones(q.shape[3], keys.shape[2], dtype=torch.bool, device=q.device).tril()
        keys, values, mask = sink_key(keys, values, mask, scores.sinks, q.shape[3])
    k, v = (x[:, :, None].expand(-1, -1, q.shape[2], -1, -1).flatten(1, 2) for x in (keys, values))
    causal = mask is None
    out = F.scaled_dot_product_attention(q.flatten(1, 2), k, v, attn_mask=mask, is_causal=causal, scale=scores.scale)
    return out.view(q.shape)
