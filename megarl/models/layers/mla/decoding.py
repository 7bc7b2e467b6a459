"""Multi-head latent attention while decoding, over a cache of latents and rope keys.

Prompts expand the latents to keys and values, as in training. Later passes read the cache and do not expand it: since
a key's part without position is K_h latent, its product with a query q is (K_h^T q) latent, so each head's query is
brought to the latents' width, every head attends to the same latents, and V_h maps the head's mean latent to its
context. K_h and V_h are the rows of the up projection.

Shapes: n tokens, H heads of this rank, rk latent width, dr width of the rope part, L cached positions.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from megarl.kernels.gpu import layer_kernels
from megarl.models.layers.attention.cache import PositionCache
from megarl.models.layers.attention.decoding import NewPlaces, Padding, attend_cpu, attend_gpu, length_bias
from megarl.models.layers.attention.scores import Scores
from megarl.models.layers.attention.training import bucket_attention, varlen_attention
from megarl.models.layers.mesh import Mesh
from megarl.models.layers.mla.plain import MLA
from megarl.models.layers.mla.training import LatentAttention, rotate_end
from megarl.models.layers.passes import DecodeStep, Pass, Preparation, Prompts, Room
from megarl.models.packing import pack_stream


class LatentCache(PositionCache):
    """The normed latent and the rotated rope key of each position, [rows, 1, L, rk + dr]; whole on every rank."""

    def __init__(self, mixer: MLA, layers: int, room: Room) -> None:
        super().__init__(1, 1, mixer.cached, layers, room)

    @staticmethod
    def bytes_per_row(mixer: MLA, layers: int, max_length: int, tp: int, dtype: torch.dtype) -> int:
        """Return the cache's bytes per sample on this rank, including its share of the spare buffer for resizing."""
        return (layers + 1) * max_length * mixer.cached * dtype.itemsize

    def latents(self, layer: int) -> Tensor:
        """Return a view of the cached latents and rope keys of a layer, [rows, 1, positions, width of both]; the
        contents of rows that are not running are undefined."""
        return self.views(layer)[0]


class LatentDecoder:
    """Latent attention of one layer while decoding; see `MixerDecoder`."""

    def __init__(
        self, module: LatentAttention, mixer: MLA, number: int, mesh: Mesh, prepared: Preparation, kernels: object
    ) -> None:
        self._mixer, self._number = mixer, number
        if mixer.q_rank is None:
            self._q = prepared.layer(module.linear_q_proj)
        else:
            self._q_down, self._q = prepared.layer(module.linear_q_down_proj), prepared.layer(module.linear_q_up_proj)
            self._q_norm = prepared.cast(module.q_layernorm.weight)
        self._kv_down = prepared.layer(module.linear_kv_down_proj)
        self._kv_norm = prepared.cast(module.kv_layernorm.weight)
        self._proj = prepared.layer(module.linear_proj)
        up = prepared.merged(module.linear_kv_up_proj)
        self._expand = prepared.linear(up)
        rows = up.view(-1, mixer.nope + mixer.value, mixer.kv_rank)
        self._keys, self._values = rows.split([mixer.nope, mixer.value], 1)  # K_h and V_h of all heads, [H, width, rk]

    def __call__(self, x: Tensor, step: Pass) -> Tensor:
        """Return the layer's output [n, h] of hidden states x [n, h], before the sum over tensor-parallel ranks, and
        cache their latents and rope keys."""
        mixer, cos, sin = self._mixer, step.rope.cos, step.rope.sin
        q = self._q(x if mixer.q_rank is None else _norm(self._q_down(x), self._q_norm, mixer.eps))
        q = rotate_end(q.view(len(x), -1, mixer.key), cos, sin, mixer.interleaved)
        latent, rope_key = self._kv_down(x).split([mixer.kv_rank, mixer.rope], -1)
        rope_key = rotate_end(rope_key[:, None], cos, sin, mixer.interleaved)[:, 0]
        token = torch.cat([_norm(latent, self._kv_norm, mixer.eps), rope_key], -1)
        attend = step.memo.get(MLA.kind)
        if attend is None:
            attend = step.memo[MLA.kind] = _attention(step, mixer)
        if isinstance(attend, _PromptAttention):
            nope_key, v = (
                self._expand(token[:, : mixer.kv_rank])
                .view(len(x), -1, mixer.nope + mixer.value)
                .split([mixer.nope, mixer.value], -1)
            )
            k = torch.cat([nope_key, token[:, None, mixer.kv_rank :].expand(-1, nope_key.shape[1], -1)], -1)
            return self._proj(attend(self._number, token, q, k, v).flatten(1))
        nope_q, rope_q = q.split([mixer.nope, mixer.rope], -1)
        absorbed = torch.bmm(nope_q.transpose(0, 1), self._keys).transpose(0, 1)
        mean = attend(self._number, token, torch.cat([absorbed, rope_q], -1))  # [n, H, rk]
        context = torch.bmm(mean.transpose(0, 1), self._values.transpose(1, 2))
        return self._proj(context.transpose(0, 1).flatten(1))


def _norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Return the RMS norm of `x` [n, width], with the kernel of training if there is one."""
    kernels = layer_kernels(x, weight)
    if kernels is not None and kernels.fits(x.shape[-1]):
        return kernels.rms_norm(x.contiguous(), weight, eps)
    return F.rms_norm(x, (x.shape[-1],), weight, eps)


def _attention(step: Pass, mixer: MLA) -> Any:
    """Return the function that computes attention for all layers of this forward pass: of prompts, of a decode step, or
    of further tokens."""
    cache: LatentCache = step.caches[MLA.kind]
    if isinstance(step, Prompts):
        return _PromptAttention(cache, step.lengths, step.rows, mixer.scale)
    if isinstance(step, DecodeStep):
        return _StepAttention(cache, step.positions, step.length, mixer)
    return _ExtendAttention(cache, step.lengths, step.starts, step.rows, mixer)


class _PromptAttention:
    """The attention of packed prompts, whose latents are expanded to keys and values. A prompt's latents are cached in
    the rows of all its samples.
    """

    def __init__(self, cache: LatentCache, lengths: Sequence[int], rows: Sequence[Sequence[int]], scale: float) -> None:
        self._cache, self._scale, device = cache, scale, cache.device
        self._padding = Padding(lengths, device)
        self._stream = pack_stream(lengths, device=device).params
        self._rows = torch.tensor([row for group in rows for row in group], device=device)
        self._source = torch.tensor([i for i, group in enumerate(rows) for _ in group], device=device)

    def __call__(self, layer: int, token: Tensor, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Cache `token` [n, rk + dr] and return the context [n, H, dv]."""
        self._cache.fill(layer, self._rows, self._padding.pad(token)[self._source][:, None])
        scores = Scores(self._scale)
        out = varlen_attention(q, k, v, self._stream, scores, None)
        return bucket_attention(q, k, v, self._stream, scores, None) if out is None else out


class _StepAttention:
    """The attention of one new token per row, at `positions` [n], to the first `length` positions of the cache."""

    def __init__(self, cache: LatentCache, positions: Tensor, length: int, mixer: MLA) -> None:
        self._cache, self._length, self._mixer = cache, length, mixer
        self._positions, self._index = positions, cache.flat_index(positions)
        self._bias: Tensor | None = None

    def __call__(self, layer: int, token: Tensor, q: Tensor) -> Tensor:
        """Cache `token` [n, rk + dr]; return the attention-weighted sums of latents [n, H, rk] for absorbed queries `q`
        [n, H, rk + dr]."""
        self._cache.append(layer, self._index, token)
        keys = self._cache.latents(layer)[: len(q)]
        if self._bias is None:
            self._bias = length_bias(self._positions, self._length, None, q.dtype)[:, None]
        if self._cache.fixed:
            keys = keys[:, :, : self._length]
            values = keys[..., : self._mixer.kv_rank]
            return attend_gpu(q[:, None], keys, values, self._bias[:, None], self._mixer.scale)[:, 0]
        keys = keys.view(len(q), self._length, -1)
        bias = self._bias.expand(-1, q.shape[1], -1)
        return attend_cpu(q, keys, keys[..., : self._mixer.kv_rank], bias, Scores(self._mixer.scale))


class _ExtendAttention:
    """The attention of packed new tokens of sequences whose earlier positions are cached; see `Extension`."""

    def __init__(
        self, cache: LatentCache, lengths: Sequence[int], starts: Sequence[int], rows: Sequence[int], mixer: MLA
    ) -> None:
        self._cache, self._mixer = cache, mixer
        self._places = NewPlaces(lengths, starts, rows, cache.device)

    def __call__(self, layer: int, token: Tensor, q: Tensor) -> Tensor:
        """Cache `token` [t, rk + dr]; return the mean latents [t, H, rk] for absorbed queries `q` [t, H, rk + dr]."""
        keys = self._places.write(self._cache.latents(layer), token[:, None]).expand(-1, q.shape[1], -1, -1)
        queries = self._places.padding.pad(q).transpose(1, 2)
        # Pass the whole keys as values: torch's fused kernels, which do not store the scores, need values as wide as
        # the keys.
        mean = F.scaled_dot_product_attention(
            queries, keys, keys, attn_mask=self._places.bias(None, q.dtype), scale=self._mixer.scale
        )
        return self._places.padding.unpad(mean.transpose(1, 2))[..., : self._mixer.kv_rank]
