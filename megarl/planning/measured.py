"""Rates of this machine, measured when they are asked for."""

from __future__ import annotations

import time

from megarl import device
from megarl.errors import UserError

_MEASURE_S = 0.3
_MEASURE_SIZE = 1024
_COPIED = 1 << 26  # bytes: more than caches hold


def measure_peak(dtype: str, seconds: float = _MEASURE_S) -> float:
    """FLOP/s of the best of the square matrix products done in `seconds` on this process's device and threads."""
    import torch

    if dtype not in device.DTYPES:
        raise UserError("unknown dtype", where="peak_flops", found=dtype, allowed=sorted(device.DTYPES))
    a = torch.randn(_MEASURE_SIZE, _MEASURE_SIZE, device=device.device()).to(device.DTYPES[dtype])
    out = torch.empty_like(a)
    torch.mm(a, a, out=out)
    device.synchronize()
    best, end = float("inf"), time.perf_counter() + seconds
    while (start := time.perf_counter()) < end or best == float("inf"):
        torch.mm(a, a, out=out)
        device.synchronize()
        best = min(best, time.perf_counter() - start)
    return 2 * _MEASURE_SIZE**3 / best


def measure_memory(seconds: float = _MEASURE_S) -> float:
    """Bytes per second, read and written, of the best of the copies done in `seconds` with this process's threads."""
    import torch

    source = torch.zeros(_COPIED, dtype=torch.uint8)
    target = torch.zeros_like(source)
    best, end = float("inf"), time.perf_counter() + seconds
    while (start := time.perf_counter()) < end or best == float("inf"):
        target.copy_(source)
        best = min(best, time.perf_counter() - start)
    return 2 * _COPIED / best


def measure_cores() -> tuple[float, float, float]:
    """(FLOP/s in bf16, in fp32, bytes copied per second, read and written) of one core.

    One thread: threads that wait for each other are many times slower where other programs want the cores, too.
    """
    import torch

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        return measure_peak("bf16"), measure_peak("fp32"), measure_memory()
    finally:
        torch.set_num_threads(threads)
