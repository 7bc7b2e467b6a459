"""`megarl doctor`: a report on versions, devices, and the use of each optional package."""

from __future__ import annotations

import os
import platform

from megarl.system.compat.cuda import compiler_version, driver_problem, driver_version, toolkit_home, toolkit_problem
from megarl.system.errors import ConfigError
from megarl.system.imports import installed_version
from megarl.system.leftovers import remove_leftovers

REQUIRED = (
    *("torch", "megatron-core", "transformers", "tensordict", "safetensors"),
    *("pydantic", "datasets", "mpmath", "ray", "mlflow"),
)
#: Versions of torch with which the tests were run (make campaign-torch-VERSION).
TESTED_TORCH = ("2.11", "2.13", "2.14")
OPTIONAL = {
    "flash-attn": "variable-length attention kernels on GPUs (without it: torch's scaled-dot-product attention)",
    "transformer-engine": "layers in bf16 and FP8 on GPUs, fused AdamW and gradient norm (without it: torch's)",
    "mcp": "tools from Model Context Protocol servers (env.mcp)",
    "mbridge": "used by tests of weight conversion",
}


def report() -> str:
    """Return the text of `megarl doctor`."""
    lines = [f"python {platform.python_version()} on {platform.platform()}, {os.cpu_count()} cores", ""]
    lines += [f"  {name:<20} {installed_version(name) or 'MISSING'}{_tested(name)}" for name in REQUIRED]
    lines += ["", "optional"]
    lines += [
        f"  {name:<20} {installed_version(name) or '-':<14} {enables}{_unfit(name)}"
        for name, enables in OPTIONAL.items()
    ]
    lines += ["", "SGLang servers (rollout.engine: sglang)", f"  {_servers()}"]
    lines += ["", "CUDA", *(f"  {line}" for line in _cuda())]
    return "\n".join([*lines, "", "devices", *(f"  {line}" for line in _devices())])


def clean() -> str:
    """Remove what killed processes of this user left (`megarl doctor --clean`); return the list as text."""
    removed = remove_leftovers()
    if not removed:
        return "killed processes left nothing"
    return "\n".join(["removed what killed processes left:", *(f"  {path}" for path in removed)])


def _tested(name: str) -> str:
    """Return a note on whether the installed torch is a tested version; an empty text for other packages."""
    version = installed_version(name)
    if name != "torch" or version is None:
        return ""
    all_series = ", ".join(TESTED_TORCH)
    if version.startswith(tuple(f"{series}." for series in TESTED_TORCH)):
        return f"  (tested: {all_series})"
    return f"  NOT TESTED: the tests were run with {all_series}"


def _unfit(name: str) -> str:
    """Return a note on why an installed Transformer Engine is not used; an empty text for other packages."""
    if name != "transformer-engine" or installed_version(name) is None:
        return ""
    from megarl.models.layer_forms import te_problem

    problem = te_problem()
    return f"; NOT USED: {problem}" if problem else ""


def _cuda() -> list[str]:
    """Return lines about the NVIDIA driver and the CUDA toolkit, which GPU servers need to compile kernels."""
    driver = driver_version()
    if driver is None:
        return ["no NVIDIA driver is loaded"]
    from megarl.system.compat.sglang import find_python

    try:
        python = find_python(None, cuda=True)
    except ConfigError:
        python = None
    home = toolkit_home(python=python)
    version = compiler_version(home)
    toolkit = f"nvcc {version[0]}.{version[1]} in {home}" if version else f"no nvcc in {home}"
    problems = [problem for problem in (driver_problem(), toolkit_problem(python=python)) if problem is not None]
    return [f"driver {driver}, {toolkit}", *(f"{text.what} ({text.found}): {text.fix}" for text in problems)]


def _servers() -> str:
    from megarl.system.compat.sglang import find_python, sglang_version

    try:
        python = find_python(None, cuda=None)
        return f"sglang {sglang_version(python)} in {python}"
    except ConfigError as error:
        return f"{error.what}: {error.fix}"


def _devices() -> list[str]:
    if installed_version("torch") is None:
        return ["unknown: torch is not installed"]
    import torch

    from megarl.system.device import has_cuda

    if not has_cuda():
        built = f"CUDA {torch.version.cuda}" if torch.version.cuda else "CPU only"
        return [f"cpu, {torch.get_num_threads()} threads per process, bf16 and fp32 (torch built for {built})"]
    names = [torch.cuda.get_device_properties(index) for index in range(torch.cuda.device_count())]
    return [f"cuda:{index} {p.name}, {p.total_memory / 1e9:.0f} GB" for index, p in enumerate(names)]
