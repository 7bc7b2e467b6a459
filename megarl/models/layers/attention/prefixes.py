"""Attention over a stream in which sequences share prefixes (`megarl.data.prefix_tree`).

A token sees the tokens up to itself in its node, and all tokens of the nodes before its own. The keys come in parts:

    A    every node causally to itself, in one call
    B    for each node with descendants: the queries of all its descendants to all its keys, a full rectangle

Every part returns its outputs O_x and the logarithms L_x of the sums of exponentials of its scores, and

    L = log sum_x exp(L_x),        O = sum_x O_x exp(L_x - L)

Kernels have no gradient of L_x. But their backward passes take O and L as arguments, and compute the probabilities as
exp(score - L) and the gradients of scores from the rows of dO . O: with the final O and L each part returns its share
of the gradients of q, k and v. Sinks are one more part, without values.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from megarl.data.prefix_tree import SharedSpan
from megarl.kernels import cpu
from megarl.models.layers.attention.cpu import CompiledLoop, runs
from megarl.models.layers.attention.products import Products, TorchCpu
from megarl.models.layers.attention.scores import Scores
from megarl.models.layers.attention.sinks import Kernel, attend_with_sinks
from megarl.models.packing import SharedPrefixes

LONG = 512
"""Number of keys from which on torch's CPU kernel is faster than products, for a causal node and for bf16; in other
cases it always is."""

SHORT = 256
"""Tokens of the longest sequence up to which the compiled loop is faster than products."""

Place = slice | Tensor


@dataclass(frozen=True)
class Part:
    """A kernel, and the tokens whose queries and keys it takes: a slice, or int64 indices."""

    queries: Place
    keys: Place
    kernel: Kernel


@dataclass(frozen=True)
class MergedParts:
    """The parts of an attention as one kernel. Every query is in a part, and at most once in each."""

    parts: tuple[Part, ...]

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Implement `Kernel.forward`; the output is float32 or wider."""
        wide = torch.promote_types(q.dtype, torch.float32)
        out = q.new_zeros(*q.shape[:2], v.shape[2], dtype=wide)
        lse = q.new_full(q.shape[:2], -torch.inf, dtype=wide)
        for part in self.parts:
            here = part.queries
            context, sums = part.kernel.forward(q[here], k[part.keys], v[part.keys])
            before = lse[here]
            whole = torch.logaddexp(before, sums)
            share = context * (sums - whole).exp_()[..., None]
            out[here] = share.addcmul_(out[here], (before - whole).exp_()[..., None])
            lse[here] = whole
        return out, lse

    def backward(
        self, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Implement `Kernel.backward`."""
        sums = [x.new_zeros(x.shape, dtype=lse.dtype) for x in (q, k, v)]
        for part in self.parts:
            here, keys = part.queries, part.keys
            given = grad[here], q[here], k[keys], v[keys], out[here], lse[here]
            for whole, place, share in zip(sums, (here, keys, keys), part.kernel.backward(*given), strict=True):
                whole[place] += share
        dq, dk, dv = (whole.to(x.dtype) for whole, x in zip(sums, (q, k, v), strict=True))
        return dq, dk, dv


def attend_with(kernel: Kernel, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None) -> Tensor:
    """Return the attention [t, H, dv] that `kernel` computes, with `sinks` [H] as further scores if there are some."""
    return _Attend.apply(q, k, v, kernel) if sinks is None else attend_with_sinks(q, k, v, sinks, kernel)


class _Attend(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, kernel: Kernel) -> Tensor:
        q, k, v = (x.contiguous() for x in (q, k, v))
        out, lse = kernel.forward(q, k, v)
        out = out.to(q.dtype)
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.kernel = kernel
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:
        q, k, v, out, lse = ctx.saved_tensors
        return *ctx.kernel.backward(grad.contiguous(), q, k, v, out, lse), None


def plain_parts(q: Tensor, v: Tensor, prefixes: SharedPrefixes, scores: Scores, window: int | None) -> Kernel:
    """Return the attention of a stream with shared prefixes: by one compiled loop on a CPU if all sequences are short,
    otherwise by matrix products."""
    plain = q.is_cpu and q.shape[2] == v.shape[2] and scores.cap is None
    if plain and prefixes.longest <= SHORT and (window is None or window >= prefixes.longest):
        kernels = cpu.load() if cpu.CpuKernels.supports(q.dtype, q.shape[2]) else None
        if kernels is not None:
            loop: Kernel = CompiledLoop(kernels, prefixes.lengths, scores.scale, prefixes.parents)
            return loop
    parts = []
    for start, count, length in runs(prefixes.lengths, q.shape[1]):
        here = slice(start, start + count * length)
        seen = None
        if window is not None and window < length:
            seen = torch.ones(length, length, dtype=torch.bool, device=q.device).triu_(1 - window)
        kernel: Kernel = Products(count, scores.scale, scores.cap, causal=True, seen=seen)
        if plain and count == 1 and seen is None and length >= LONG:
            kernel = TorchCpu(scores.scale, causal=True)
        parts.append(Part(here, here, kernel))
    for span in prefixes.spans:
        keys, queries = slice(span.start, span.end), slice(span.end, span.last)
        seen = None
        if window is not None and prefixes.longest > window:
            at = prefixes.positions.to(q.device)
            seen = at[queries, None] - at[None, keys] < window
        by_torch = plain and seen is None and (q.dtype != torch.bfloat16 or span.end - span.start >= LONG)
        kernel = TorchCpu(scores.scale) if by_torch else Products(1, scores.scale, scores.cap, seen=seen)
        parts.append(Part(queries, keys, kernel))
    return MergedParts(tuple(parts))


def rectangles_by_level(spans: tuple[SharedSpan, ...]) -> list[list[SharedSpan]]:
    """Return the spans by the number of spans around them; the queries of a level's spans are disjoint."""
    levels, around = list[list[SharedSpan]](), list[SharedSpan]()
    for span in spans:
        while around and around[-1].last <= span.start:
            around.pop()
        if len(around) == len(levels):
            levels.append([])
        levels[len(around)].append(span)
        around.append(span)
    return levels


def place_of(pieces: list[tuple[int, int]], where: torch.device) -> Place:
    """Return an index of the tokens in the ranges `pieces`, [first, end) each: a slice if each range begins where the
    one before it ends, otherwise a tensor on the device `where`."""
    if all(a[1] == b[0] for a, b in itertools.pairwise(pieces)):
        return slice(pieces[0][0], pieces[-1][1])
    return torch.cat([torch.arange(*piece) for piece in pieces]).to(where)


#: fn(lengths of the queries, lengths of the keys, causal) -> kernel
MakeKernel = Callable[[list[int], list[int], bool], Kernel]


def level_parts(prefixes: SharedPrefixes, make: MakeKernel, where: torch.device) -> MergedParts:
    """Return the calls of variable-length kernels that compute attention with shared prefixes.

    One call attends within all nodes of the prefix tree, and one per level lets nodes attend to their ancestors.
    """
    lengths = list(prefixes.lengths)
    whole = slice(0, sum(lengths))
    parts = [Part(whole, whole, make(lengths, lengths, True))]
    for level in rectangles_by_level(prefixes.spans):
        queries, keys = [(span.end, span.last) for span in level], [(span.start, span.end) for span in level]
        kernel = make([b - a for a, b in queries], [b - a for a, b in keys], False)
        parts.append(Part(place_of(queries, where), place_of(keys, where), kernel))
    return MergedParts(tuple(parts))
