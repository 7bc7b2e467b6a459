"""Mixture-of-experts layers while decoding.

Ranks that share one set of experts (the expert axis) run in lockstep: each pads its tokens to the largest count on the
axis, all gather and route all tokens, every rank adds up what its own experts contribute, and a sum over the axis
brings the results home. Decoding batches are small, so this moves little and needs no data-dependent sizes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from megarl.rollout.embedded.parallel import Mesh

Linear = Callable[[Tensor], Tensor]

_EVERY_TOKEN = 512
"""Up to so many tokens reading an expert's weights takes a GPU about as long as computing all tokens with them."""


class MoE:
    """The router and local experts of one layer, read from a Megatron MoELayer.

    Args:
        module: the MoELayer.
        config: Megatron's.
        mesh: process groups.
        linear: makes x [n, in] -> x W^T of a weight.

    Raises:
        ValueError: the layer routes in a way this class does not compute.
    """

    def __init__(self, module: Any, config: Any, mesh: Mesh, linear: Callable[[Tensor], Linear]) -> None:
        if config.moe_router_score_function != "softmax" or config.moe_router_num_groups:
            raise ValueError("embedded generation supports plain softmax top-k routing only")
        if getattr(config, "moe_router_enable_expert_bias", False) or config.moe_shared_expert_intermediate_size:
            raise ValueError("embedded generation supports no expert bias and no shared experts")
        self._mesh = mesh
        self._topk, self._pre_softmax = config.moe_router_topk, config.moe_router_pre_softmax
        self._scale = config.moe_router_topk_scaling_factor
        self._router = module.router.weight.detach().float()
        self._experts = [
            (linear(expert.linear_fc1.weight), linear(expert.linear_fc2.weight))
            for expert in module.experts.local_experts
        ]
        self._first = mesh.ep.rank * len(self._experts)

    def __call__(self, x: Tensor, lockstep: int) -> Tensor:
        """Sum over the chosen experts, [n, h].

        Args:
            x: [n, h], this rank's tokens; the same on all ranks of a tensor-parallel group.
            lockstep: the largest n on the expert axis.
        """
        if self._mesh.ep.size == 1:
            # Expert-tensor ranks hold the same tokens and a slice of every expert.
            return self._mesh.etp.all_sum(self._run(x, *self._route(x)))
        axis, n = self._mesh.expert, len(x)
        everyone = axis.gather(F.pad(x, (0, 0, 0, lockstep - n))).flatten(0, 1)
        weights, experts = self._route(everyone)
        experts = experts.masked_fill(~everyone.any(dim=1, keepdim=True), -1)  # padding: a real row is never all zero
        # A rank of a tensor-parallel group sends the same tokens as its peers; each gets its own copy back.
        total = axis.all_sum(self._run(everyone, weights, experts))
        return total[axis.rank * lockstep :][:n]

    def _route(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return the weights float32 [n, k] and expert numbers int64 [n, k]."""
        logits = F.linear(x.float(), self._router)
        scores = torch.softmax(logits, dim=-1) if self._pre_softmax else logits
        top, experts = torch.topk(scores, self._topk, dim=-1)
        weights = top if self._pre_softmax else torch.softmax(top, dim=-1)
        return (weights * self._scale if self._scale else weights), experts

    def _run(self, x: Tensor, weights: Tensor, experts: Tensor) -> Tensor:
        """Return the contribution of the local experts to each token."""
        local = experts - self._first
        if x.is_cuda and len(x) <= _EVERY_TOKEN:
            return self._run_all(x, weights, local)
        return self._run_chosen(x, weights, local)

    def _run_chosen(self, x: Tensor, weights: Tensor, local: Tensor) -> Tensor:
        """Compute in each expert the tokens that chose it; the host has to know how many."""
        out, topk = torch.zeros_like(x), local.shape[1]
        order = local.flatten().argsort(stable=True)
        numbers = torch.arange(len(self._experts) + 1, device=x.device)
        ends = torch.searchsorted(local.flatten()[order], numbers).tolist()
        for (up, down), start, end in zip(self._experts, ends, ends[1:], strict=False):
            if start == end:
                continue
            token = order[start:end] // topk
            gate, value = up(x[token]).chunk(2, dim=-1)
            inner = F.silu(gate) * value * weights.flatten()[order[start:end], None]
            out.index_add_(0, token, down(inner.to(x.dtype)))
        return out

    def _run_all(self, x: Tensor, weights: Tensor, local: Tensor) -> Tensor:
        """Compute all tokens in each expert, and add nothing to those that did not choose it: the host need not
        wait."""
        out = torch.zeros_like(x)
        for number, (up, down) in enumerate(self._experts):
            chosen = local == number
            share = (weights * chosen).sum(1, keepdim=True)
            gate, value = up(x).chunk(2, dim=-1)
            inner = (F.silu(gate) * value * share).masked_fill_(~chosen.any(1, keepdim=True), 0)  # inf * 0 is NaN
            out += down(inner.to(x.dtype))
        return out
