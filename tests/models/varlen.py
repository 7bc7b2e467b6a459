"""What a variable-length kernel of a GPU computes, on a CPU in any dtype and with gradients."""

from __future__ import annotations

import torch
from torch import Tensor

from megarl.models.layers.attention.training import VarlenCall


def kernel(q: Tensor, k: Tensor, v: Tensor, call: VarlenCall, scale: float, window: int | None) -> Tensor:
    """Attend sequence by sequence; the last query of one sees its last key, see `VarlenCall`."""
    assert call.cu_q.dtype == call.cu_k.dtype == torch.int32
    assert call.cu_q[-1] == len(q)
    assert call.cu_k[-1] == len(k) == len(v)
    per, out = q.shape[1] // k.shape[1], []
    sizes = [cu.diff().tolist() for cu in (call.cu_q, call.cu_k)]
    assert [max(each) for each in sizes] == [call.longest_q, call.longest_k]
    for mine, keys, values in zip(q.split(sizes[0]), k.split(sizes[1]), v.split(sizes[1]), strict=True):
        scores = torch.einsum("qhd,khd->hqk", mine, keys.repeat_interleave(per, 1)) * scale
        place = torch.arange(len(keys))
        at = torch.arange(len(mine))[:, None] + len(keys) - len(mine)
        hidden = place > at if call.causal else place < 0
        if window is not None:
            hidden = hidden | (place <= at - window)
        chances = scores.masked_fill(hidden, float("-inf")).softmax(-1)
        out.append(torch.einsum("hqk,khd->qhd", chances, values.repeat_interleave(per, 1)))
    return torch.cat(out)
