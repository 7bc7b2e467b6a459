"""Experts in mxfp4, as gpt-oss is published: 4-bit numbers, of which every 32 share a power of two.

    mlp.experts.gate_up_proj_blocks  uint8 [experts, out, in / 32, 16]  two numbers per byte, the first in the low bits
    mlp.experts.gate_up_proj_scales  uint8 [experts, out, in / 32]      exponent of 2, plus 127

They are read as the tensor that they stand for: mlp.experts.gate_up_proj, bfloat16 [experts, in, out]. Source:
`integrations/mxfp4.py` in transformers 5.23, and the OCP Microscaling Formats specification 1.0.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from megarl.architectures import ARCHITECTURES
from megarl.system.errors import ConfigError

if TYPE_CHECKING:
    from torch import Tensor

BLOCKS, SCALES = "_blocks", "_scales"
DTYPE = "MXFP4"
_GROUP, _BIAS = 32, 127
_MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


def has_stacks(model_type: object) -> bool:
    """Return whether checkpoints of an architecture have one tensor for all experts of a layer."""
    known = ARCHITECTURES.get(str(model_type))
    return known is not None and any(rule.stacked for rule in known.tensors)


def packed_tensors(shapes: Mapping[str, tuple[int, ...]], where: str) -> dict[str, tuple[int, int, int]]:
    """Return the name and unpacked shape [experts, in, out] of each tensor that a checkpoint has in mxfp4.

    Args:
        shapes: shapes of the tensors in the files, by name.
        where: the checkpoint, for errors.

    Raises:
        ConfigError: blocks without their scales, or of other shapes.
    """
    packed = {}
    for blocks in shapes:
        if not blocks.endswith(BLOCKS):
            continue
        name = blocks.removesuffix(BLOCKS)
        shape, scales = shapes[blocks], shapes.get(name + SCALES)
        if len(shape) != 4 or shape[3] != _GROUP // 2 or scales != shape[:3]:
            raise ConfigError(
                f"tensor {name!r} is quantised in an unknown format",
                where=where,
                found=f"blocks {shape}, scales {scales}",
                allowed="mxfp4: blocks [experts, out, in / 32, 16], scales [experts, out, in / 32]",
                fix="copy or download the model again, or use the unquantised model",
            )
        packed[name] = (shape[0], shape[2] * _GROUP, shape[1])
    return packed


class PackedSlice:
    """A stack of matrices in mxfp4, with the interface of a slice of an opened safetensors file.

    Args:
        blocks, scales: slices of the opened file.
    """

    def __init__(self, blocks: Any, scales: Any) -> None:
        self._blocks, self._scales = blocks, scales

    def get_shape(self) -> list[int]:
        """Return the shape [experts, in, out]."""
        experts, out, groups, _ = self._blocks.get_shape()
        return [experts, groups * _GROUP, out]

    def get_dtype(self) -> str:
        """Return the name of the MXFP4 format, where a safetensors slice returns its dtype."""
        return DTYPE

    def __getitem__(self, index: Any) -> Tensor:
        """Return a part of the tensor [experts, in, out] as bfloat16; the matrices of experts are decoded in turn."""
        import torch

        experts, rows, columns = (slice(0, size) for size in self.get_shape()) if index is ... else index
        groups = slice(rows.start // _GROUP, -(-rows.stop // _GROUP))
        inside = slice(rows.start - groups.start * _GROUP, rows.stop - groups.start * _GROUP)
        count = (experts.stop - experts.start, rows.stop - rows.start, columns.stop - columns.start)
        out = torch.empty(count, dtype=torch.bfloat16)
        for number, expert in enumerate(range(experts.start, experts.stop)):
            place = slice(expert, expert + 1)
            values = unpack(self._blocks[place, columns, groups][0], self._scales[place, columns, groups][0])
            out[number] = values[:, inside].t()
        return out


def unpack(blocks: Tensor, scales: Tensor) -> Tensor:
    """Return the numbers, bfloat16 [out, in], of blocks uint8 [out, in / 32, 16] and scales uint8 [out, in / 32]."""
    import torch

    table = torch.tensor([*_MAGNITUDES, *(-number for number in _MAGNITUDES)])
    codes = torch.stack((blocks & 15, blocks >> 4), -1).flatten(2)
    values = torch.ldexp(table[codes.int()], scales[..., None].int() - _BIAS)
    return values.to(torch.bfloat16).flatten(1)
