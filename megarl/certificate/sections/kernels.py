"""Tests attention, log-probs, norm and activation against float64, forward and backward."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from megarl.certificate.findings import Findings, worst
from megarl.models.layers.attention.scores import Scores
from megarl.system.device import device, has_cuda

#: Limits for the norm of the difference over the norm of the result. bf16 keeps 8 bits: an element is off by up to
#: 4e-3, and attention probabilities are rounded once more (0.006 measured on a CPU). float32 is off by 1e-7 per
#: operation, and sums have a different order (4e-7 measured on a CPU); TF32 would be off by 1e-3.
LIMITS = {torch.bfloat16: 2e-2, torch.float32: 1e-4}
_LENGTHS = ([37, 512, 5], [1], [1024, 130, 130], [64] * 7)
_HEADS, _GROUPS, _DIM = 16, 4, 128
# share of the upstream gradient's norm below which a gradient counts as rounding (a token that attends only to itself)
_NOTHING = 1e-3


def run(found: Findings, folder: Path) -> None:
    """Check attention, log-probs, norm and SwiGLU in bf16 and float32; add the results to `found`."""
    torch.manual_seed(0)
    found.fact("float32 products in TF32", torch.backends.cuda.matmul.allow_tf32)
    for dtype, limit in LIMITS.items():
        name = str(dtype).removeprefix("torch.")
        for window in (None, 64):
            largest = worst(_attention(lengths, dtype, window) for lengths in _LENGTHS)
            found.within(f"attention {name}{f', window {window}' if window else ''}", largest, limit)
        for ranks in (2, 4):
            name_of = f"attention {name}, shared by {ranks} context-parallel ranks"
            found.within(name_of, _shared_attention([40, 512, 8], dtype, ranks), limit)
        for tokens, vocabulary in ((300, 20_000), (3000, 1001)) if has_cuda() else ((300, 5000), (700, 301)):
            for part, error in _head(tokens, vocabulary, dtype).items():
                found.within(f"{part} of {tokens} tokens over {vocabulary}, {name}", error, limit)
        found.within(f"norm {name}", _norm(dtype), limit)
        found.within(f"SwiGLU {name}", _swiglu(dtype), limit)


def difference(got: Tensor, wanted: Tensor, floor: float = 0.0) -> float:
    """Return the norm of the difference over that of `wanted`, in float64; `floor` is added to the denominator."""
    wanted = wanted.detach().double()
    return float((got.detach().double() - wanted).norm() / (wanted.norm() + floor))


def _attention(lengths: Sequence[int], dtype: torch.dtype, window: int | None) -> float:
    from megarl.models.layers.attention.training import attend
    from megarl.models.packing import pack_stream

    packed = pack_stream(list(lengths), device=device()).params
    reach = window if window is not None and window < max(lengths) else None

    def ours(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return attend(q, k, v, packed, Scores(_DIM**-0.5), reach)

    def exact(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return exact_attention(q, k, v, lengths, window)

    return _with_gradients(ours, exact, _heads(sum(lengths), dtype), _NOTHING)


def _heads(tokens: int, dtype: torch.dtype) -> list[Tensor]:
    """Return random queries, keys and values."""
    return [torch.randn(tokens, count, _DIM, device=device()).to(dtype) for count in (_HEADS, _GROUPS, _GROUPS)]


def _shared_attention(lengths: Sequence[int], dtype: torch.dtype, ranks: int) -> float:
    """Return the error of attention computed for each rank in turn, with the keys and values that its all-gather would
    return.
    """
    from megarl.models.layers.attention.training import attend
    from megarl.models.packing import cp_split, pack_stream

    padded = list(pack_stream(lengths, cp_size=ranks).params.lengths)
    places = [part.to(device()) for rank in range(ranks) if (part := cp_split(padded, ranks, rank)) is not None]

    def shared(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        keys, values = (torch.cat([stream[own_places] for own_places in places]) for stream in (k, v))
        out = torch.empty_like(q)
        for rank, own_places in enumerate(places):
            packed = pack_stream(lengths, cp_size=ranks, cp_rank=rank, device=device()).params
            out = out.index_copy(0, own_places, attend(q[own_places], keys, values, packed, Scores(_DIM**-0.5), None))
        return out

    inputs = _heads(sum(padded), dtype)
    return _with_gradients(shared, lambda q, k, v: exact_attention(q, k, v, padded, None), inputs)


def exact_attention(q: Tensor, k: Tensor, v: Tensor, lengths: Sequence[int], window: int | None) -> Tensor:
    """Return causal attention [t, heads, d] within each sequence, by explicit formulas."""
    parts, repeat = [], q.shape[1] // k.shape[1]
    for qkv in zip(q.split(list(lengths)), k.split(list(lengths)), v.split(list(lengths)), strict=True):
        a, b, c = (x.transpose(0, 1) for x in qkv)
        b, c = b.repeat_interleave(repeat, 0), c.repeat_interleave(repeat, 0)
        places = torch.arange(a.shape[1], device=a.device)
        distance = places[:, None] - places
        hidden = (distance < 0) | (distance >= (window or len(places)))
        scores = (a @ b.transpose(1, 2) * a.shape[2] ** -0.5).masked_fill(hidden, float("-inf"))
        parts.append((scores.softmax(-1) @ c).transpose(0, 1))
    return torch.cat(parts)


def _head(tokens: int, vocabulary: int, dtype: torch.dtype, temperature: float = 0.9) -> dict[str, float]:
    from megarl.training.logprob import linear_logprob

    hidden = torch.randn(tokens, 256, device=device()).to(dtype)
    weight = torch.randn(vocabulary, 256, device=device()).to(dtype) * 0.1
    targets = torch.randint(0, vocabulary, (tokens,), device=device())
    h, w = hidden.clone().requires_grad_(), weight.clone().requires_grad_()
    logp, entropy = linear_logprob(h, w, targets, temperature=temperature)
    (logp.sum() + 0.1 * entropy.sum()).backward()
    eh, ew = hidden.double().requires_grad_(), weight.double().requires_grad_()
    rows = torch.log_softmax(eh @ ew.t() / temperature, 1)
    wanted, spread = rows.gather(1, targets[:, None])[:, 0], -(rows.exp() * rows).sum(1)
    (wanted.sum() + 0.1 * spread.sum()).backward()
    assert h.grad is not None
    assert w.grad is not None
    assert eh.grad is not None
    assert ew.grad is not None
    return {
        "log-probs": difference(logp, wanted),
        "entropy": difference(entropy, spread),
        "gradient of hidden states": difference(h.grad, eh.grad),
        "gradient of the output embedding": difference(w.grad, ew.grad),
    }


def _with_gradients(
    ours: Callable[..., Tensor], exact: Callable[..., Tensor], inputs: Sequence[Tensor], floor_share: float = 0.0
) -> float:
    """Return the largest relative difference between the functions `ours` and `exact` (in float64), over the result and
    the inputs' gradients. `floor_share` times the norm of the result's gradient is added to the denominator.
    """
    tested = [value.clone().requires_grad_() for value in inputs]
    references = [value.double().requires_grad_() for value in inputs]
    out, wanted = ours(*tested), exact(*references)
    upstream = torch.randn_like(out)
    out.backward(upstream)
    wanted.backward(upstream.double())
    pairs = [(out, wanted), *((a.grad, b.grad) for a, b in zip(tested, references, strict=True))]
    floor = floor_share * float(upstream.double().norm())
    return worst(math.inf if got is None or want is None else difference(got, want, floor) for got, want in pairs)


def _norm(dtype: torch.dtype) -> float:
    from megarl.models.norm import RMSNorm

    x, weight = (torch.randn(shape, device=device()).to(dtype) for shape in ((200, 768), (768,)))
    settings: Any = SimpleNamespace(params_dtype=dtype, sequence_parallel=False, layernorm_zero_centered_gamma=False)

    def ours(x: Tensor, weight: Tensor) -> Tensor:
        norm = RMSNorm(settings, 768, eps=1e-6)
        del norm.weight
        norm.weight = weight  # type: ignore[assignment]
        return norm(x)

    def exact(x: Tensor, weight: Tensor) -> Tensor:
        return x * (x.square().mean(-1, keepdim=True) + 1e-6).rsqrt() * weight

    return _with_gradients(ours, exact, [x, weight])


def _swiglu(dtype: torch.dtype) -> float:
    from megarl.models.layers.mlp.swiglu import SwiGLU

    settings: Any = SimpleNamespace()
    ours = SwiGLU(settings)
    x = torch.randn(200, 1024, device=device()).to(dtype)

    def exact(x: Tensor) -> Tensor:
        gate, up = x.chunk(2, -1)
        return gate * gate.sigmoid() * up

    return _with_gradients(ours, exact, [x])
