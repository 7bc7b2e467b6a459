"""CUDA as an interpreter's torch sees it: driver, toolkit, runtime libraries, NCCL. No device is touched."""

from __future__ import annotations

import ctypes
import functools
import importlib.metadata
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from megarl.system.errors import ConfigError

#: CUDA version of the packages that the tested SGLang requires, and of torch from 2.11 on in the package index.
MAJOR = 13
#: First driver of each CUDA version. Older drivers cannot load its runtime, except with NVIDIA's compatibility
#: packages.
FIRST_DRIVER = {12: 525, 13: 580}
_SYSTEM = Path("/usr/local/cuda")
_UUID_BYTES = 96  # maximum length in NVML
_ANSWER_S = 60  # seconds for an interpreter to answer; a first start on a network disk takes seconds
# Prints the version of the NCCL library that torch loads. `torch.cuda.nccl.version()` returns the version of the
# headers, which differs if the library's wheel was exchanged. The code calls this function only if the process has
# loaded no NCCL library, for example because NCCL is built into torch.
_ASK_NCCL = """
import ctypes, torch
if hasattr(torch._C, "_nccl_version"):
    try:
        files = {line.split()[-1] for line in open("/proc/self/maps") if "libnccl.so" in line}
    except OSError:
        files = set()
    number = ctypes.c_int()
    for file in files:
        ctypes.CDLL(file).ncclGetVersion(ctypes.byref(number))
    n = number.value
    parts = (n // 10000, n // 100 % 100, n % 100) if n else torch.cuda.nccl.version()[:3]
    print(".".join(map(str, parts)))
"""


def site_folders(python: Path) -> list[Path]:
    """Return the package folders of an interpreter, which may be in a virtual environment or the system's."""
    root = python.absolute().parent.parent
    forms = ("lib/python3*/site-packages", "lib/python3*/dist-packages", "local/lib/python3*/dist-packages")
    return [folder for form in forms for folder in sorted(root.glob(form))]


def version_in(python: Path, package: str) -> str | None:
    """Return the version of a package in an interpreter, from its metadata; None when it is not installed."""
    folders = list(map(str, site_folders(python)))
    return next((versions.version for versions in importlib.metadata.distributions(name=package, path=folders)), None)


def runtime_libraries(python: Path) -> list[Path]:
    """Return the folders of `libcudart` in wheels, newest CUDA first; empty when torch or the system has it."""
    folders = {file.parent for site in site_folders(python) for file in site.glob("nvidia/*/lib/libcudart.so.*")}
    return sorted(folders, reverse=True, key=lambda folder: max(file.name for file in folder.glob("libcudart.so.*")))


def driver_version(root: Path = Path("/")) -> str | None:
    """Return the version of the loaded NVIDIA driver, such as `580.65.06`; None without a driver."""
    try:
        text = (root / "proc/driver/nvidia/version").read_text()
    except OSError:
        return None
    match = re.search(r"^NVRM version:.*?\s(\d+\.[\d.]+)", text, re.MULTILINE)
    return match.group(1) if match else None


def driver_problem(major: int = MAJOR, root: Path = Path("/")) -> ConfigError | None:
    """Return an error if the loaded driver is too old for CUDA `major`; None if not, or without a driver."""
    version, needed = driver_version(root), FIRST_DRIVER.get(major)
    if version is None or needed is None or int(version.partition(".")[0]) >= needed:
        return None
    return ConfigError(
        f"the NVIDIA driver of this machine is too old for CUDA {major}",
        where="driver",
        found=version,
        allowed=f"{needed} or newer",
        fix=f"install a driver from version {needed} on; on data-centre GPUs NVIDIA's package cuda-compat-{major}-0 "
        "is enough",
    )


def own_toolkit(python: Path) -> Path:
    """Return the folder in an interpreter's environment where `make sglang-env` installs a CUDA toolkit from wheels."""
    return python.absolute().parent.parent / "cuda"


def toolkit_home(environment: Mapping[str, str] = os.environ, python: Path | None = None) -> Path:
    """Return the folder of the servers' CUDA toolkit: the one that SGLang finds, else the one in their environment."""
    configured = environment.get("CUDA_HOME") or environment.get("CUDA_PATH")
    if configured:
        return Path(configured)
    compiler = shutil.which("nvcc", path=environment.get("PATH"))
    home = Path(compiler).parent.parent if compiler else _SYSTEM
    if python is not None and not (home / "bin/nvcc").is_file() and (own_toolkit(python) / "bin/nvcc").is_file():
        return own_toolkit(python)
    return home


@functools.lru_cache
def compiler_version(home: Path) -> tuple[int, int] | None:
    """Return the version of the toolkit's nvcc, such as (13, 0); None when it is missing or does not run."""
    try:
        done = subprocess.run(
            [home / "bin/nvcc", "--version"], capture_output=True, text=True, check=False, timeout=_ANSWER_S
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    release = re.search(r"release (\d+)\.(\d+)", done.stdout)
    return (int(release.group(1)), int(release.group(2))) if release else None


def toolkit_problem(environment: Mapping[str, str] = os.environ, python: Path | None = None) -> ConfigError | None:
    """Return an error if GPU servers with these environment variables and this interpreter cannot compile kernels on
    this machine, which they do when they start; None if they can.
    """
    home = toolkit_home(environment, python)
    version = compiler_version(home)
    install = (
        f"install the toolkit of CUDA {MAJOR} (NVIDIA's package cuda-toolkit-{MAJOR}-0) and set CUDA_HOME to its "
        "folder, or let `make sglang-env` make an interpreter for the servers that includes a compiler"
    )

    def problem(reason: str, compiler: object, allowed: str, fix: str) -> ConfigError:
        reason = f"servers compile kernels when they start, and {reason}"
        return ConfigError(reason, where="CUDA_HOME", found=str(compiler), allowed=allowed, fix=fix)

    if version is None:
        return problem("the CUDA compiler was not found", home / "bin/nvcc", f"nvcc of CUDA {MAJOR}", install)
    if version[0] != MAJOR:
        compiler = f"{home / 'bin/nvcc'} of CUDA {version[0]}.{version[1]}"
        return problem(
            "the CUDA compiler has another CUDA version than the servers' torch", compiler, f"CUDA {MAJOR}", install
        )
    if not (home / "lib64/libcudart.so").exists():
        fix = "set CUDA_HOME to the toolkit's own folder, not to that of a script or link called nvcc"
        return problem(
            "the CUDA runtime library to link with is missing", home, "a folder with lib64/libcudart.so", fix
        )
    host = environment.get("CXX", "c++")
    if shutil.which(host, path=environment.get("PATH")) is None:
        return problem("the C++ compiler was not found", host, "a C++17 compiler", "install g++, or set CXX")
    return None


@dataclass(frozen=True)
class Nccl:
    """The NCCL library that an interpreter's torch uses.

    Attributes:
        version: version such as `2.30.7`.
        wheel: package that contains the library; None: the container image or torch itself contains it.
    """

    version: str
    wheel: str | None = None

    @property
    def number(self) -> tuple[int, ...]:
        """The version as numbers, for comparisons."""
        return tuple(int(part) for part in self.version.split(".") if part.isdigit())


def nccl_wheel(python: Path) -> Nccl | None:
    """Return the NCCL of an interpreter from the metadata of its wheels; None when no wheel has it."""
    for versions in importlib.metadata.distributions(path=list(map(str, site_folders(python)))):
        name = (versions.metadata["Name"] or "").lower().replace("_", "-")
        if name.startswith("nvidia-nccl-"):
            return Nccl(versions.version, name)
    return None


@functools.lru_cache
def nccl_of(python: Path) -> Nccl | None:
    """Return an interpreter's NCCL, from its wheels or else from its torch (takes seconds); None if it has none."""
    wheel = nccl_wheel(python)
    if wheel is not None:
        return wheel
    try:
        done = subprocess.run(
            [python, "-I", "-c", _ASK_NCCL], capture_output=True, text=True, check=False, timeout=_ANSWER_S
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    version = done.stdout.strip()
    return Nccl(version) if version else None


def check_same_nccl(servers: Path, trainer: Path = Path(sys.executable)) -> None:
    """Reject interpreters with different versions of NCCL. An interpreter without NCCL (a CPU build of torch) passes.
    Raise ConfigError if the versions differ.
    """
    ours, theirs = nccl_of(trainer), nccl_of(servers)
    if ours is None or theirs is None or ours.number == theirs.number:
        return
    older, newer = sorted((ours, theirs), key=lambda nccl: nccl.number)
    where = "the trainer's interpreter" if older is ours else str(servers)
    if older.wheel:
        fix = f"run `make sglang-env`, or in {where}: pip install --no-deps {older.wheel}=={newer.version}"
    else:
        fix = f"{where} has the older NCCL in its image or torch: use a newer image, or torch from the package index"
    raise ConfigError(
        "the trainer and its servers have different versions of NCCL, which cannot join one group",
        where="sync.transport",
        found=f"trainer {ours.version}, servers {theirs.version}",
        allowed="the same version in both",
        fix=f"{fix}; or set sync.transport=disk or delta",
    )


def gpu_uuids(library: str = "libnvidia-ml.so.1") -> list[str]:
    """Return the UUIDs of this machine's GPUs in bus order; empty when the driver cannot list them."""
    uuids = []
    try:
        nvml, count, handle = ctypes.CDLL(library), ctypes.c_uint(), ctypes.c_void_p()
        if nvml.nvmlInit_v2() or nvml.nvmlDeviceGetCount_v2(ctypes.byref(count)):
            return []
        text = ctypes.create_string_buffer(_UUID_BYTES)
        for index in range(count.value):
            failed = nvml.nvmlDeviceGetHandleByIndex_v2(index, ctypes.byref(handle))
            failed = failed or nvml.nvmlDeviceGetUUID(handle, text, _UUID_BYTES)
            uuids.append("" if failed else text.value.decode())
        nvml.nvmlShutdown()
    except (OSError, AttributeError):  # NVML is missing or too old
        return []
    return uuids
