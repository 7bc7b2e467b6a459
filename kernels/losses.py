"""CPU kernels of token losses: loss, derivative and statistics in one pass. The torch forms are in algorithms/losses.

Sixteen passes over tensors as long as the batch become one. losses.cpp is compiled like cpu.cpp; without a compiler, or
for other dtypes than float32, callers use torch operations instead.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from megarl.kernels.cpu import compiled

_BLOCK_TOKENS = 1 << 14
_P, _I, _F = ctypes.c_void_p, ctypes.c_int64, ctypes.c_float


class LossKernels:
    """The compiled kernels."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self._ppo, self._value = library.megarl_ppo_loss, library.megarl_value_loss
        self._ppo.argtypes = [*[_P] * 4, _I, _I, *[_P] * 3, _F, _F, _F]
        self._value.argtypes = [*[_P] * 4, _I, _I, *[_P] * 3, _F]
        for function in (self._ppo, self._value):
            function.restype = None

    def ppo(
        self, inputs: list[Tensor], mask: Tensor, low: float, high: float, dual: float | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Loss and slope in the shape of `mask`, statistics [blocks, 7]; inputs are logp, old_logp, advantages."""
        return self._call(self._ppo, inputs, mask, 7, low, high, 0.0 if dual is None else dual)

    def value(self, inputs: list[Tensor], mask: Tensor, clip: float | None) -> tuple[Tensor, Tensor, Tensor]:
        """Loss and slope in the shape of `mask`, statistics [blocks, 3]; inputs are values, old values, returns."""
        return self._call(self._value, inputs, mask, 3, -1.0 if clip is None else clip)

    @staticmethod
    def _call(
        function: Callable[..., None], inputs: list[Tensor], mask: Tensor, width: int, *settings: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        if mask.dtype != torch.bool or any(x.shape != mask.shape for x in inputs):
            shapes = [tuple(x.shape) for x in inputs]
            raise ValueError(f"inputs and a bool mask of one shape, got {shapes} and {mask.dtype} {tuple(mask.shape)}")
        held = [x.detach().contiguous() for x in (*inputs, mask)]
        loss, slope = torch.empty_like(held[0]), torch.empty_like(held[0])
        stats = torch.zeros(-(-mask.numel() // _BLOCK_TOKENS), width, dtype=torch.float64)
        pointers = [x.data_ptr() for x in held]
        function(*pointers, mask.numel(), _BLOCK_TOKENS, loss.data_ptr(), slope.data_ptr(), stats.data_ptr(), *settings)
        return loss, slope, stats


def loss_kernels(*inputs: Tensor) -> LossKernels | None:
    """The kernels, where they are there and can take these inputs."""
    if not all(x.is_cpu and x.dtype == torch.float32 for x in inputs):
        return None
    return _load()


@functools.cache
def _load() -> LossKernels | None:
    library = compiled(Path(__file__).with_suffix(".cpp"))
    return None if library is None else LossKernels(library)
