"""Copy tokens to rows, one row for each of their experts, and sum rows back to tokens.

On a GPU a kernel sums a token's rows, in float32 and in a fixed order (`kernels/experts_gpu.py`); it needs the
places of these rows. Elsewhere torch's operations use the token of each row.
"""

from __future__ import annotations

from types import ModuleType
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from megarl.kernels import gpu


class RowRoute(NamedTuple):
    """Which rows, copies of a token's hidden state for the experts, belong to which token."""

    tokens: Tensor  # int64 [m], the token of each row
    # int32 or int64 [n, k], the rows of each token; negative entries fill up tokens with fewer than k rows
    places: Tensor | None = None
    # the module that sums rows. `places` and `kernels` are None if torch's operations are used.
    kernels: ModuleType | None = None

    def spread(self, tokens: Tensor) -> Tensor:
        """Return the input rows [m, h] of the experts: each of the tokens [n, h] once for each of its experts here."""
        if self.kernels is None:
            return tokens.index_select(0, self.tokens)
        return _Spread.apply(tokens, *self)

    def collect(self, rows: Tensor, count: int) -> Tensor:
        """Return, for each of `count` tokens, the sum of its rows among `rows` [m, h]: [count, h].

        Kernels do not need `count`, because `places` has a row per token.
        """
        if self.kernels is None:
            # Use scatter_add_, because index_add_ would keep the rows for its backward pass.
            total = rows.new_zeros(count, rows.shape[1])
            return total.scatter_add_(0, self.tokens[:, None].expand_as(rows), rows)
        return _Collect.apply(rows, *self)

    def inverse(self) -> RowRoute:
        """Return the `RowRoute` that moves the rows back to their tokens' order, if each token has exactly one row."""
        if self.places is None:
            return RowRoute(self.tokens.argsort())
        return RowRoute(self.places.view(-1), self.tokens[:, None], self.kernels)


def route_by_expert(tokens: Tensor, routing_map: Tensor, each: int, like: Tensor) -> RowRoute:
    """Return the route of rows sorted by expert, then by token.

    Args:
        tokens: int64 [n * each], the token of each row.
        routing_map: bool [n, experts], `each` in each row.
        like: a tensor with the dtype and the device of the rows.
    """
    kernels = gpu.expert_kernels(like)
    if kernels is None:
        return RowRoute(tokens)
    count = len(routing_map)
    # one past the row of each entry of the routing map, by expert
    following = routing_map.T.reshape(-1).cumsum(0, dtype=torch.int32)
    experts = torch.nonzero_static(routing_map, size=count * each)[:, 1].view(count, each)
    entries = experts * count + torch.arange(count, device=experts.device)[:, None]
    return RowRoute(tokens, following.gather(0, entries.view(-1)).view(count, each) - 1, kernels)


def route_of_slots(order: Tensor, count: int, each: int, like: Tensor) -> RowRoute:
    """Return the route between `count` tokens and rows, where a token has `each` slots, and row i fills slot order[i].

    Args:
        order: int64 [m], token * each + number of the slot; without repeats.
        like: a tensor with the dtype and the device of the rows.
    """
    kernels, tokens = gpu.expert_kernels(like), order if each == 1 else order // each
    if kernels is None:
        return RowRoute(tokens)
    rows = torch.arange(len(order), dtype=torch.int32, device=order.device)
    places = rows.new_full((count * each,), -1).scatter_(0, order, rows)
    return RowRoute(tokens, places.view(count, each), kernels)


class _Spread(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tokens: Tensor, owners: Tensor, places: Tensor, kernels: ModuleType) -> Tensor:
        ctx.save_for_backward(places)
        ctx.kernels = kernels
        return tokens.index_select(0, owners)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        (places,) = ctx.saved_tensors
        return ctx.kernels.sum_rows(grad.contiguous(), places), None, None, None


class _Collect(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, owners: Tensor, places: Tensor, kernels: ModuleType) -> Tensor:
        ctx.save_for_backward(owners)
        return kernels.sum_rows(rows.contiguous(), places)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        (owners,) = ctx.saved_tensors
        return grad.index_select(0, owners), None, None, None
