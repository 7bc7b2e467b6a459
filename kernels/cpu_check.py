"""Check of cpu.cpp on random input against float64: every function, dtype and head size."""

from __future__ import annotations

import ctypes
import math
from collections.abc import Callable, Iterator, Sequence

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
    kernels, generator = CpuKernels(library), torch.Generator("cpu").manual_seed(1)
    for dtype, tolerance in _TOLERANCE.items():

        def draw(*shape: int, dtype: torch.dtype = dtype) -> Tensor:
            return torch.randn(*shape, generator=generator, dtype=torch.float32, device="cpu").to(dtype)

        for name, result, expected in _cases(kernels, draw, sizes):
            distance = difference(result, expected, tolerance)
            if distance is not None:
                return f"{name} in {dtype} by {distance:.1g} of the largest number"
    return None


def _cases(kernels: CpuKernels, draw: _Draw, sizes: Sequence[int]) -> Iterator[tuple[str, Tensor, Tensor]]:
    """Yield (name, the kernel library's result, the correct result in float64) for each output of each kernel."""
    yield from _norm(kernels, draw)
    yield from _gate(kernels, draw)
    for size in sizes:
        yield from _attend(kernels, draw, size)
        yield from _stream(kernels, draw, size)


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


def _stream(kernels: CpuKernels, draw: _Draw, size: int) -> Iterator[tuple[str, Tensor, Tensor]]:
    lengths, groups, per, scale = (1, 5, 18), 2, 3, size**-0.5
    tokens, starts = sum(lengths), torch.tensor([0, 1, 6, 24], device="cpu")
    q, grad = (draw(tokens, groups * per, size) for _ in range(2))
    k, v = (draw(tokens, groups, size) for _ in range(2))
    out, lse = kernels.causal_forward(q, k, v, starts, max(lengths), scale)
    slopes = kernels.causal_backward(q, k, v, out, lse, grad, starts, max(lengths), scale)
    for first, length in zip(starts.tolist(), lengths, strict=False):
        part = slice(first, first + length)

        # rearranges to [group, head in the group, token, head size]
        def by_group(x: Tensor, part: slice = part, length: int = length) -> Tensor:
            return x[part].double().view(length, groups, -1, size).permute(1, 2, 0, 3)

        queries, ks, vs, up = (by_group(x) for x in (q, k, v, grad))
        future = torch.full((length, length), -math.inf, dtype=torch.float64, device="cpu").triu(1)
        scores = queries @ ks.mT * scale + future
        weights = scores.softmax(-1)
        context = weights @ vs
        yield f"causal attention with heads of {size}", by_group(out), context
        sums = scores.logsumexp(-1).permute(2, 0, 1)
        yield "log-sums of causal attention", lse[part].view(length, groups, per), sums
        slope = weights * (up @ vs.mT - (up * context).sum(-1, keepdim=True)) * scale
        expected = slope @ ks, (slope.mT @ queries).sum(1, True), (weights.mT @ up).sum(1, True)
        for name, x, right in zip(("queries", "keys", "values"), slopes, expected, strict=True):
            # A single token's softmax has a zero gradient; only rounding remains, which has no scale to compare with.
            if length > 1 or name == "values":
                yield f"gradient of {name} with heads of {size}", by_group(x), right


def _rms(x: Tensor) -> Tensor:
    """Return x / rms(x) in float64."""
    return F.rms_norm(x.double(), x.shape[-1:], None, _EPS)


def _turn(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Apply the rotary embedding to the first 2 * cos.shape[-1] elements of each head [..., D]."""
    a, b, rest = x.tensor_split((cos.shape[-1], 2 * cos.shape[-1]), -1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin, rest), -1)
