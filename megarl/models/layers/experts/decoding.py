"""Mixture-of-experts layers while decoding.

Ranks that share one set of experts (the expert axis) run in lockstep: each pads its tokens to the largest count on the
axis, all gather and route all tokens, every rank computes the contribution of its own experts, and a sum over the axis
adds the contributions. Decoding batches are small, so this moves little data and needs no data-dependent sizes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from megarl.kernels.gpu import expert_kernels, layer_kernels
from megarl.models.layers.experts.clamped import clamped_gate
from megarl.models.layers.experts.router import route
from megarl.models.layers.experts.stacked import StackedLinear
from megarl.models.layers.experts.training import is_one_kernel
from megarl.models.layers.mesh import Mesh
from megarl.models.layers.passes import Preparation
from megarl.models.lora import adapter_of

Grouped = Callable[[Tensor, Tensor], Tensor]


class ExpertPreparation(Preparation, Protocol):
    """How the weights of a mixture are prepared for decoding."""

    def grouped(self, linear: Any) -> Grouped:
        """Return the function (x [n, in], ends) -> [n, out] that multiplies each row by the weight of its expert."""


class MoE:
    """The router, the local experts and the shared MLP of one layer, read from a Megatron MoELayer.

    Args:
        prepared: prepares the weights.
        silu_mul: returns silu(first half) * second half, [n, 2f] -> [n, f], for the shared MLP.

    Attributes:
        waits: whether the host waits for the device or other ranks in every decode step: with expert parallelism,
            adapters on experts, or experts that need several kernels.
    """

    def __init__(
        self, module: Any, mesh: Mesh, prepared: ExpertPreparation, silu_mul: Callable[[Tensor], Tensor]
    ) -> None:
        router, dtype = module.router, prepared.dtype
        self._mesh, self._rules, self._correction = mesh, router.rules, router.expert_bias
        wide = torch.float32 if self._rules.wide else dtype
        self._router = router.weight.detach().to(wide)
        self._bias = None if router.bias is None else router.bias.detach().to(wide)
        first, second = module.experts.linear_fc1, module.experts.linear_fc2
        self._up, self._down = prepared.grouped(first), prepared.grouped(second)
        whole = all(is_one_kernel(linear.stacked, dtype) and adapter_of(linear) is None for linear in (first, second))
        self.waits = mesh.ep.size > 1 or not whole
        self._clamped, self._biases = module.config.mixture.clamped, None
        if isinstance(first, StackedLinear):
            # Outputs are summed over the expert-tensor ranks, so only the first rank adds the second bias.
            down = prepared.cast(second.bias) if mesh.etp.rank == 0 else torch.zeros_like(prepared.cast(second.bias))
            self._biases = prepared.cast(first.bias), down
        self._count, self._first = first.experts, mesh.ep.rank * first.experts
        self._numbers = torch.arange(1, self._count + 1, device=router.weight.device)
        self._shared = None
        if module.shared_experts is not None:
            self._shared = SharedExperts(module.shared_experts, mesh, prepared, silu_mul)

    def __call__(self, x: Tensor, lockstep: int, routes: list[Tensor] | None = None) -> Tensor:
        """Return the weighted sum over the chosen experts plus the shared MLP's output, [n, h].

        Args:
            x: [n, h], this rank's tokens; the same on all ranks of a tensor-parallel group.
            lockstep: largest n of the ranks that share experts with this one.
            routes: gets the experts of each token, int64 [n, k].
        """
        routed = self._routed(x, lockstep, routes)
        return routed if self._shared is None or not len(x) else routed + self._shared(x)

    def _routed(self, x: Tensor, lockstep: int, routes: list[Tensor] | None) -> Tensor:
        """Route tokens x [n, h], and return the weighted sum of their chosen experts' outputs, [n, h]."""
        if self._mesh.ep.size == 1:
            weights, experts = self._route(x)
            if routes is not None:
                routes.append(experts)
            # Expert-tensor ranks hold the same tokens and a slice of every expert.
            return self._mesh.etp.all_sum(self._run(x, weights, experts))
        axis, n = self._mesh.expert, len(x)
        everyone = axis.gather(F.pad(x, (0, 0, 0, lockstep - n))).flatten(0, 1)
        weights, experts = self._route(everyone)
        if routes is not None:
            routes.append(experts[axis.rank * lockstep :][:n])
        # drop the rows of padding, which are all zero; a real row never is
        experts = experts.masked_fill(~everyone.any(dim=1, keepdim=True), -1)
        # Ranks of a tensor-parallel group send the same tokens; each reads back the results of its own copy.
        total = axis.all_sum(self._run(everyone, weights, experts))
        return total[axis.rank * lockstep :][:n]

    def _route(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return the routing weights float32 [n, k] and expert numbers int64 [n, k] of tokens x [n, h]."""
        logits = F.linear(x.to(self._router.dtype), self._router, self._bias)
        return route(logits, self._correction, self._rules)

    def _run(self, x: Tensor, weights: Tensor, experts: Tensor) -> Tensor:
        """Return the contribution of the local experts to each token, [n, h]."""
        local, topk = (experts - self._first).flatten(), experts.shape[1]
        if self._mesh.ep.size > 1:  # rows of other ranks' experts go last
            local = local.where((local >= 0) & (local < self._count), self._count)
        local, order = local.sort(stable=True)
        ends = torch.searchsorted(local, self._numbers, out_int32=True)
        tokens = order // topk
        rows = self._compute(x[tokens], weights.flatten()[order], local, ends)
        if self._mesh.ep.size > 1:
            rows = rows.masked_fill_((local == self._count)[:, None], 0)
        kernels = expert_kernels(rows)
        if kernels is None:
            return torch.zeros_like(x).index_add_(0, tokens, rows)
        places = torch.empty_like(order).scatter_(0, order, torch.arange(len(order), device=order.device))
        return kernels.sum_rows(rows, places.view(experts.shape))

    def _compute(self, rows: Tensor, weights: Tensor, local: Tensor, ends: Tensor) -> Tensor:
        """Return the output of each row's expert times its weight, [n, h]; `local`: numbers of the rows' experts."""
        if self._biases is None or self._clamped is None:
            return self._down(_gated(self._up(rows, ends), weights), ends)
        up, down = (bias[local.clamp(max=self._count - 1)] for bias in self._biases)
        inner = clamped_gate(self._up(rows, ends) + up, self._clamped)
        factors = weights[:, None]
        return self._down((inner * factors).to(rows.dtype), ends) + (down * factors).to(rows.dtype)


def _gated(gate_up: Tensor, weights: Tensor) -> Tensor:
    """Return silu(gate) * up * weight of each row [n, 2f], rounded to its dtype: [n, f]."""
    kernels = layer_kernels(gate_up)
    if kernels is not None:
        return kernels.swiglu(gate_up, weights)
    gate, value = gate_up.chunk(2, dim=-1)
    return (F.silu(gate) * value * weights[:, None]).to(gate_up.dtype)


class SharedExperts:
    """The MLP that every token passes in addition to its chosen experts, with the weights of Megatron's
    SharedExpertMLP."""

    def __init__(
        self, module: Any, mesh: Mesh, prepared: ExpertPreparation, silu_mul: Callable[[Tensor], Tensor]
    ) -> None:
        self._mesh, self._silu_mul = mesh, silu_mul
        self._up, self._down = prepared.layer(module.linear_fc1), prepared.layer(module.linear_fc2)
        self._gate = None if module.gate_weight is None else prepared.cast(module.gate_weight)

    def __call__(self, x: Tensor) -> Tensor:
        """Return the MLP's output for tokens x [n, h], summed over tensor-parallel ranks."""
        out = self._mesh.tp.all_sum(self._down(self._silu_mul(self._up(x))))
        return out if self._gate is None else out * F.linear(x, self._gate).sigmoid()
