"""What a variable-length kernel of a GPU computes, on a CPU in any dtype and with gradients."""

from __future__ import annotations

import torch
from torch import Tensor

from megarl.models.layers.attention.training import VarlenCall


def kernel(
    q: Tensor, k: Tensor, v: Tensor, call: VarlenCall, scale: float, window: int | None, cap: float | None = None
) -> Tensor:
    """Attend sequence by sequence; the last query of one sees its last key, see `VarlenCall`."""
    assert call.cu_q.dtype == call.cu_k.dtype == torch.int32
    assert call.cu_q[-1] == len(q)
    assert call.cu_k[-1] == len(k) == len(v)
    return torch.cat([part for part, _ in attended(q, k, v, call, scale, window, cap)])


def attended(
    q: Tensor, k: Tensor, v: Tensor, call: VarlenCall, scale: float, window: int | None, cap: float | None = None
):
    """Yield the result [t, heads, d] and the log-sum-exps [t, heads] of each sequence."""
    per = q.shape[1] // k.shape[1]
    sizes = [cu.diff().tolist() for cu in (call.cu_q, call.cu_k)]
    assert [max(each) for each in sizes] == [call.longest_q, call.longest_k]
    for mine, keys, values in zip(q.split(sizes[0]), k.split(sizes[1]), v.split(sizes[1]), strict=True):
        scores = torch.einsum("qhd,khd->hqk", mine, keys.repeat_interleave(per, 1)) * scale
        scores = scores if cap is None else cap * torch.tanh(scores / cap)
        place = torch.arange(len(keys))
        at = torch.arange(len(mine))[:, None] + len(keys) - len(mine)
        hidden = place > at if call.causal else place < 0
        if window is not None:
            hidden = hidden | (place <= at - window)
        scores = scores.masked_fill(hidden, float("-inf"))
        out = torch.einsum("hqk,khd->qhd", scores.softmax(-1), values.repeat_interleave(per, 1))
        yield out, scores.logsumexp(-1).t()


class Kernel:
    """The interface of `TorchVarlen`. The backward pass of a kernel is that of its result, whose softmax has the given
    sum: a factor for each query, and a gradient that has no part of this sum."""

    def __init__(self, call: VarlenCall, scale: float, window: int | None) -> None:
        self._rest = call, scale, window

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        parts = list(attended(q, k, v, *self._rest))
        return torch.cat([out for out, _ in parts]), torch.cat([lse for _, lse in parts])

    def backward(self, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor):
        inputs = [x.detach().requires_grad_() for x in (q, k, v)]
        with torch.enable_grad():
            plain, sums = self.forward(*inputs)
            factor = (sums - lse).exp()
            # of sum_j exp(x_j - lse) (v_j . grad - out . grad)
            loss = (plain * grad).sum(-1) * factor - factor * (out * grad).sum(-1).detach()
            return torch.autograd.grad(loss.sum(), inputs)
