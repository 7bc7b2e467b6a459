"""Operations that Megatron uses as modules."""

import torch
import torch.nn.functional as F


class FusibleOperation(torch.nn.Module):
    """Only named, as is `Sequential`: Megatron's TEFusedMLP mentions them, and is not used."""


class Sequential(FusibleOperation):
    pass


class BasicOperation(FusibleOperation):
    def get_extra_state(self):
        return torch.empty(0, dtype=torch.uint8)

    def set_extra_state(self, state):
        pass


class SwiGLU(BasicOperation):
    def __init__(self, *, cache_quantized_input=False):
        super().__init__()

    def forward(self, x):
        gate, up = x.chunk(2, -1)
        return F.silu(gate) * up


class RMSNorm(BasicOperation):
    def __init__(self, normalized_shape, *, eps=1e-5, device=None, dtype=None, zero_centered_gamma=False, sm_margin=0):
        super().__init__()
        self.eps = eps
        self.weight = torch.nn.Parameter(torch.ones(normalized_shape, device=device, dtype=dtype))

    def forward(self, x):
        return F.rms_norm(x, self.weight.shape, self.weight, self.eps)
