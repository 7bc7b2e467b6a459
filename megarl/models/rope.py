"""Rotary position embedding from explicit positions.

Positions are inputs, so packed sequences, context-parallel shards and decoding share one code path.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from megarl.kernels import gpu
from megarl.models.hf import rotated_width

if TYPE_CHECKING:
    from transformers import PretrainedConfig


class Rope(torch.nn.Module):
    """The frequencies of one of a model's RoPE tables; scaled kinds are computed by transformers.

    Args:
        hf: the model's configuration.
        layers: the kind of layers, if RoPE's settings differ by kind.
        sections: for positions of three numbers: how many frequencies use each number.
        interleaved: frequencies use the three numbers in turns, and the remaining frequencies use the first number;
            otherwise in consecutive sections.
    """

    def __init__(
        self,
        hf: PretrainedConfig,
        sections: Sequence[int] = (),
        *,
        interleaved: bool = False,
        layers: str | None = None,
    ) -> None:
        super().__init__()
        settings = (hf.rope_parameters or {}) if layers is None else hf.rope_parameters[layers]
        kind = settings.get("rope_type", "default")
        if kind == "default":
            size = rotated_width(hf)
            exponents = torch.arange(0, size, 2, dtype=torch.float32) / size
            frequencies, self.scale = 1.0 / settings["rope_theta"] ** exponents, 1.0
        else:
            from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

            of_kind = {} if layers is None else {"layer_type": layers}
            frequencies, self.scale = ROPE_INIT_FUNCTIONS[kind](hf, torch.device("cpu"), **of_kind)
        # A plain attribute: as a buffer it would be cast to bf16 along with the model.
        self.frequencies = frequencies.float()
        self.sections = _sections(sections, interleaved=interleaved) if sections else None

    def cos_sin(self, positions: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Return cos and sin of `positions` int64 [...], each [..., rotated / 2] in `dtype`, computed in fp32."""
        self.frequencies = self.frequencies.to(positions.device)
        return self._tables(positions.unsqueeze(-1).float() * self.frequencies, dtype)

    def cos_sin_of_three(self, positions: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Return cos and sin [t, rotated / 2] of M-RoPE positions [3, t]: time, height and width of each token."""
        assert self.sections is not None, "this model's positions have one number"
        self.frequencies, self.sections = (x.to(positions.device) for x in (self.frequencies, self.sections))
        return self._tables(positions[self.sections].t().float() * self.frequencies, dtype)

    def _tables(self, angles: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        return (angles.cos() * self.scale).to(dtype), (angles.sin() * self.scale).to(dtype)

    def angles(self, length: int, where: torch.device) -> Tensor:
        """Return the angles [length, 1, 1, rotated] float32 of positions 0 .. length - 1, for Transformer Engine.

        Transformer Engine has no argument for `scale`; the softmax scale includes its square instead.
        """
        self.frequencies = self.frequencies.to(where)
        half = torch.outer(torch.arange(length, dtype=torch.float32, device=where), self.frequencies)
        return torch.cat([half, half], -1)[:, None, None]


def _sections(sizes: Sequence[int], *, interleaved: bool) -> Tensor:
    """Return which number of an M-RoPE position each frequency uses: 0 time, 1 height, 2 width, int64 [rotated / 2]."""
    if not interleaved:
        return torch.arange(3).repeat_interleave(torch.tensor(sizes))
    numbers = torch.zeros(sum(sizes), dtype=torch.int64)
    for number in (1, 2):
        numbers[number : 3 * sizes[number] : 3] = number
    return numbers


def rotate(x: Tensor, cos: Tensor, sin: Tensor, sign: float) -> Tensor:
    """Return heads x [t, ..., heads, head_dim] rotated by RoPE (`apply_rope`), without gradient; with `sign` -1 they
    are rotated back."""
    turned = 2 * cos.shape[-1]
    if turned < x.shape[-1]:
        return torch.cat((rotate(x[..., :turned], cos, sin, sign), x[..., turned:]), -1)
    kernels = gpu.layer_kernels(x, cos, sin) if x.dim() == 3 else None
    if kernels is not None:
        return kernels.rope(x, cos, sin, sign)
    cos, sin = cos.unsqueeze(-2), sin.unsqueeze(-2)
    out = torch.empty_like(x)
    x1, x2 = x.chunk(2, dim=-1)
    y1, y2 = out.chunk(2, dim=-1)
    torch.mul(x1, cos, out=y1).addcmul_(x2, sin, value=-sign)
    torch.mul(x2, cos, out=y2).addcmul_(x1, sin, value=sign)
    return out


class _ApplyRope(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        ctx.save_for_backward(cos, sin)
        return rotate(x, cos, sin, 1.0)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        cos, sin = ctx.saved_tensors
        return rotate(grad, cos, sin, -1.0), None, None


def apply_rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate heads `x` [t, ..., heads, head_dim]; `cos`, `sin` [t, ..., rotated / 2] from `Rope.cos_sin`.

    The two halves of the first `rotated` numbers of a head are rotated against each other (the layout of Hugging Face
    checkpoints); numbers after them stay. The backward pass rotates by the opposite angle, so autograd does not store
    the products.
    """
    return _ApplyRope.apply(x, cos, sin)
