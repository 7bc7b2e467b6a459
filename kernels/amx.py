"""Products of bfloat16 matrices on CPUs with AMX, where torch's take longer: with few rows, and for weights' gradients.

    linear          y = x W^T + b for a packed W: a decode step reads W once, in the order of memory
    add_gradient    sums += dy^T x in float32: a weight's gradient without a bf16 copy that is rounded and added later

Other products are torch's, which reach the same speed. amx.cpp is compiled like cpu.cpp, on processors with AMX only.
A row of a result does not depend on other rows, nor on their number. Generation chooses between these products and
torch's by the number of rows (`AMX_ROWS` in megarl/rollout/embedded/model.py), so that a row's rounding depends on
how many rows are multiplied together.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from torch import Tensor

from megarl.kernels.build import compiled, difference

UNIT = 32
"""Rows and columns of a weight are multiples of this number."""

_SOURCE = Path(__file__).with_suffix(".cpp")
_P, _I = ctypes.c_void_p, ctypes.c_int64


class AmxKernels:
    """The compiled products. Tensors are contiguous bfloat16 on the CPU, unless said otherwise; no autograd."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self._pack, self._linear = library.megarl_amx_pack, library.megarl_amx_linear
        self._add_gradient = library.megarl_amx_add_gradient
        self._pack.argtypes, self._pack.restype = [_P, _P, _I, _I], None
        self._linear.argtypes, self._linear.restype = [*[_P] * 4, *[_I] * 3], None
        self._add_gradient.argtypes, self._add_gradient.restype = [*[_P] * 3, *[_I] * 3], None

    @staticmethod
    def fits(weight: Tensor) -> bool:
        """Return whether the kernels multiply by this weight [out, in]."""
        return (
            weight.is_cpu
            and weight.dtype == torch.bfloat16
            and weight.dim() == 2
            and not any(n % UNIT for n in weight.shape)
        )

    def pack(self, weight: Tensor) -> PackedWeight:
        """Return a copy of the weight [out, in] in the order in which `PackedWeight.multiply` reads it."""
        assert self.fits(weight), "callers check it"
        weight = weight.contiguous()
        tiles = torch.empty_like(weight)
        self._pack(weight.data_ptr(), tiles.data_ptr(), *weight.shape)
        return PackedWeight(self._linear, tiles)

    def add_gradient(self, grad: Tensor, x: Tensor, sums: Tensor) -> None:
        """Add grad^T x to `sums`.

        Args:
            grad: [n, out], gradient of the outputs of a linear layer.
            x: [n, in], the layer's inputs.
            sums: float32 [out, in], contiguous.
        """
        assert sums.is_contiguous(), "callers check it"
        assert sums.dtype == torch.float32, "callers check it"
        grad, x = grad.contiguous(), x.contiguous()
        self._add_gradient(grad.data_ptr(), x.data_ptr(), sums.data_ptr(), len(x), *sums.shape)


class PackedWeight:
    """A weight [out, in] in tiles; `tiles` has its shape."""

    def __init__(self, linear: Callable[..., None], tiles: Tensor) -> None:
        self._linear, self._tiles = linear, tiles

    def multiply(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """Return x W^T + b [n, out] for `x` [n, in] and a bfloat16 `bias` [out]; it is rounded once."""
        x, (rows, width) = x.contiguous(), self._tiles.shape
        out = x.new_empty(len(x), rows)
        pointers = (None if t is None else t.data_ptr() for t in (x, self._tiles, bias, out))
        self._linear(*pointers, len(x), rows, width)
        return out


def check(library: ctypes.CDLL) -> str | None:
    """Compare the products with those in float64 on random input; return what differs, or None."""
    generator = torch.Generator("cpu").manual_seed(1)
    for name, result, expected, tolerance in _cases(AmxKernels(library), generator):
        distance = difference(result, expected, tolerance)
        if distance is not None:
            return f"{name} by {distance:.1g} of the largest number"
    return None


def _cases(kernels: AmxKernels, generator: torch.Generator) -> Iterator[tuple[str, Tensor, Tensor, float]]:
    """Yield (name, result, the correct result in float64, largest error relative to the largest number)."""

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float32, device="cpu").bfloat16()

    # Test one token, one row more than a tile has, several tiles, and more tokens and columns than one block of the
    # gradient has.
    for tokens, rows, width in ((1, 32, 64), (17, 96, 32), (50, 64, 96), (1030, 32, 672)):
        x, weight, bias, grad = draw(tokens, width), draw(rows, width), draw(rows), draw(tokens, rows)
        product = x.double() @ weight.double().t()
        packed = kernels.pack(weight)
        yield f"product of {tokens} rows", packed.multiply(x), product, 1e-2  # rounding to bf16 by itself gives 4e-3
        yield f"product of {tokens} rows and a bias", packed.multiply(x, bias), product + bias.double(), 1e-2
        sums = draw(rows, width).float()
        expected = sums.double() + grad.double().t() @ x.double()
        kernels.add_gradient(grad, x, sums)
        yield f"gradient from {tokens} rows", sums, expected, 1e-5  # sums in float32 are off by 2e-7


@functools.cache
def load() -> AmxKernels | None:
    """Return the products, compiled if they are not cached.

    Returns:
        None if the processor or the system has no AMX; with one warning, if the compiler has none or the check fails.
    """
    if not _has_tiles():
        return None
    library = compiled(_SOURCE, check)
    return None if library is None else AmxKernels(library)


def _has_tiles() -> bool:
    """Return whether the processor has AMX and Linux lets this process use it, which has to be asked for."""
    info = Path("/proc/cpuinfo")
    if not info.exists() or "amx_bf16" not in info.read_text():
        return False
    arch_prctl, request, tile_data = 158, 0x1023, 18
    return ctypes.CDLL(None).syscall(arch_prctl, request, tile_data) == 0


def add_gradient(sums: Tensor, grad: Tensor, x: Tensor) -> None:
    """Add the gradient grad^T x of a weight to `sums` by `AmxKernels.add_gradient`."""
    kernels = load()
    assert kernels is not None, "callers check it"
    kernels.add_gradient(grad, x, sums)
