"""The Triton kernels of a GPU, where there is Triton: `layers_gpu.py`, `experts_gpu.py`, `logits_gpu.py`,
`decode_gpu.py`."""

from __future__ import annotations

import functools
import warnings
from types import ModuleType
from typing import NamedTuple

import torch
from torch import Tensor

_DTYPES = frozenset((torch.float32, torch.bfloat16, torch.float16))


class Kernels(NamedTuple):
    """The modules, or None in place of each."""

    layers: ModuleType | None = None
    logits: ModuleType | None = None
    decode: ModuleType | None = None
    experts: ModuleType | None = None


@functools.cache
def triton_kernels() -> Kernels:
    """Return the kernels; none of them, with a warning, where there is no Triton."""
    try:
        from megarl.kernels import decode_gpu, experts_gpu, layers_gpu, logits_gpu
    except ImportError as error:
        what = "torch operations compute layers, log-probs and decode steps, which is slower"
        warnings.warn(f"{what}: {error}", stacklevel=2)
        return Kernels()
    return Kernels(layers_gpu, logits_gpu, decode_gpu, experts_gpu)


def layer_kernels(*tensors: Tensor) -> ModuleType | None:
    """Return the kernels for `tensors` of one layer; None: torch operations, as for float64, which the kernels would
    round, and for tensors of several dtypes, whose result has the wider one."""
    return triton_kernels().layers if _fit(*tensors) else None


def expert_kernels(rows: Tensor) -> ModuleType | None:
    """Return the kernels that add up `rows`; None: torch operations, as for float64."""
    return triton_kernels().experts if _fit(rows) else None


def decode_kernels(dtype: torch.dtype) -> ModuleType | None:
    """Return the kernels of a decode step in `dtype` on a GPU; None: torch operations, as for float64."""
    return triton_kernels().decode if dtype in _DTYPES else None


def _fit(*tensors: Tensor) -> bool:
    """Tell whether the kernels take these."""
    dtypes = {x.dtype for x in tensors}
    return tensors[0].is_cuda and len(dtypes) == 1 and dtypes <= _DTYPES
