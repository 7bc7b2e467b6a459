"""Facts about the machine of a run, recorded with its numbers."""

from __future__ import annotations

import os
import platform
import sys
from typing import Any

from megarl.imports import installed_version

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
    try:
        with open("/proc/cpuinfo") as file:
            for line in file:
                if line.startswith("model name"):
                    return line.split(":", 1)[1].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()
