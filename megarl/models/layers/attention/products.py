"""Attention by plain matrix products that also returns the sums of its softmax, on any device and in any dtype.

It is a kernel like those of sinks.py: its backward pass takes the final output and the final sums, of which the keys
here may be a part. Only the scores of some queries are in memory, and the backward pass computes them again.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from megarl.models.soft_cap import cap_slope, capped

#: Number of scores of a block: 2 MB in float32, which fit in a core's cache, and 256 MB on a GPU.
_ON_CPU, _ON_GPU = 1 << 19, 1 << 26
_HIDDEN = -1e30
"""The score of a key that a query does not see: finite, so that a query which sees no key has no NaN."""


@dataclass(frozen=True)
class Products:
    """Attention by matrix products (`sinks.Kernel`), for `count` sequences with equally many queries and equally many
    keys each.

    Attributes:
        scale, cap: factor of the products and, unless None, the soft cap of the scores.
        causal: whether query i sees the keys up to i only.
        seen: bool [queries, keys] of one sequence, which keys a query sees; None: all.
    """

    count: int
    scale: float
    cap: float | None = None
    causal: bool = False
    seen: Tensor | None = None

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Implement `Kernel.forward`; a query that sees no key has a sum of exponentials close to 0."""
        rows = _Rows(self.count, len(q) // self.count, q.shape[1], k.shape[1])
        wide = torch.promote_types(q.dtype, torch.float32)
        queries, keys, values = rows.split(q).to(wide) * self.scale, rows.split(k).to(wide), rows.split(v)
        out, lse = q.new_empty(*queries.shape[:2], v.shape[2]), queries.new_empty(queries.shape[:2])
        for a, b, end in self._blocks(rows, keys):
            part = slice(a * rows.per, b * rows.per)
            scores = self._hide(
                capped(torch.bmm(queries[:, part], keys[:, :end].transpose(1, 2)), self.cap), a, rows.per
            )
            top = scores.amax(-1)
            chances = torch.softmax(scores, -1)
            torch.sub(top, chances.amax(-1).log_(), out=lse[:, part])
            out[:, part] = torch.bmm(chances.to(v.dtype), values[:, :end])
        return rows.join(out), rows.join(lse[..., None])[..., 0]

    def backward(
        self, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Implement `Kernel.backward`; the gradients are float32 or wider."""
        rows = _Rows(self.count, len(q) // self.count, q.shape[1], k.shape[1])
        wide = lse.dtype
        along = rows.split((grad.to(wide) * out).sum(-1, keepdim=True))
        sums, up_all = rows.split(lse[..., None]), rows.split(grad)
        narrow, keys, values = rows.split(q), rows.split(k), rows.split(v)
        queries, wide_keys = narrow.to(wide) * self.scale, keys.to(wide)
        dq = torch.empty_like(queries)
        dk, dv = torch.zeros_like(wide_keys), torch.zeros_like(values, dtype=wide)
        for a, b, end in self._blocks(rows, keys):
            part = slice(a * rows.per, b * rows.per)
            scores = capped(torch.bmm(queries[:, part], wide_keys[:, :end].transpose(1, 2)), self.cap)
            slope = None if self.cap is None else cap_slope(scores, self.cap)
            chances = self._hide(scores, a, rows.per).sub_(sums[:, part]).exp_()
            up = up_all[:, part]
            dscores = torch.bmm(up, values[:, :end].transpose(1, 2)).to(wide).sub_(along[:, part]).mul_(chances)
            dscores = (dscores if slope is None else dscores.mul_(slope)).mul_(self.scale).to(q.dtype)
            dv[:, :end] += torch.bmm(chances.to(v.dtype).transpose(1, 2), up)
            dq[:, part] = torch.bmm(dscores, keys[:, :end])
            dk[:, :end] += torch.bmm(dscores.transpose(1, 2), narrow[:, part])
        return rows.join(dq), _joined_keys(dk, self.count), _joined_keys(dv, self.count)

    def _blocks(self, rows: _Rows, keys: Tensor) -> Iterator[tuple[int, int, int]]:
        """Yield (first query, one past the last query, number of keys) of each block."""
        room = _ON_GPU if keys.is_cuda else _ON_CPU
        size = max(1, room // (len(keys) * rows.per * keys.shape[1]))
        # With a causal mask a block's earlier queries do not see its later keys, which are wasted work in large blocks.
        size = min(size, 64) if self.causal else size
        for a in range(0, rows.length, size):
            b = min(a + size, rows.length)
            yield a, b, b if self.causal else keys.shape[1]

    def _hide(self, scores: Tensor, first: int, per: int) -> Tensor:
        """Overwrite the scores [n, queries * per, keys] of keys that queries, from number `first` on, may not see."""
        each = scores.view(len(scores), -1, per, scores.shape[2])
        queries, keys = each.shape[1], each.shape[3]
        if self.causal:
            corner = each[..., first:]  # the causal mask hides no key before `first`
            future = torch.ones(queries, keys - first, dtype=torch.bool, device=scores.device).triu_(1)
            corner.masked_fill_(future[:, None], _HIDDEN)
        if self.seen is not None:
            each.masked_fill_(~self.seen[first : first + queries, None, :keys], _HIDDEN)
        return scores


@dataclass(frozen=True)
class _Rows:
    """Rearranges the query heads of each key head as rows of one matrix, and back.

    [count * length, groups * per, d] <-> [count * groups, length * per, d], for `count` sequences and `groups` key
    heads, each with `per` query heads.
    """

    count: int
    length: int
    heads: int
    groups: int

    @property
    def per(self) -> int:
        return self.heads // self.groups

    def split(self, x: Tensor) -> Tensor:
        each = x.reshape(self.count, len(x) // self.count, self.groups, -1, x.shape[2]).transpose(1, 2)
        return each.reshape(self.count * self.groups, -1, x.shape[2])

    def join(self, x: Tensor) -> Tensor:
        each = x.view(self.count, self.groups, self.length, self.per, x.shape[2]).transpose(1, 2)
        return each.reshape(-1, self.heads, x.shape[2])


def _joined_keys(x: Tensor, count: int) -> Tensor:
    """Join the keys or values of `count` sequences, [count * groups, n, d], to one stream [count * n, groups, d]."""
    return x.view(count, -1, *x.shape[1:]).transpose(1, 2).reshape(-1, len(x) // count, x.shape[2])


@dataclass(frozen=True)
class TorchCpu:
    """Attention by torch's CPU kernel (`sinks.Kernel`), for one sequence without cap and mask, and for keys and values
    of one width.

    It takes half the time of `Products` for long sequences of keys, and keeps no scores either.
    """

    scale: float
    causal: bool = False

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Implement `Kernel.forward`."""
        rows = self._rows(q, k)
        split = (rows.split(q)[None], *(x.transpose(0, 1)[None] for x in self._repeated(q, k, v)))
        operation = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
        out, lse = operation(*split, 0.0, self.causal, scale=self.scale)
        return rows.join(out[0].contiguous()), rows.join(lse[0].contiguous()[..., None])[..., 0]

    def backward(
        self, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Implement `Kernel.backward`."""
        rows, wide = self._rows(q, k), lse.dtype
        up, queries, context = (rows.split(x)[None] for x in (grad, q, out))
        keys, values = (x.transpose(0, 1)[None] for x in self._repeated(q, k, v))
        # torch's backward kernel gets the log-sum-exps in its forward kernel's layout, with the heads last in memory.
        sums = rows.split(lse[..., None])[..., 0].t().contiguous().t()[None]
        operation = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
        given = up, queries, keys, values, context, sums, 0.0, self.causal
        dq, dk, dv = (x[0] for x in operation(*given, scale=self.scale))
        if self.causal:
            dk, dv = (x.unflatten(0, (k.shape[1], -1)).to(wide).sum(1) for x in (dk, dv))
        return rows.join(dq.contiguous()), dk.transpose(0, 1), dv.transpose(0, 1)

    def _rows(self, q: Tensor, k: Tensor) -> _Rows:
        # The causal kernel masks by row numbers, so a matrix has the queries of one head, and `_repeated` repeats keys
        # and values. Otherwise its rows are the queries of all heads that share a key head.
        return _Rows(1, len(q), q.shape[1], q.shape[1] if self.causal else k.shape[1])

    def _repeated(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        per = q.shape[1] // k.shape[1] if self.causal else 1
        return (k, v) if per == 1 else (k.repeat_interleave(per, 1), v.repeat_interleave(per, 1))
