"""Check of cpu.cpp on random input against float64: every function, dtype and head size."""

from __future__ import annotations

import ctypes
import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from megarl.kernels.build import difference
from megarl.kernels.cpu import HEAD_SIZES, CpuKernels

_TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 3e-2}
"""Largest allowed error relative to the largest element. Rounding errors are below a tenth of it; errors of a wrong
lane are as large as the elements."""

_EPS = 1e-6
_Draw = Callable[..., Tensor]


def check(library: ctypes.CDLL, sizes: Sequence[int] = HEAD_SIZES) -> str | None:
    """Return what differs from the reference, or None; `sizes` are the head sizes to check."""
    generator = torch.Generator("cpu").manual_seed(1)
    # Checks run on one thread, which would compute a tree's heads in one part; OpenMP computes three parts in turn.
    kernels, dividing = CpuKernels(library), CpuKernels(library, threads=3)
    for dtype, tolerance in _TOLERANCE.items():

        def draw(*shape: int, dtype: torch.dtype = dtype) -> Tensor:
            return torch.randn(*shape, generator=generator, dtype=torch.float32, device="cpu").to(dtype)

        for name, result, expected in _cases(kernels, dividing, draw, sizes):
            distance = difference(result, expected, tolerance)
            if distance is not None:
                return f"{name} in {dtype} by {distance:.1g} of the largest number"
    return None


def _cases(
    kernels: CpuKernels, dividing: CpuKernels, draw: _Draw, sizes: Sequence[int]
) -> Iterator[tuple[str, Tensor, Tensor]]:
    """Yield (name, the kernel library's result, the correct result in float64) for each output of each kernel;
    `dividing` divides the heads of a single tree into parts."""
    yield from _norm(kernels, draw)
    yield from _gate(kernels, draw)
    yield from _logits(kernels, draw)
    yield from _draws(kernels, draw)
    for size in sizes:
        yield from _attend(kernels, draw, size)
        # First each node is a sequence of its own; then nodes 1 to 4 form a tree, between two sequences; then all do.
        yield from _stream(kernels, draw, size, (1, 5, 18, 4, 1, 7), None)
        yield from _stream(kernels, draw, size, (1, 5, 18, 4, 1, 7), [-1, -1, 1, 2, 1, -1])
        yield from _stream(dividing, draw, size, (5, 18, 4), [-1, 0, 0], (1, 5))


def _norm(kernels: CpuKernels, draw: _Draw) -> Iterator[tuple[str, Tensor, Tensor]]:
    for rows, width in ((1, 16), (5, 48), (37, 80)):
        x, delta, weight, grad = draw(rows, width), draw(rows, width), draw(width), draw(rows, width)
        yield "norm", kernels.add_norm(x.clone(), None, weight, _EPS), _rms(x) * weight.double()
        hidden, summed = x.clone(), x + delta
        out = kernels.add_norm(hidden, delta, weight, _EPS)
        yield "sum before norm", hidden, summed.double()
        yield "norm of sum", out, _rms(summed) * weight.double()
        dx, dweight = kernels.norm_backward(x, grad, weight, _EPS)
        unit, up = _rms(x), grad.double() * weight.double()
        scale = (x.double().square().mean(-1, keepdim=True) + _EPS).rsqrt()
        yield "norm's gradient", dx, scale * (up - unit * (up * unit).mean(-1, keepdim=True))
        yield "gradient of norm's weight", dweight, (grad.double() * unit).sum(0)


def _gate(kernels: CpuKernels, draw: _Draw) -> Iterator[tuple[str, Tensor, Tensor]]:
    for rows, width in ((1, 16), (7, 48)):
        both, grad = 3 * draw(rows, 2 * width), draw(rows, width)
        gate, up = both.double().chunk(2, -1)
        share = gate.sigmoid()
        yield "gate", kernels.silu_mul(both), gate * share * up
        slope = torch.cat((up * share * (1 + gate * (1 - share)), gate * share), -1)
        yield "gate's gradient", kernels.silu_mul_backward(both, grad), slope * grad.double().repeat(1, 2)


def _logits(kernels: CpuKernels, draw: _Draw) -> Iterator[tuple[str, Tensor, Tensor]]:
    for count, columns, start, factor in ((3, 5, 0, 1.0), (5, 37, 3, 0.5), (2, 2100, 0, 1.25)):
        logits = draw(count, columns)
        wide, targets = logits.double() * factor, torch.arange(count, device="cpu") * 9
        out = torch.zeros(4, count, device="cpu")
        place: dict[str, Any] = {"start": start, "inverse_temperature": factor}
        kernels.statistics(logits, targets, out, **place, entropy=True)
        peak = wide.amax(1)
        shifted = wide - peak[:, None]
        here = (targets >= start) & (targets < start + columns)
        chosen = (targets - start).masked_fill(~here, 0)[:, None]
        target = wide.gather(1, chosen)[:, 0] * here
        sums = shifted.exp().sum(1), (shifted.exp() * shifted).sum(1)
        yield f"statistics of {columns} logits", out.T, torch.stack([peak, *sums, target], 1)
        log_z = wide.logsumexp(1)
        logp = wide - log_z[:, None]
        entropy, up, slope = -(logp.exp() * logp).sum(1), draw(count).double(), draw(count).double()
        one_hot = torch.zeros_like(wide).scatter_(1, chosen, here.double()[:, None])
        of_logp = up[:, None] * (one_hot - logp.exp()) * factor
        of_entropy = -slope[:, None] * logp.exp() * (logp + entropy[:, None]) * factor
        numbers = [x.float() for x in (log_z, entropy, up, slope)]
        for with_logp, with_entropy in ((1, 1), (1, 0), (0, 1)):
            given = numbers[2] if with_logp else None, numbers[3] if with_entropy else None
            inputs = targets, numbers[0], numbers[1], *given
            result = kernels.gradients(logits, *inputs, torch.float32, **place)
            short = kernels.gradients(logits, *inputs, torch.bfloat16, **place)
            yield f"gradient of {columns} logits", result, with_logp * of_logp + with_entropy * of_entropy
            yield f"rounded gradient of {columns} logits", short, result.bfloat16().double()


def _draws(kernels: CpuKernels, draw: _Draw) -> Iterator[tuple[str, Tensor, Tensor]]:
    for columns, start in ((1, 0), (37, 11)):
        logits = draw(4, columns)
        seeds, index = torch.tensor([1, -5, 1 << 62, 7], device="cpu"), torch.arange(4, device="cpu")
        ids = torch.arange(start, start + columns, device="cpu")
        noise, total = _noise(seeds, index, ids), (2 * logits.double()).logsumexp(1)
        for greedy in (True, False):
            result = kernels.draw(logits, seeds, index, start=start, inverse_temperature=2.0, greedy=greedy)[0]
            scores = 2 * logits.double() - (0 if greedy else noise)
            best = scores.max(1)
            at = best.indices[:, None]
            expected = torch.stack([best.values, total, 2 * logits.double().gather(1, at)[:, 0]], 1)
            yield f"token drawn from {columns}", result[:, 1], (start + best.indices).double()
            yield f"score and sum of {columns}", result[:, [0, 3, 2]], expected


def _noise(seeds: Tensor, index: Tensor, ids: Tensor) -> Tensor:
    """Return log E of `megarl.models.noise` in float64 [n, V], from integers without a limit."""

    def mixed(x: int, bits: int, steps: tuple[tuple[int, int], ...], last: int) -> int:
        for shift, factor in steps:
            x = (x ^ x >> shift) * factor % (1 << bits)
        return x ^ x >> last

    def uniform(seed: int, number: int, token: int) -> float:
        key = seed + 0x9E3779B97F4A7C15
        for more in (0, number):
            steps = ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB))
            key = mixed((key + more) % (1 << 64), 64, steps, 31)
        steps = ((16, 0x7FEB352D), (15, 0x846CA68B))
        bits = mixed((token * 0x9E3779B9 ^ key) % (1 << 32), 32, steps, 16)
        bits = mixed((bits + (key >> 32)) % (1 << 32), 32, steps, 16)
        return min((bits % (1 << 31) + 0.5) / (1 << 31), 1 - 2.0**-24)

    rows = [
        [uniform(*key, token) for token in ids.tolist()] for key in zip(seeds.tolist(), index.tolist(), strict=True)
    ]
    return torch.tensor(rows, dtype=torch.float64, device="cpu").neg_().log1p_().neg_().log_()


def _attend(kernels: CpuKernels, draw: _Draw, size: int) -> Iterator[tuple[str, Tensor, Tensor]]:
    groups, heads, length, scale = 2, 7, 40, size**-0.5  # 7 heads test all sizes of the kernel's blocks: 4, 2 and 1
    positions = torch.tensor([0, 17, 39], device="cpu")
    for window, norm, turned in ((None, draw(2, size), size), (5, None, size // 2)):
        qkv, n = draw(3, groups, heads + 2, size), len(positions)
        cos, sin = (f(draw(n, turned // 2)) for f in (torch.cos, torch.sin))
        sinks = None if norm is not None else draw(groups, heads).float()
        keys, values = draw(n + 1, groups, length, size), draw(n + 1, groups, length, size)
        old_keys, old_values = keys.double(), values.double()
        numbers = {"window": window, "scale": scale, "eps": _EPS, "sinks": sinks}
        out = kernels.attend(qkv, norm, (cos, sin), keys, values, positions, **numbers).view(n, groups, heads, size)
        for row, position in enumerate(positions.tolist()):
            q, k, v = qkv[row].double().split((heads, 1, 1), 1)
            if norm is not None:
                q, k = _rms(q) * norm[0].double(), _rms(k) * norm[1].double()
            q, k = (_turn(x, cos[row].double(), sin[row].double()) for x in (q, k))
            old_keys[row, :, position], old_values[row, :, position] = k[:, 0], v[:, 0]
            seen = slice(0 if window is None else max(0, position - window + 1), position + 1)
            scores = q @ old_keys[row, :, seen].mT * scale
            if sinks is not None:
                scores = torch.cat((scores, sinks.double()[:, :, None]), -1)
            weights = torch.softmax(scores, -1)[:, :, : position + 1 - seen.start]
            yield f"attention with heads of {size}", out[row], weights @ old_values[row, :, seen]
        yield f"cache of keys with heads of {size}", keys, old_keys
        yield f"cache of values with heads of {size}", values, old_values


def _stream(
    kernels: CpuKernels,
    draw: _Draw,
    size: int,
    lengths: tuple[int, ...],
    nodes: list[int] | None,
    heads: tuple[int, int] = (2, 3),
) -> Iterator[tuple[str, Tensor, Tensor]]:
    """Check the attention of a stream of nodes with these lengths and parents; `heads`: key heads, and query heads of
    each."""
    (groups, per), scale, tokens = heads, size**-0.5, sum(lengths)
    starts = torch.tensor([0, *itertools.accumulate(lengths)], device="cpu")
    parents = None if nodes is None else torch.tensor(nodes, device="cpu")
    q, grad = (draw(tokens, groups * per, size) for _ in range(2))
    k, v = (draw(tokens, groups, size) for _ in range(2))
    out, lse = kernels.stream_forward(q, k, v, starts, parents, scale)
    slopes = kernels.stream_backward((q, k, v), out, lse, grad, starts, parents, scale)
    hidden = torch.full((tokens, tokens), -math.inf, dtype=torch.float64, device="cpu")
    for node, (first, length) in enumerate(zip(starts.tolist(), lengths, strict=False)):
        part = slice(first, first + length)
        hidden[part, part].triu_(1)
        above = -1 if nodes is None else nodes[node]
        while nodes is not None and above >= 0:
            hidden[part, starts[above] : starts[above + 1]] = 0
            above = nodes[above]

    # rearranges to [group, head in the group, token, head size]
    def by_group(x: Tensor) -> Tensor:
        return x.double().view(tokens, groups, -1, size).permute(1, 2, 0, 3)

    queries, ks, vs, up = (by_group(x) for x in (q, k, v, grad))
    scores = queries @ ks.mT * scale + hidden
    weights = scores.softmax(-1)
    context = weights @ vs
    yield f"attention of a stream with heads of {size}", by_group(out), context
    sums = scores.logsumexp(-1).permute(2, 0, 1)
    yield "log-sums of a stream's attention", lse.view(tokens, groups, per), sums
    slope = weights * (up @ vs.mT - (up * context).sum(-1, keepdim=True)) * scale
    expected = slope @ ks, (slope.mT @ queries).sum(1, True), (weights.mT @ up).sum(1, True)
    for name, x, right in zip(("queries", "keys", "values"), slopes, expected, strict=True):
        yield f"gradient of {name} with heads of {size}", by_group(x), right


def _rms(x: Tensor) -> Tensor:
    """Return x / rms(x) in float64."""
    return F.rms_norm(x.double(), x.shape[-1:], None, _EPS)


def _turn(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Apply the rotary embedding to the first 2 * cos.shape[-1] elements of each head [..., D]."""
    a, b, rest = x.tensor_split((cos.shape[-1], 2 * cos.shape[-1]), -1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin, rest), -1)
