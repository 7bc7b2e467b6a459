"""torch's variable-length attention for `pretend_cuda`: the same operation, sequence by sequence, in float32."""

from __future__ import annotations

import itertools
from typing import Any

import torch
from torch import Tensor


def _heads(x: Tensor, start: int, end: int, times: int) -> Tensor:
    """[heads, t, d] of one sequence, in float32."""
    return x[start:end].float().transpose(0, 1).repeat_interleave(times, 0)


def _scores(q: Tensor, k: Tensor, scale: float, window: list[int] | None) -> Tensor:
    scores = q @ k.transpose(1, 2) * scale
    place = torch.arange(k.shape[1])
    at = torch.arange(q.shape[1])[:, None] + k.shape[1] - q.shape[1]  # the last query is at the last key
    left, right = window or [-1, -1]
    hidden = torch.zeros(q.shape[1], k.shape[1], dtype=torch.bool)
    if right >= 0:
        hidden |= place > at + right
    if left >= 0:
        hidden |= place < at - left
    return scores.masked_fill(hidden, -torch.inf)


def _sequences(cu: Tensor, cu_k: Tensor) -> zip[tuple[tuple[int, int], tuple[int, int]]]:
    """First and end of the queries of every sequence, and of its keys."""
    return zip(itertools.pairwise(cu.tolist()), itertools.pairwise(cu_k.tolist()), strict=True)


def _check(q: Tensor, k: Tensor, v: Tensor, cu: Tensor, cu_k: Tensor) -> None:
    """What the kernel asks for."""
    assert q.dtype == k.dtype == v.dtype
    assert q.dtype in (torch.bfloat16, torch.float16), q.dtype
    assert cu.dtype == cu_k.dtype == torch.int32, cu.dtype
    assert q.stride(-1) == k.stride(-1) == v.stride(-1) == 1


def forward(q: Tensor, k: Tensor, v: Tensor, cu: Tensor, cu_k: Tensor, *rest: Any) -> tuple[Tensor, Tensor, Tensor]:
    """Output [t, heads, d], log-sum-exp [heads, t] and random state."""
    _check(q, k, v, cu, cu_k)
    scale, window, times = rest[3] or q.shape[-1] ** -0.5, rest[4], q.shape[1] // k.shape[1]
    out, lse = torch.empty_like(q), torch.empty(q.shape[1], q.shape[0])
    for own, seen in _sequences(cu, cu_k):
        scores = _scores(_heads(q, *own, 1), _heads(k, *seen, times), scale, window)
        lse[:, slice(*own)] = scores.logsumexp(-1)
        out[slice(*own)] = (scores.softmax(-1) @ _heads(v, *seen, times)).transpose(0, 1)
    return out, lse, torch.zeros(2, dtype=torch.uint64)


def backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, cu: Tensor, cu_k: Tensor, *rest: Any
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of q, k and v, from the given output and log-sum-exps as in the kernels."""
    scale, window = rest[4] or q.shape[-1] ** -0.5, rest[5]
    times, groups = q.shape[1] // k.shape[1], k.shape[1]
    dq, dk, dv = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
    for own, seen in _sequences(cu, cu_k):
        wide_q, wide_k, wide_v = _heads(q, *own, 1), _heads(k, *seen, times), _heads(v, *seen, times)
        up = _heads(grad, *own, 1)
        chances = (_scores(wide_q, wide_k, scale, window) - lse[:, slice(*own), None]).exp()
        along = (up * _heads(out, *own, 1)).sum(-1, keepdim=True)
        scores = chances * (up @ wide_v.transpose(1, 2) - along) * scale
        dq[slice(*own)] = (scores @ wide_k).transpose(0, 1)
        for found, wide in ((dk, scores.transpose(1, 2) @ wide_q), (dv, chances.transpose(1, 2) @ up)):
            found[slice(*seen)] = wide.view(groups, times, *wide.shape[1:]).sum(1).transpose(0, 1)
    return dq, dk, dv
