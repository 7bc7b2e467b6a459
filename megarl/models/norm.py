"""RMSNorm that fits Megatron's module specs with and without sequence parallelism."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from megatron.core.transformer import TransformerConfig


class RMSNorm(torch.nn.Module):
    """y = x / rms(x) * weight over the last dimension.

    Megatron's own wrapper of torch's norm refuses sequence parallelism; this one tags the weight, whose gradient
    Megatron then sums over the tensor-parallel ranks.
    """

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5, **_: object) -> None:
        super().__init__()
        self.eps = eps
        where = (
            torch.device("cpu") if config.use_cpu_initialization else torch.device("cuda", torch.cuda.current_device())
        )
        self.weight = torch.nn.Parameter(torch.ones(hidden_size, dtype=config.params_dtype, device=where))
        self.weight.sequence_parallel = config.sequence_parallel

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Normalised `x`, same shape and dtype."""
        return F.rms_norm(x, (x.shape[-1],), self.weight, self.eps)
