"""Attention with sinks: a learned score per head that joins the softmax and has no value (gpt-oss).

With the scores x_j of a query, the logarithm l of the sum of their exponentials, and the sink s of the head,

    out' = sum_j exp(x_j) v_j / (exp(l) + exp(s)) = out * exp(l - l'),    l' = log(exp(l) + exp(s))

so any kernel that returns `out` and l is enough. Its backward pass gets out' and l' in their places: it computes the
probabilities as exp(x_j - l'), and subtracts the product of the gradient and out' from their gradients, which is what
the larger softmax needs. The gradient of a sink is that of a score whose value is zero,

    - sum over queries of exp(s - l') * (gradient of out' . out')
"""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import Tensor


class Kernel(Protocol):
    """Attention without sinks of q [t, H, d] to k [n, G, d] and v [n, G, d]; lse: float32 or wider [t, H]."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Return the attention's result [t, H, d] and each query's log-sum-exp of its scores [t, H]."""

    def backward(
        self, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return the gradients of q, k and v for the softmax with the probabilities exp(score - lse)."""


def attend_with_sinks(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor, kernel: Kernel) -> Tensor:
    """Return the attention [t, H, d] that `kernel` computes, with `sinks` [H] as further scores."""
    return _SinkAttention.apply(q, k, v, sinks, kernel)


def with_sink_column(scores: Tensor, sinks: Tensor) -> Tensor:
    """Return the softmax of scores [..., keys] and of one sink per row, without the probability of the sink.

    Args:
        sinks: broadcast to [..., 1].
    """
    column = sinks.to(scores.dtype).expand(*scores.shape[:-1], 1)
    return torch.softmax(torch.cat((scores, column), -1), -1)[..., :-1]


def sink_key(
    keys: Tensor, values: Tensor, mask: Tensor | None, sinks: Tensor, queries: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Return keys and values [m, G, n + 1, d] with a last key and value of zeros, and the bias of scores that makes the
    key's score the sink [m or 1, H, queries, n + 1], for torch's scaled_dot_product_attention.

    Args:
        keys, values: [m, G, n, d].
        mask: bool, True where a query sees a key, or a bias; broadcast to [m, H, queries, n]; None: it sees all keys.
        sinks: [H].
    """
    length = keys.shape[2]
    if mask is None:
        mask = keys.new_zeros(1, 1, queries, length)
    elif mask.dtype == torch.bool:
        mask = torch.zeros(mask.shape, dtype=keys.dtype, device=keys.device).masked_fill_(~mask, -torch.inf)
    heads = mask.view(*(1,) * (4 - mask.dim()), *mask.shape).expand(-1, len(sinks), -1, -1)
    column = sinks.to(keys.dtype)[:, None, None].expand(len(heads), -1, queries, 1)
    keys, values = (torch.cat((x, x.new_zeros(*x.shape[:2], 1, x.shape[3])), 2) for x in (keys, values))
    return keys, values, torch.cat((heads, column), 3)


class _SinkAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor, kernel: Kernel) -> Tensor:
        q, k, v = (x.contiguous() for x in (q, k, v))
        out, lse = kernel.forward(q, k, v)
        whole = torch.logaddexp(lse, sinks.to(lse.dtype))
        out = (out * (lse - whole).exp()[..., None]).to(q.dtype)
        ctx.save_for_backward(q, k, v, sinks, out, whole)
        ctx.kernel = kernel
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor, None]:
        q, k, v, sinks, out, lse = ctx.saved_tensors
        grad = grad.contiguous()
        dq, dk, dv = ctx.kernel.backward(grad, q, k, v, out, lse)
        share = (sinks.to(lse.dtype) - lse).exp()
        dsinks = -(share * (grad.to(lse.dtype) * out).sum(-1)).sum(0)
        return dq, dk, dv, dsinks.to(sinks.dtype), None
