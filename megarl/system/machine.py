"""Hardware and packages of this machine: cores, host memory within its memory cgroups' limits, GPUs, versions."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import os
import platform
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megarl.system.imports import installed_version
from megarl.system.processes import has_nvidia_device, memory_cgroups, shared_memory_free

_ROOT = Path("/")
#: Names of the flags that the kernel reports on x86 and on ARM.
_BF16_FLAGS = ("amx_bf16", "avx512_bf16", "bf16")
#: Names of the files and fields for limit, use and inactive pages, by version of cgroups.
_COUNTERS = {
    1: ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
    2: ("memory.max", "memory.current", "inactive_file"),
}


@dataclass(frozen=True)
class Machine:
    """The resources of this machine that all of its processes together may use.

    Attributes:
        memory: bytes of host memory, installed or allowed by a cgroup.
        has_gpu: whether an NVIDIA driver is loaded and CUDA_VISIBLE_DEVICES does not hide all GPUs.
        gpu_memory: bytes of the smallest visible GPU; None without a GPU, or if its driver does not report them.
        gpu_certain: False if CUDA_VISIBLE_DEVICES is ambiguous; `gpu_memory` is then the memory of the machine's
            smallest GPU.
        shared_memory: free bytes in /dev/shm; None if this file system does not exist.
    """

    cores: int
    memory: float
    has_gpu: bool = False
    gpu_memory: float | None = None
    gpu_certain: bool = True
    shared_memory: int | None = None


def this_machine() -> Machine:
    """Return the machine that this process runs on."""
    visible = visible_gpus(os.environ)
    has_gpu = has_nvidia_device() and visible != []
    in_bus_order = os.environ.get("CUDA_DEVICE_ORDER") == "PCI_BUS_ID"
    size, certain = smallest_gpu(visible, in_bus_order=in_bus_order) if has_gpu else (None, True)
    return Machine(available_cores(), host_memory(), has_gpu, size, certain, shared_memory_free())


def visible_gpus(environment: Mapping[str, str]) -> list[str] | None:
    """Return the GPU numbers and UUIDs in CUDA_VISIBLE_DEVICES, up to the first invalid one; None: all GPUs are
    visible."""
    text = environment.get("CUDA_VISIBLE_DEVICES")
    if text is None:
        return None
    names = [name.strip() for name in text.split(",")]
    good = [name.isdecimal() or name.startswith(("GPU-", "MIG-")) for name in names]
    return names[: [*good, False].index(False)]


def bf16_products(root: Path = _ROOT) -> str | None:
    """Return the name of the processor's bf16 instructions (AVX512-BF16, AMX or ARM's); None when it has none."""
    flags = processor_flags(root)
    return next((flag for flag in _BF16_FLAGS if flag in flags), None)


def available_cores() -> int:
    """Return the number of CPU cores in this process's affinity mask, or of all cores where the system has no masks."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def host_memory(root: Path = _ROOT) -> float:
    """Return the bytes of host memory that processes here may use together: installed, or the smallest cgroup limit."""
    installed = _fields(root / "proc/meminfo").get("MemTotal:", 0) * 1024
    if not installed:  # only Linux has /proc/meminfo; elsewhere sysconf gives the size
        installed = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return min([installed, *(limit for limit, _ in _cgroups(root))])


def free_host_memory(root: Path = _ROOT) -> float:
    """Return the free bytes of host memory: the smaller of what the kernel reports as available and what the memory
    cgroups leave.
    """
    import psutil

    return min([psutil.virtual_memory().available, *(limit - used for limit, used in _cgroups(root))])


def _cgroups(root: Path) -> list[tuple[float, float]]:
    """Return (limit, used bytes) of each memory cgroup of this process with a limit, without reclaimable bytes."""
    limits = []
    for folder, top, version in memory_cgroups(root):
        limit_name, used_name, inactive = _COUNTERS[version]
        while True:
            with contextlib.suppress(OSError, ValueError):  # not every level has these files, and "max" is not a number
                limit = int((folder / limit_name).read_text())
                cached = _fields(folder / "memory.stat").get(inactive, 0)
                limits.append((float(limit), float(int((folder / used_name).read_text()) - cached)))
            if folder == top or top not in folder.parents:
                break
            folder = folder.parent
    return limits


def _fields(file: Path) -> dict[str, int]:
    """Return the `name number` lines of a file of the kernel; empty if it is missing."""
    with contextlib.suppress(OSError):
        lines = (line.split() for line in file.read_text().splitlines())
        return {words[0]: int(words[1]) for words in lines if len(words) > 1 and words[1].isdecimal()}
    return {}


class _Memory(ctypes.Structure):
    """NVML's structure nvmlMemory_t, in bytes."""

    _fields_ = (("total", ctypes.c_ulonglong), ("free", ctypes.c_ulonglong), ("used", ctypes.c_ulonglong))


def smallest_gpu(
    visible: Sequence[str] | None = None, *, in_bus_order: bool = False, library: str = "libnvidia-ml.so.1"
) -> tuple[float | None, bool]:
    """Return the bytes of the smallest GPU among `visible` (None if the driver's library NVML does not report them),
    and whether this is certain; if not, the smallest of all GPUs. `in_bus_order`: CUDA numbers GPUs like NVML.
    """
    try:
        nvml = ctypes.CDLL(library)
        count, handle = ctypes.c_uint(), ctypes.c_void_p()
        if nvml.nvmlInit_v2() or nvml.nvmlDeviceGetCount_v2(ctypes.byref(count)):
            return None, True
        every: list[float | None] = []
        for index in range(count.value):
            failed = nvml.nvmlDeviceGetHandleByIndex_v2(index, ctypes.byref(handle))
            every.append(None if failed else _gpu_bytes(nvml, handle))
        same = len(set(every)) == 1
        chosen: list[float | None] = []
        certain = True
        for name in visible if visible is not None else []:
            if name.isdecimal() and int(name) < len(every) and (same or in_bus_order):
                chosen.append(every[int(name)])
            elif not name.isdecimal() and not nvml.nvmlDeviceGetHandleByUUID(name.encode(), ctypes.byref(handle)):
                chosen.append(_gpu_bytes(nvml, handle))
            else:
                certain = False
        nvml.nvmlShutdown()
    except (OSError, AttributeError):  # NVML is missing or too old
        return None, True
    known = chosen if visible is not None and certain else every
    return min((size for size in known if size is not None), default=None), certain


def _gpu_bytes(nvml: ctypes.CDLL, handle: ctypes.c_void_p) -> float | None:
    memory = _Memory()
    return None if nvml.nvmlDeviceGetMemoryInfo(handle, ctypes.byref(memory)) else float(memory.total)


_PACKAGES = ("megarl", "torch", "megatron-core", "transformers", "ray", "sglang", "transformer-engine", "flash-attn")


def machine_info() -> dict[str, Any]:
    """Return processor, cores, memory, GPUs, Python and package versions of this machine."""
    import psutil
    import torch

    cuda = torch.cuda.is_available()
    return {
        "processor": processor_name(),
        "cores": os.cpu_count(),
        "memory_gb": round(psutil.virtual_memory().total / 1e9, 1),
        "gpus": [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())] if cuda else [],
        "system": platform.platform(),
        "python": sys.version.split()[0],
        "packages": {name: version for name in _PACKAGES if (version := installed_version(name))},
    }


def processor_name() -> str:
    """Return the marketing name of the processor."""
    return _of_processor("model name") or platform.processor() or platform.machine()


def processor_flags(root: Path = _ROOT) -> frozenset[str]:
    """Return the processor's instruction sets by their names in Linux."""
    return frozenset((_of_processor("flags", "Features", root=root) or "").split())


def _of_processor(*names: str, root: Path = _ROOT) -> str | None:
    """Return the value of the first field in /proc/cpuinfo whose name begins with one of `names`; None without one."""
    with contextlib.suppress(OSError), (root / "proc/cpuinfo").open() as file:
        for line in file:
            if line.startswith(names):
                return line.partition(":")[2].strip()
    return None


@functools.cache
def find_malloc_trim() -> Callable[[int], object]:
    """Return glibc's malloc_trim, which returns free pages to the kernel; with another C library, a function that does
    nothing."""
    try:
        malloc_trim: Callable[[int], object] = ctypes.CDLL(None).malloc_trim
        malloc_trim.argtypes = [ctypes.c_size_t]  # type: ignore[attr-defined]
    except (OSError, AttributeError):
        return lambda kept: None
    return malloc_trim


def resident_bytes() -> int:
    """Return the resident memory of this process in bytes."""
    import psutil

    return int(psutil.Process().memory_info().rss)
