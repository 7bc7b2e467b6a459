"""Which Triton kernels tensors on a GPU take: those of `logits_gpu.py` and `layers_gpu.py`, where there is Triton."""

from __future__ import annotations

import functools
import importlib
import warnings
from types import ModuleType

import torch
from torch import Tensor


@functools.cache
def triton_kernels(name: str) -> ModuleType | None:
    """Return the module `name` of this package; None, with a warning, where there is no Triton."""
    try:
        return importlib.import_module(f"megarl.kernels.{name}")
    except ImportError as error:
        warnings.warn(f"torch operations replace the kernels of {name}, which is slower: {error}", stacklevel=2)
        return None


def layer_kernels(*tensors: Tensor) -> ModuleType | None:
    """Return megarl/kernels/layers_gpu.py for `tensors` of one layer; None: torch operations, as for float64, which the
    kernels would round, and for tensors of several dtypes, whose result has the wider one."""
    dtypes = {x.dtype for x in tensors}
    if not tensors[0].is_cuda or len(dtypes) > 1 or not dtypes <= {torch.float32, torch.bfloat16, torch.float16}:
        return None
    return triton_kernels("layers_gpu")
