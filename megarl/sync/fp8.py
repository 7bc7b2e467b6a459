"""Block-wise FP8: float8_e4m3fn values with a float32 scale per block of 128 x 128 (DeepSeek-V3, arXiv:2412.19437)."""

from __future__ import annotations

import torch
from torch import Tensor

from megarl.sync.plan import FP8_BLOCK

FP8_MAX = 448.0  # largest finite float8_e4m3fn


def quantize_blocks(weight_RC: Tensor) -> tuple[Tensor, Tensor]:
    """Quantise a matrix.

    Returns:
        float8_e4m3fn [R, C], and float32 [ceil(R / 128), ceil(C / 128)] with value = quantised * scale. The largest
        magnitude of a block becomes 448; a block of zeros has scale 1.
    """
    rows, columns = weight_RC.shape
    down, across = -(-rows // FP8_BLOCK), -(-columns // FP8_BLOCK)
    padded = weight_RC.new_zeros(down * FP8_BLOCK, across * FP8_BLOCK, dtype=torch.float32)
    padded[:rows, :columns] = weight_RC
    blocks = padded.view(down, FP8_BLOCK, across, FP8_BLOCK)
    largest = blocks.abs().amax(dim=(1, 3))
    scale = torch.where(largest > 0, largest / FP8_MAX, torch.ones_like(largest))
    scaled = (blocks / scale[:, None, :, None]).clamp(-FP8_MAX, FP8_MAX)
    quantised = scaled.view(down * FP8_BLOCK, across * FP8_BLOCK)[:rows, :columns]
    return quantised.to(torch.float8_e4m3fn).contiguous(), scale
