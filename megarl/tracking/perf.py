"""Peak rates of devices, and the `perf/*` metrics from FLOPs, tokens and seconds."""

from __future__ import annotations

import contextlib
import json
import os
import re
from pathlib import Path

from megarl.planning.hardware import measure_peak
from megarl.system import device
from megarl.system.processes import write_atomically

# Dense matrix TFLOP/s from the vendors' data sheets (no sparsity): (bf16, tf32, fp32). The first entry whose
# name is a part of the GPU's name counts, so `L40S` stands before `L40`.
_GPUS: dict[str, tuple[float, float, float]] = {
    "GB300": (2500, 1250, 77),
    "GB200": (2500, 1250, 80),
    "B300": (2250, 1100, 75),
    "B200": (2250, 1100, 75),
    "H200": (989, 494, 67),
    "GH200": (989, 494, 67),
    "H100 PCIe": (756, 378, 51),
    "H100 NVL": (835, 417, 60),
    "H100": (989, 494, 67),
    "H800": (989, 494, 67),
    "H20": (148, 74, 44),
    "A100": (312, 156, 19.5),
    "A800": (312, 156, 19.5),
    "A40": (150, 75, 37),
    "A30": (165, 82, 10.3),
    "A10": (125, 62, 31),
    "L40S": (362, 183, 91.6),
    "L40": (181, 90.5, 90.5),
    "L4": (121, 60, 30.3),
    "RTX 5090": (209, 105, 105),
    "RTX 4090": (165, 82.6, 82.6),
    "RTX 3090": (71, 35.6, 35.6),
    "RTX 6000 Ada": (364, 182, 91),
    "MI355X": (2300, 0, 157),
    "MI325X": (1307, 654, 163),
    "MI300X": (1307, 654, 163),
    "MI250X": (383, 0, 96),
}

_MEASUREMENTS = 5
"""Number of runs that measure a CPU's peak, because other programs can slow its AMX to a third for seconds."""


def known_peak(name: str, dtype: str, *, tf32: bool = False) -> float | None:
    """Return the peak FLOP/s of the GPU with this marketing name for dtype `bf16` or `fp32`; None when the table lacks
    it.
    """
    for part, (bf16, tensor32, fp32) in _GPUS.items():
        if re.search(re.escape(part) + r"(?!\d)", name, re.IGNORECASE):  # an RTX A4000 is no A40
            rate = bf16 if dtype == "bf16" else (tensor32 or fp32) if tf32 else fp32
            return rate * 1e12
    return None


def peak_flops(dtype: str, stated_tflops: float | None = None) -> float:
    """Return the peak FLOP/s of this process's device for `bf16`, `fp32` or `fp64`: `stated_tflops` if set,
    else from a table of GPU names, or on a CPU measured by the first `_MEASUREMENTS` calls on a machine: the fastest.
    """
    if stated_tflops is not None:
        return stated_tflops * 1e12
    if device.has_cuda():
        import torch

        name = torch.cuda.get_device_name()
        rate = known_peak(name, dtype, tf32=torch.backends.cuda.matmul.allow_tf32)
        if rate is not None:
            return rate
    return _remembered_peak(dtype)


def remeasured_peak(peak: float, dtype: str, stated_tflops: float | None = None) -> float:
    """Measure a CPU's peak again; return the larger one, and remember it. Called when a step has exceeded `peak`, which
    was measured while the machine was busy. For other peaks, return `peak`.
    """
    if stated_tflops is not None or device.has_cuda():
        return peak
    return max(peak, _remembered_peak(dtype, again=True))


def _remembered_peak(dtype: str, *, again: bool = False) -> float:
    import torch

    from megarl.system.machine import processor_name

    key = f"{processor_name()}|threads={torch.get_num_threads()}|{dtype}|torch={torch.__version__}"
    path = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "megarl" / "measured_peaks.json"
    try:
        known = json.loads(path.read_text())
    except (OSError, ValueError):
        known = {}
    peak, times = known.get(key, (0.0, 0))
    if times < _MEASUREMENTS or again:
        peak = max(measure_peak(dtype), peak)
        known[key] = peak, times + 1
        with contextlib.suppress(OSError):  # if the home folder is read-only, the peak is measured again next time
            write_atomically(path, json.dumps(known, indent=1))
    return float(peak)


def perf_metrics(*, tokens: float, seconds: float, devices: int, flops: float | None, peak: float) -> dict[str, float]:
    """Return the `perf/*` metrics of one step from its tokens and model FLOPs (None: unknown) over all devices, its
    wall seconds, and the peak FLOP/s of one device.
    """
    metrics = {
        "perf/total_tokens": float(tokens),
        "perf/throughput": tokens / seconds / devices,
        "perf/max_memory_gb": device.peak_memory_gb(),
    }
    if flops is not None:
        metrics["perf/tflops"] = flops / seconds / devices / 1e12
        metrics["perf/mfu"] = flops / seconds / devices / peak
    return metrics
