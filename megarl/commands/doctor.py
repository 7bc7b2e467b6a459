"""The report on this installation: versions, devices, and what each optional package adds."""

from __future__ import annotations

import os
import platform

from megarl.errors import ConfigError
from megarl.imports import installed_version
from megarl.leftovers import remove_leftovers

REQUIRED = (
    "torch",
    "megatron-core",
    "transformers",
    "tensordict",
    "safetensors",
    "pydantic",
    "datasets",
    "mpmath",
    "ray",
    "mlflow",
)
OPTIONAL = {
    "flash-attn": "variable-length attention kernels on GPUs (else: scaled-dot-product attention of torch)",
    "transformer-engine": "Megatron-Core takes its fused AdamW and gradient norm on GPUs (else: torch's)",
    "mcp": "tools of Model Context Protocol servers (env.mcp)",
    "mbridge": "tests compare weight conversion with it",
}


def report() -> str:
    """Return the text of `megarl doctor`."""
    lines = [f"python {platform.python_version()} on {platform.platform()}, {os.cpu_count()} cores", ""]
    lines += [f"  {name:<20} {installed_version(name) or 'MISSING'}" for name in REQUIRED]
    lines += ["", "optional"]
    lines += [f"  {name:<20} {installed_version(name) or '-':<14} {enables}" for name, enables in OPTIONAL.items()]
    lines += ["", "SGLang servers (rollout.engine: sglang)", f"  {_servers()}"]
    return "\n".join([*lines, "", "devices", *(f"  {line}" for line in _devices())])


def clean() -> str:
    """Return the text of `megarl doctor --clean`, which removes what processes of this user that were killed have
    left."""
    removed = remove_leftovers()
    if not removed:
        return "nothing is left of processes that were killed"
    return "\n".join(["removed, of processes that were killed:", *(f"  {path}" for path in removed)])


def _servers() -> str:
    from megarl.compat.sglang import find_python, sglang_version

    try:
        python = find_python(None, cuda=None)
        return f"sglang {sglang_version(python)} in {python}"
    except ConfigError as error:
        return f"{error.what}: {error.fix}"


def _devices() -> list[str]:
    if installed_version("torch") is None:
        return ["unknown: torch is missing"]
    import torch

    from megarl.device import has_cuda

    if not has_cuda():
        return [f"cpu, {torch.get_num_threads()} threads per process, bf16 and fp32 (torch built for {_built_for()})"]
    names = [torch.cuda.get_device_properties(index) for index in range(torch.cuda.device_count())]
    return [f"cuda:{index} {p.name}, {p.total_memory / 1e9:.0f} GB" for index, p in enumerate(names)]


def _built_for() -> str:
    import torch

    return f"CUDA {torch.version.cuda}" if torch.version.cuda else "the CPU only"
