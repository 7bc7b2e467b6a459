"""Causal attention of short sequences on CPUs: plain matrix products, or one compiled pass.

torch's CPU attention kernel is written for long sequences. Up to about 1,000 tokens in bf16, plain products over a few
sequences at a time (so that the scores stay in a core's cache) take at most half its time, forward and backward; for a
few dozen tokens one compiled loop (kernels/stream.h) takes a fraction of that.

Both read the stream as it is packed, without gathering or padding. The products batch neighbours of equal length, so a
stream sorted by length is fastest; queries go in blocks, each with the keys up to its end, so that little more than the
causal half is computed. Scores and softmax are fp32, the other products use the model's dtype, as in flash attention;
unlike there, the probabilities are kept for the gradient. The compiled loop computes everything in fp32, and the
probabilities again in the backward pass.

Sinks (sinks.py) are a further column of the scores in the products; the compiled loop computes without them, and
sinks.py adds them to its result.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from megarl.kernels import cpu
from megarl.models.layers.attention.sinks import attend_with_sinks, with_sink_column

LONGEST = 1024
"""Longer sequences use torch's kernel, which does not store scores."""

COMPILED = 64
"""Up to this length one compiled pass over the stream is faster than matrix products."""

_QUERY_BLOCK = 64
_SCORES = 1 << 19
"""Number of scores of one batch of sequences: two megabytes in fp32."""


def runs(lengths: Sequence[int], heads: int) -> Iterator[tuple[int, int, int]]:
    """Yield (first token, number of sequences, their length) of batches of adjacent sequences of equal length, whose
    scores stay in the processor's cache."""
    start = first = 0
    while first < len(lengths):
        length = lengths[first]
        most = max(1, _SCORES // (heads * length * min(length, _QUERY_BLOCK)))
        count = 1
        while count < most and first + count < len(lengths) and lengths[first + count] == length:
            count += 1
        yield start, count, length
        start, first = start + count * length, first + count


@lru_cache(maxsize=64)
def _future(size: int) -> Tensor:
    """Return the mask to add to a diagonal block of scores [size, size]: -inf where the key comes after the query."""
    return torch.full((size, size), float("-inf")).triu_(1)


def _blocks(length: int) -> list[tuple[int, int]]:
    count = max(1, round(length / _QUERY_BLOCK))
    edges = [length * i // count for i in range(count + 1)]
    return list(itertools.pairwise(edges))


def _by_group(x: Tensor, count: int, groups: int) -> Tensor:
    """Copy [count * l, groups * r, d] to [count * groups, r * l, d]: grouped query heads become rows."""
    per, size = x.shape[1] // groups, x.shape[2]
    view = x.view(count, -1, groups, per, size).permute(0, 2, 3, 1, 4)
    return view.reshape(count * groups, -1, size)


def _from_group(x: Tensor, count: int, length: int) -> Tensor:
    """Undo `_by_group` for sequences of `length` tokens: return a view [count, length, groups, r, d]."""
    groups = x.shape[0] // count
    return x.view(count, groups, -1, length, x.shape[-1]).permute(0, 3, 1, 2, 4)


class _CausalAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, lengths: tuple[int, ...], scale: float, sinks: Tensor | None
    ) -> Tensor:
        heads, groups, size, width = q.shape[1], k.shape[1], q.shape[2], v.shape[2]
        per, exact = heads // groups, torch.promote_types(q.dtype, torch.float32)
        out = torch.empty(len(q), heads, width, dtype=q.dtype)
        probabilities = []
        for start, count, length in runs(lengths, heads):
            span = slice(start, start + count * length)
            keys = _by_group(k[span], count, groups).to(exact).transpose(1, 2)
            values = _by_group(v[span], count, groups)
            queries = q[span].view(count, length, heads, size)
            context = out[span].view(count, length, groups, per, width)
            for a, b in _blocks(length):
                block = _by_group(queries[:, a:b].reshape(-1, heads, size), count, groups).to(exact) * scale
                scores = torch.bmm(block, keys[:, :, :b])
                scores.view(-1, b - a, b)[:, :, a:].add_(_future(b - a))
                if sinks is None:
                    chances = torch.softmax(scores, -1).to(q.dtype)
                else:
                    of_rows = sinks.view(groups, -1).repeat_interleave(b - a, 1).repeat(count, 1)
                    chances = with_sink_column(scores, of_rows[..., None]).to(q.dtype)
                context[:, a:b] = _from_group(torch.bmm(chances, values[:, :b]), count, b - a)
                probabilities.append(chances)
        ctx.save_for_backward(q, k, v, sinks, *probabilities)
        ctx.lengths, ctx.scale = lengths, scale
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, Tensor, None, None, Tensor | None]:
        q, k, v, sinks, *probabilities = ctx.saved_tensors
        heads, groups, size, width = q.shape[1], k.shape[1], q.shape[2], v.shape[2]
        per = heads // groups
        dq, dk, dv = (torch.empty(x.shape, dtype=x.dtype) for x in (q, k, v))
        dsinks = None if sinks is None else torch.zeros(heads, dtype=torch.promote_types(q.dtype, torch.float32))
        chances_of = iter(probabilities)
        for start, count, length in runs(ctx.lengths, heads):
            span = slice(start, start + count * length)
            keys, values = _by_group(k[span], count, groups), _by_group(v[span], count, groups)
            dkeys, dvalues = torch.zeros_like(keys), torch.zeros_like(values)
            queries, upstream = (x[span].view(count, length, heads, x.shape[2]) for x in (q, grad))
            dqueries = dq[span].view(count, length, groups, per, size)
            for a, b in _blocks(length):
                chances = next(chances_of)
                block = _by_group(queries[:, a:b].reshape(-1, heads, size), count, groups)
                up = _by_group(upstream[:, a:b].reshape(-1, heads, width), count, groups)
                dvalues[:, :b] += torch.bmm(chances.transpose(1, 2), up)
                dchances = torch.bmm(up, values[:, :b].transpose(1, 2))
                if dsinks is not None:
                    dsinks += _sink_gradient(chances, dchances, count, heads)
                dscores = torch._softmax_backward_data(dchances, chances, -1, q.dtype).mul_(ctx.scale)
                dqueries[:, a:b] = _from_group(torch.bmm(dscores, keys[:, :b]), count, b - a)
                dkeys[:, :b] += torch.bmm(dscores.transpose(1, 2), block)
            dk[span].view(count, length, groups, size).copy_(_from_group(dkeys, count, length).squeeze(3))
            dv[span].view(count, length, groups, width).copy_(_from_group(dvalues, count, length).squeeze(3))
        return dq, dk, dv, None, None, None if dsinks is None else dsinks.to(sinks.dtype)


def _sink_gradient(chances: Tensor, dchances: Tensor, count: int, heads: int) -> Tensor:
    """Return the gradient of the sinks [heads]. A sink's probability is 1 minus the sum of the keys' probabilities.

    Args:
        chances, dchances: probabilities of keys, and their gradients [count * groups, heads / groups * length, keys].
    """
    wide = torch.promote_types(chances.dtype, torch.float32)
    along = (chances.to(wide) * dchances).sum(-1) * (chances.sum(-1, dtype=wide) - 1)
    return along.view(count, heads, -1).sum((0, 2))


class _FusedAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, lengths: tuple[int, ...], scale: float) -> Tensor:
        kernels = cpu.load()
        assert kernels is not None, "the caller has checked it"
        starts = torch.tensor([0, *itertools.accumulate(lengths)])
        q, k, v = (x.contiguous() for x in (q, k, v))
        out, lse = kernels.stream_forward(q, k, v, starts, None, scale)
        ctx.save_for_backward(q, k, v, out, lse, starts)
        ctx.scale = scale
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, Tensor, None, None]:
        q, k, v, out, lse, starts = ctx.saved_tensors
        kernels = cpu.load()
        assert kernels is not None, "the forward pass used them"
        grad = grad.contiguous()
        dq, dk, dv = kernels.stream_backward((q, k, v), out, lse, grad, starts, None, ctx.scale)
        return dq, dk, dv, None, None


class CompiledLoop:
    """Causal attention by the compiled CPU kernel, as a `Kernel` for attention with sinks and for shared prefixes.

    `parents` are the nodes before each of the nodes of `lengths` tokens (-1: none); without them nodes are sequences.
    """

    def __init__(
        self, kernels: cpu.CpuKernels, lengths: tuple[int, ...], scale: float, parents: Sequence[int] | None = None
    ) -> None:
        self._kernels, self._scale = kernels, scale
        self._starts = torch.tensor([0, *itertools.accumulate(lengths)])
        self._parents = None if parents is None else torch.tensor(parents)

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Return the attention [t, H, d] of q to k and v, and the log-sum of each query's exponentials, [t, H]."""
        return self._kernels.stream_forward(q, k, v, self._starts, self._parents, self._scale)

    def backward(
        self, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return the gradients of q, k and v for the probabilities exp(score - lse)."""
        return self._kernels.stream_backward((q, k, v), out, lse, grad, self._starts, self._parents, self._scale)


def causal_attention(
    q: Tensor, k: Tensor, v: Tensor, lengths: tuple[int, ...], scale: float, sinks: Tensor | None = None
) -> Tensor:
    """Return causal attention [t, heads, dv] of `q` [t, heads, d] to `k` [t, groups, d] and `v` [t, groups, dv], within
    sequences of `lengths`, with `sinks` [heads] if they are given."""
    fits = max(lengths) <= COMPILED and q.shape[2] == v.shape[2] and cpu.CpuKernels.supports(q.dtype, q.shape[-1])
    kernels = cpu.load() if fits else None
    if kernels is None:
        return _CausalAttention.apply(q, k, v, lengths, scale, sinks)
    if sinks is None:
        return _FusedAttention.apply(q, k, v, lengths, scale)
    return attend_with_sinks(q, k, v, sinks, CompiledLoop(kernels, lengths, scale))
