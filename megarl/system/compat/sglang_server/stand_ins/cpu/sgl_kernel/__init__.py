"""Stand-in for SGLang's CUDA kernels, whose import needs libcuda. Every name exists and raises when it is called.

One operator is implemented, because the sampler calls it on a CPU too: the hash that gives the noise of seeded
sampling.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

_MASK = 0xFFFFFFFF


def __getattr__(name: str) -> Callable[..., Any]:
    if name.startswith("__"):
        raise AttributeError(name)

    def missing(*args: Any, **kwargs: Any) -> Any:
        raise RuntimeError(f"sgl_kernel.{name} needs CUDA")

    return missing


def _rotl(x: Tensor, bits: int) -> Tensor:
    return ((x << bits) | (x >> (32 - bits))) & _MASK


def _mix(state: Tensor, block: Tensor) -> Tensor:
    """Return one round of MurmurHash3 (x86, 32 bit) over a 4-byte block; all values are int64 in [0, 2**32)."""
    block = _rotl(block * 0xCC9E2D51 & _MASK, 15) * 0x1B873593 & _MASK
    return (_rotl(state ^ block, 13) * 5 + 0xE6546B64) & _MASK


def murmur_hash32(seed: Tensor, positions: Tensor, columns: Tensor) -> Tensor:
    """Return int64 [n, m] in [0, 2**32): the hashes of all (seed and position [n], column [m]). The hashed 16 bytes are
    the seed's low and high word, the position and the column.
    """
    seed = seed.view(torch.int64)
    state = _mix(torch.zeros_like(seed), seed & _MASK)
    state = _mix(state, (seed >> 32) & _MASK)
    state = _mix(state, positions.to(torch.int64) & _MASK)
    hashed = _mix(state[:, None], columns.to(torch.int64)[None, :] & _MASK) ^ 16
    hashed = (hashed ^ (hashed >> 16)) * 0x85EBCA6B & _MASK
    hashed = (hashed ^ (hashed >> 13)) * 0xC2B2AE35 & _MASK
    return hashed ^ (hashed >> 16)


_LIBRARY = torch.library.Library("sgl_kernel", "FRAGMENT")
_LIBRARY.define("murmur_hash32_cpu(Tensor seed, Tensor positions, Tensor columns) -> Tensor")
_LIBRARY.impl("murmur_hash32_cpu", murmur_hash32, "CPU")
# The processor file of Qwen's vision-language models imports models that need these names. Calling one raises.
for _name in (
    "fused_sigmoid_mul_cpu",
    "fused_qk_gemma_rmsnorm_cpu",
    "fused_qk_gemma_rmsnorm_with_gate_cpu",
    "fused_qkvzba_split_reshape_cat_contiguous_cpu",
    "fused_sigmoid_gating_delta_rule_update_cpu",
    "fused_gdn_gating_cpu",
):
    _LIBRARY.define(f"{_name}() -> ()")
