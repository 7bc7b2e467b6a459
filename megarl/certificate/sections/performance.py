"""Measures the roofline: rates of matrix products, memory, attention and the host link, beside the data sheet's."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path

import torch

from megarl.certificate.findings import Findings
from megarl.models.layers.attention.scores import Scores
from megarl.planning.hardware import KINDS, Hardware, best_seconds, measure_peak
from megarl.system.device import DTYPES, device, has_cuda

_SECONDS = 1.0
_REPEATS = 10  # calls between two readings of the clock on a GPU, where the start of each kernel takes microseconds


def run(found: Findings, folder: Path) -> None:
    """Record in `found` the measured rates of matrix products, memory, copies and attention on this process's
    device."""
    kind = hardware_here()

    def beside(field: str) -> tuple[float | None, str]:
        return (None, "") if kind is None else (getattr(kind, field), "data sheet")

    size = 8192 if has_cuda() else 1024
    for dtype in ("bf16", "fp32"):
        rate = measure_peak(dtype, _SECONDS, size=size) / 1e12
        found.figure(f"products of {size} x {size}, {dtype}", rate, "TFLOP/s", *beside(f"{dtype}_tflops"))
    nbytes = 1 << (30 if has_cuda() else 26)
    source = torch.zeros(nbytes, dtype=torch.uint8, device=device())
    target = torch.empty_like(source)
    moved = 2 * nbytes / _best_seconds(lambda: target.copy_(source)) / 1e12
    found.figure("memory, read and written", moved, "TB/s", *beside("memory_tb_s"))
    if has_cuda():
        host = torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)
        for name, a, b in (("from", source, host), ("to", host, source)):
            rate = nbytes / _best_seconds(functools.partial(a.copy_, b, non_blocking=True)) / 1e9
            found.figure(f"copies {name} locked host memory", rate, "GB/s", *beside("host_gb_s"))
    for tokens in (1024, 4096, 16384) if has_cuda() else (512,):
        forward, both = _attention(tokens)
        name, peak = f"attention, sequences of {tokens}", beside("bf16_tflops")
        found.figure(f"{name}, forwards", forward / 1e12, "TFLOP/s", *peak)
        found.figure(f"{name}, with gradients", both / 1e12, "TFLOP/s", *peak)


def hardware_here() -> Hardware | None:
    """Return the kind of this machine's GPUs; None without GPUs, or if `KINDS` lacks it."""
    if not has_cuda():
        return None
    name = torch.cuda.get_device_name().lower()
    return max((kind for kind in KINDS.values() if kind.name in name), key=lambda kind: len(kind.name), default=None)


def _best_seconds(call: Callable[[], object]) -> float:
    return best_seconds(call, _SECONDS, _REPEATS if has_cuda() else 1)


def _attention(tokens: int, heads: int = 32, groups: int = 8, dim: int = 128) -> tuple[float, float]:
    """Measure the FLOP/s of causal attention: forward, and with the backward pass (3.5 times the FLOPs). Only the pairs
    that the mask allows count, half of all."""
    from megarl.models.layers.attention.training import attend
    from megarl.models.packing import pack_stream

    sequences = max(1, 16384 // tokens) if has_cuda() else 1
    packed = pack_stream([tokens] * sequences, device=device()).params
    shapes = [(tokens * sequences, count, dim) for count in (heads, groups, groups)]
    q, k, v = (torch.randn(shape, device=device()).to(DTYPES["bf16"]).requires_grad_() for shape in shapes)
    upstream = torch.ones_like(q)
    flops = sequences * 4 * tokens * tokens * dim * heads / 2

    def both() -> None:
        attend(q, k, v, packed, Scores(dim**-0.5), None).backward(upstream)

    def forward() -> None:
        with torch.no_grad():
            attend(q, k, v, packed, Scores(dim**-0.5), None)

    return flops / _best_seconds(forward), 3.5 * flops / _best_seconds(both)
