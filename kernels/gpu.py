"""Access to the Triton kernels, if Triton is installed: layers_gpu, experts_gpu, logits_gpu and decode_gpu."""

from __future__ import annotations

import functools
import warnings
from types import ModuleType
from typing import NamedTuple

import torch
from torch import Tensor

_DTYPES = frozenset((torch.float32, torch.bfloat16, torch.float16))


class Kernels(NamedTuple):
    """The modules of Triton kernels; all are None if Triton cannot be used."""

    layers: ModuleType | None = None
    logits: ModuleType | None = None
    decode: ModuleType | None = None
    experts: ModuleType | None = None


@functools.cache
def triton_kernels() -> Kernels:
    """Return the kernel modules; without Triton, warn once and return None for each."""
    try:
        from megarl.kernels import decode_gpu, experts_gpu, layers_gpu, logits_gpu
    except ImportError as error:
        effect = "torch operations compute layers, log-probs and decode steps, which is slower"
        warnings.warn(f"{effect}: {error}", stacklevel=2)
        return Kernels()
    return Kernels(layers_gpu, logits_gpu, decode_gpu, experts_gpu)


def layer_kernels(*tensors: Tensor) -> ModuleType | None:
    """Return the kernels for the `tensors` of a layer's operation; None to use torch operations: on a CPU, for float64,
    which the kernels would round, and for tensors of several dtypes.
    """
    return triton_kernels().layers if _fit(*tensors) else None


def expert_kernels(rows: Tensor) -> ModuleType | None:
    """Return the kernels that sum `rows`; None to use torch operations, such as for float64."""
    return triton_kernels().experts if _fit(rows) else None


def decode_kernels(dtype: torch.dtype) -> ModuleType | None:
    """Return the kernels of a decode step in `dtype` on a GPU; None to use torch operations, such as for float64."""
    return triton_kernels().decode if dtype in _DTYPES else None


def _fit(*tensors: Tensor) -> bool:
    """Return whether the tensors are on a GPU and have one dtype that the kernels support."""
    dtypes = {x.dtype for x in tensors}
    return tensors[0].is_cuda and len(dtypes) == 1 and dtypes <= _DTYPES
