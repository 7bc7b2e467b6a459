"""CPU kernels of token losses: loss, derivative and statistics in one pass. The torch forms are in algorithms/losses.

Sixteen passes over tensors as long as the batch become one. losses.cpp is compiled like cpu.cpp; without a compiler, or
for other dtypes than float32, callers use torch operations instead.
"""

from __future__ import annotations

import ctypes
import functools
import math
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from megarl.kernels.build import compiled

_BLOCK_TOKENS = 1 << 14
_SOURCE = Path(__file__).with_suffix(".cpp")
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


def check(library: ctypes.CDLL) -> str | None:
    """What differs from the formulas in float64 on random input, None where nothing does."""
    kernels, generator = LossKernels(library), torch.Generator("cpu").manual_seed(1)
    for n in (1, 15, 33, 1003, _BLOCK_TOKENS + 5):
        x, y, z = (torch.randn(n, generator=generator, dtype=torch.float32, device="cpu") for _ in range(3))
        y[::10] *= 60.0  # log-ratios beyond 20
        # Sixteenths: no ratio or distance comes near a clip, where rounding would decide on which side it lies.
        x, y, z = (t.mul(16).round().div(16) for t in (x, x + 0.5 * y, z))
        mask = torch.rand(n, generator=generator, dtype=torch.float32, device="cpu") < 0.7
        inputs = [torch.where(mask, t, float("nan")) for t in (x, y, z)]
        exact = [torch.where(mask, t, 0.0).double() for t in (x, y, z)]
        for dual in (None, 1.5):
            if not _same(kernels.ppo(inputs, mask, 0.2, 0.28, dual), _ppo_reference(exact, mask, 0.2, 0.28, dual)):
                return f"PPO's loss of {n} tokens with a dual clip of {dual}"
        for clip in (None, 0.3):
            if not _same(kernels.value(inputs, mask, clip), _value_reference(exact, mask, clip)):
                return f"the value loss of {n} tokens with a clip of {clip}"
    return None


def _same(found: tuple[Tensor, Tensor, Tensor], expected: tuple[Tensor, Tensor, list[Tensor]]) -> bool:
    """Whether loss, slope and all blocks' statistics are the expected ones but for rounding in float32."""
    loss, slope, blocks = found
    stats = blocks.sum(0)
    if blocks.shape[1] == 7:
        stats[3], stats[4] = blocks[:, 3].min(), blocks[:, 4].max()
    pairs = zip((loss, slope, stats), (*expected[:2], torch.stack(expected[2])), strict=True)
    return all(torch.allclose(mine.double(), right, rtol=1e-4, atol=1e-5) for mine, right in pairs)


def _ppo_reference(
    inputs: list[Tensor], mask: Tensor, low: float, high: float, dual: float | None
) -> tuple[Tensor, Tensor, list[Tensor]]:
    """Loss, slope, and the statistics of `Ppo` in losses.cpp; masked inputs are zero."""
    logp, old, advantages = inputs
    raw, cost = logp - old, -advantages
    d = raw.clamp(-20, 20)
    r = d.exp()
    plain, bounded = cost * r, cost * r.clamp(1 - low, 1 + high)
    loss, over = torch.maximum(plain, bounded), torch.zeros_like(mask)
    if dual is not None:
        over = (cost > 0) & (cost * dual < loss)
        loss = torch.where(over, cost * dual, loss)
    cut, ratios = bounded > plain, r[mask]
    flat = cut | (raw.abs() > 20) | over
    ends = (ratios.min(), ratios.max()) if len(ratios) else (torch.tensor(math.inf), torch.tensor(-math.inf))
    stats = [mask.sum(), -d.sum(), ratios.sum(), *ends, cut.sum(), over.sum()]
    return loss, plain.masked_fill(flat, 0), [x.double() for x in stats]


def _value_reference(inputs: list[Tensor], mask: Tensor, clip: float | None) -> tuple[Tensor, Tensor, list[Tensor]]:
    """Loss, slope, and the statistics of `Value` in losses.cpp; masked inputs are zero."""
    values, old, returns = inputs
    error = values - returns
    near = values if clip is None else values.clamp(old - clip, old + clip)
    bounded = (near - returns).square()
    cut = bounded > error.square()
    stats = [mask.sum(), values.sum(), cut.sum()]
    return torch.maximum(bounded, error.square()) / 2, error.masked_fill(cut, 0), [x.double() for x in stats]


@functools.cache
def _load() -> LossKernels | None:
    library = compiled(_SOURCE, check)
    return None if library is None else LossKernels(library)
