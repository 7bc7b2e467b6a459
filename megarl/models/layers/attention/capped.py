"""Attention with a soft cap: the scores x become cap * tanh(x / cap) before the softmax (Gemma 2).

torch's attention has no such cap, so the products are explicit here, for some queries at a time: only their scores are
in memory, and the backward pass computes them again. With the probabilities p of capped scores y, and d for gradients,

    dy = p * (dp - sum(p * dp)),    dx = dy * (1 - (y / cap)^2)
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from megarl.models.soft_cap import cap_slope, capped

#: Number of scores of a block: 4 MB in float32, which fit in a core's cache, and 256 MB on a GPU.
_ON_CPU, _ON_GPU = 1 << 20, 1 << 26


def capped_attention(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float, cap: float, *, causal: bool = False
) -> Tensor:
    """Return attention with capped scores.

    Args:
        q: [b, H, m, d].
        k, v: [b, G, n, d], with H a multiple of G.
        mask: True where a query sees a key, or a bias; broadcast to [b, 1, m, n]; None: by `causal`.
        causal: without a mask, query i sees the keys up to i, else all keys.

    Returns:
        [b, H, m, d].
    """
    return _CappedAttention.apply(q, k, v, mask, _Form(scale, cap, causal and mask is None))


class _Form(NamedTuple):
    """The arguments of `capped_attention` that are not tensors."""

    scale: float
    cap: float
    causal: bool


class _CappedAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, form: _Form) -> Tensor:
        ctx.form = form
        out = torch.empty_like(q)
        lse = torch.empty(q.shape[:3], dtype=torch.promote_types(q.dtype, torch.float32), device=q.device)
        for block in _blocks(q, k, form.causal):
            a, b, end = block
            scores = _masked(_scores(q[:, :, a:b], k[:, :, :end], form), mask, block, causal=form.causal)
            lse[:, :, a:b] = scores.logsumexp(-1).view(lse[:, :, a:b].shape)
            chances = scores.sub_(_grouped(lse[:, :, a:b, None], k)).exp_().to(v.dtype)
            out[:, :, a:b] = (chances @ v[:, :, :end]).view(out[:, :, a:b].shape)
        ctx.save_for_backward(q, k, v, mask, out, lse)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, mask, out, lse = ctx.saved_tensors
        form: _Form = ctx.form
        dq = torch.empty_like(q)
        dk, dv = (torch.zeros_like(x, dtype=lse.dtype) for x in (k, v))
        along = (grad.to(lse.dtype) * out).sum(-1, keepdim=True)
        for block in _blocks(q, k, form.causal):
            a, b, end = block
            scores = _scores(q[:, :, a:b], k[:, :, :end], form)
            slope = cap_slope(scores, form.cap)
            chances = _masked(scores, mask, block, causal=form.causal).sub_(_grouped(lse[:, :, a:b, None], k)).exp_()
            up, queries = _grouped(grad[:, :, a:b], k), _grouped(q[:, :, a:b], k)
            dv[:, :, :end] += chances.to(v.dtype).transpose(2, 3) @ up
            dchances = (up @ v[:, :, :end].transpose(2, 3)).to(lse.dtype)
            dscores = (dchances - _grouped(along[:, :, a:b], k)).mul_(chances).mul_(slope).mul_(form.scale).to(q.dtype)
            dq[:, :, a:b] = (dscores @ k[:, :, :end]).view(dq[:, :, a:b].shape)
            dk[:, :, :end] += dscores.transpose(2, 3) @ queries
        return dq, dk.to(k.dtype), dv.to(v.dtype), None, None


def _blocks(q: Tensor, k: Tensor, causal: bool) -> list[tuple[int, int, int]]:
    """Split the queries into blocks whose scores fit into memory at once: (first query, one past the last query, number
    of keys) of each block.
    """
    batch, heads, queries, _ = q.shape
    rows = max(1, (_ON_GPU if q.is_cuda else _ON_CPU) // max(1, batch * heads * k.shape[2]))
    ends = [(a, min(a + rows, queries)) for a in range(0, queries, rows)]
    return [(a, b, b if causal else k.shape[2]) for a, b in ends]


def _grouped(x: Tensor, k: Tensor) -> Tensor:
    """Return [b, H, m, d] as [b, G, H / G * m, d]: the queries of a key/value head are its rows."""
    return x.reshape(x.shape[0], k.shape[1], -1, x.shape[3])


def _scores(q: Tensor, k: Tensor, form: _Form) -> Tensor:
    """Return the scores of queries and keys after the soft cap, [b, G, H / G * m, n], in at least float32."""
    rows, wide = _grouped(q, k), torch.promote_types(q.dtype, torch.float32)
    return capped((rows.to(wide) @ k.to(wide).transpose(2, 3)).mul_(form.scale), form.cap)


def _masked(scores: Tensor, mask: Tensor | None, block: tuple[int, int, int], *, causal: bool) -> Tensor:
    """Apply the mask to scores [b, G, H / G * m, n] in place, and return them; a key that a query does not see gets
    -inf.

    `mask` is bool, true where a query sees a key, or float, added to the scores; None: a query sees every key, or with
    `causal` only the keys up to itself.
    """
    first, last, keys = block
    each = scores.view(*scores.shape[:2], -1, last - first, keys)
    if mask is None:
        if causal:
            places = torch.arange(keys, device=scores.device)
            each.masked_fill_(places > places[first:last, None], -torch.inf)
        return scores
    part = mask[..., first:last, :] if mask.shape[-2] > 1 else mask
    part = part.unsqueeze(2) if part.dim() == 4 else part
    if part.dtype == torch.bool:
        each.masked_fill_(~part, -torch.inf)
    else:
        each.add_(part)
    return scores
