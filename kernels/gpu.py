"""The Triton kernels of a GPU, where there is Triton: `layers_gpu.py`, `logits_gpu.py`, `decode_gpu.py`."""

from __future__ import annotations

import functools
import warnings
from types import ModuleType
from typing import NamedTuple

import torch
from torch import Tensor


class Kernels(NamedTuple):
    """The modules, or None in place of each."""

    layers: ModuleType | None = None
    logits: ModuleType | None = None
    decode: ModuleType | None = None


@functools.cache
def triton_kernels() -> Kernels:
    """Return the kernels; none of them, with a warning, where there is no Triton."""
    try:
        from megarl.kernels import decode_gpu, layers_gpu, logits_gpu
    except ImportError as error:
        warnings.warn(
            f"torch operations compute layers, log-probs and decode steps, which is slower: {error}", stacklevel=2
        )
        return Kernels()
    return Kernels(layers_gpu, logits_gpu, decode_gpu)


def layer_kernels(*tensors: Tensor) -> ModuleType | None:
    """Return the kernels for `tensors` of one layer; None: torch operations, as for float64, which the kernels would
    round, and for tensors of several dtypes, whose result has the wider one."""
    dtypes = {x.dtype for x in tensors}
    if not tensors[0].is_cuda or len(dtypes) > 1 or not dtypes <= {torch.float32, torch.bfloat16, torch.float16}:
        return None
    return triton_kernels().layers
