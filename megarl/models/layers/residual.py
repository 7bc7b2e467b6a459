"""The sum of the residual stream and the result of a mixer or MLP; Megatron calls it `bda` (bias, dropout, add)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from megarl.models.config import PolicyConfig
from megarl.models.norm import RMSNorm

Add = Callable[[tuple[Tensor, Tensor | None], Tensor, float], Tensor]


class ResidualAdd(torch.nn.Module):
    """Adds the result of a mixer or MLP, normed and scaled where the model does so, to the residual stream."""

    def __init__(self, config: PolicyConfig) -> None:
        super().__init__()
        self._factor = config.wiring.residual
        normed = config.wiring.norms != "before"
        self.norm = RMSNorm(config, config.hidden_size, config.layernorm_epsilon) if normed else None

    def forward(self, training: bool, fused: bool) -> Add:
        """Return the function (result and its bias, residual stream, dropout) -> residual stream, as Megatron calls it.

        No model here has dropout."""
        return self._add

    def _add(self, result: tuple[Tensor, Tensor | None], residual: Tensor, dropout: float) -> Tensor:
        x, bias = result
        if bias is not None:
            x = x + bias
        if self.norm is not None:
            x = self.norm(x)
        return torch.add(residual, x, alpha=self._factor)


def norms_after(layer: Any) -> tuple[Tensor | None, Tensor | None]:
    """Return the weights of the norms after a layer's mixer and after its MLP; None: the layer has none there."""
    adds = (layer.self_attn_bda, layer.mlp_bda)
    first, second = (add.norm.weight if isinstance(add, ResidualAdd) and add.norm else None for add in adds)
    return first, second
