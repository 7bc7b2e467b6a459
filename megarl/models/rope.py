"""Rotary position embedding from explicit positions.

Positions come with the tokens, so packed sequences, context-parallel shards and decoding all take the same path.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from megarl.kernels import gpu
from megarl.models.hf import head_dim, rope_type

if TYPE_CHECKING:
    from transformers import PretrainedConfig


class Rope(torch.nn.Module):
    """The frequencies of one model; the scaling kinds are transformers' own.

    Args:
        hf: the model's configuration.
        sections: where positions have three numbers: how many frequencies go by each of them.
        interleaved: these frequencies take turns from the first on, and those that are left go by the first number;
            else they stand in a row.
    """

    def __init__(self, hf: PretrainedConfig, sections: Sequence[int] = (), *, interleaved: bool = False) -> None:
        super().__init__()
        if rope_type(hf) == "default":
            size = head_dim(hf)
            exponents = torch.arange(0, size, 2, dtype=torch.float32) / size
            frequencies, self.scale = 1.0 / hf.rope_parameters["rope_theta"] ** exponents, 1.0
        else:
            from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

            frequencies, self.scale = ROPE_INIT_FUNCTIONS[rope_type(hf)](hf, torch.device("cpu"))
        # A plain attribute: as a buffer it would be cast to bf16 along with the model.
        self.frequencies = frequencies.float()
        self.sections = _sections(sections, interleaved=interleaved) if sections else None

    def cos_sin(self, positions: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the tables of `positions` [...] int64: cos and sin, each [..., head_dim / 2] in `dtype`, computed in
        fp32."""
        self.frequencies = self.frequencies.to(positions.device)
        return self._tables(positions.unsqueeze(-1).float() * self.frequencies, dtype)

    def cos_sin_of_three(self, positions: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the tables [t, head_dim / 2] of positions [3, t] with three numbers each."""
        assert self.sections is not None, "this model's positions have one number"
        self.frequencies, self.sections = (one.to(positions.device) for one in (self.frequencies, self.sections))
        return self._tables(positions[self.sections].t().float() * self.frequencies, dtype)

    def _tables(self, angles: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
        return (angles.cos() * self.scale).to(dtype), (angles.sin() * self.scale).to(dtype)

    def angles(self, length: int, where: torch.device) -> torch.Tensor:
        """Return the angles [length, 1, 1, head_dim] float32 of positions 0 .. length - 1, as Transformer Engine takes
        them: it has no place for `scale`, which the softmax takes twice instead."""
        self.frequencies = self.frequencies.to(where)
        half = torch.outer(torch.arange(length, dtype=torch.float32, device=where), self.frequencies)
        return torch.cat([half, half], -1)[:, None, None]


def _sections(sizes: Sequence[int], *, interleaved: bool) -> torch.Tensor:
    """Return which of the three numbers of a position each frequency goes by, int64 [head_dim / 2]."""
    if not interleaved:
        return torch.arange(3).repeat_interleave(torch.tensor(sizes))
    found = torch.zeros(sum(sizes), dtype=torch.int64)
    for number in (1, 2):
        found[number : 3 * sizes[number] : 3] = number
    return found


def _rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, sign: float) -> torch.Tensor:
    kernels = gpu.layer_kernels(x, cos, sin) if x.dim() == 3 else None
    if kernels is not None:
        return kernels.rope(x, cos.flatten(0, 1), sin.flatten(0, 1), sign)
    out = torch.empty_like(x)
    x1, x2 = x.chunk(2, dim=-1)
    y1, y2 = out.chunk(2, dim=-1)
    torch.mul(x1, cos, out=y1).addcmul_(x2, sin, value=-sign)
    torch.mul(x2, cos, out=y2).addcmul_(x1, sin, value=sign)
    return out


class _ApplyRope(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(cos, sin)
        return _rotate(x, cos, sin, 1.0)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        cos, sin = ctx.saved_tensors
        return _rotate(grad, cos, sin, -1.0), None, None


def apply_rope(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotate heads `x` [t, ..., heads, head_dim]; `cos`, `sin` [t, ..., head_dim / 2] as `Rope.cos_sin` makes them.

    The two halves of a head are rotated against each other (the layout of Hugging Face checkpoints). Without autograd's
    record of every product: the gradient is the rotation by the opposite angle.
    """
    return _ApplyRope.apply(x, cos.unsqueeze(-2), sin.unsqueeze(-2))
