"""Compiles a kernel file for this machine and checks the library once against its reference before anyone uses it.

Libraries lie in ~/.cache/megarl (or XDG_CACHE_HOME), one for each source, compiler and processor, and beside each the
verdict of its check: compilers have made wrong code of right sources for one kind of processor and not for another.
"""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path

from torch import Tensor

FLAGS = ["-std=c++17", "-O3", "-march=native", "-fopenmp", "-fPIC"]
_COMPILE_SECONDS = 120
_AGREES = "agrees with its reference"

Check = Callable[[ctypes.CDLL], str | None]
"""Runs a library on random input; says what differs from the reference, None where nothing does."""


def compiled(source: Path, check: Check) -> ctypes.CDLL | None:
    """Return the library made of a C++ file.

    Returns:
        None where there is no compiler; where it cannot be compiled; where `check` found that it computes something
        else than its reference. The last two come with a warning.
    """
    compiler = os.environ.get("CXX") or shutil.which("g++") or shutil.which("clang++")
    if compiler is None:
        return None
    try:
        path = _build(source, compiler)
        library = ctypes.CDLL(str(path))
    except (OSError, subprocess.SubprocessError) as error:
        detail = getattr(error, "stderr", None) or str(error)
        warnings.warn(
            f"CPU kernels are not used, generation and training are slower: {detail.strip()[:500]}", stacklevel=2
        )
        return None
    verdict = _verdict(library, path, check)
    if verdict == _AGREES:
        return library
    warnings.warn(
        f"{source.name}: what {compiler} makes of it on this machine differs from the reference ({verdict}). The "
        "reference is used instead, which is slower. Another compiler may do better: set CXX to its path",
        stacklevel=2,
    )
    return None


def compile_to(target: Path, source: Path, compiler: str, flags: list[str], folder: Path) -> None:
    """Make a library of `source`, with `folder` for what lies in between.

    Raises:
        subprocess.SubprocessError: the compiler failed or took too long.
    """
    made, built = str(folder / "made.o"), str(folder / "made.so")
    # -fopenmp is left out of the link on purpose: the symbols come from torch's OpenMP, not from a second one.
    for command in ([compiler, *flags, "-c", str(source), "-o", made], [compiler, "-shared", made, "-o", built]):
        subprocess.run(command, capture_output=True, text=True, check=True, timeout=_COMPILE_SECONDS)
    os.replace(built, target)


def difference(found: Tensor, expected: Tensor, tolerance: float) -> float | None:
    """Return the difference of `found` and `expected` relative to the largest element; None within `tolerance`. NaN is
    far."""
    largest = max(float(expected.abs().max()), 1e-6)
    distance = float((found.double() - expected).abs().max()) / largest
    return None if distance <= tolerance else distance


def _build(source: Path, compiler: str) -> Path:
    """Return the path of the shared library for a source, compiler and processor."""
    version = subprocess.run([compiler, "--version"], capture_output=True, text=True, check=True, timeout=30).stdout
    key = _hash(source.read_text(), version, *FLAGS, _processor())
    folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "megarl"
    target = folder / f"{source.stem}-{key}.so"
    if target.exists():
        return target
    folder.mkdir(parents=True, exist_ok=True)
    print(f"compiling {source.name} for this processor, once per version (kept in {folder})", flush=True)
    # Ranks may compile side by side: each in its own folder, and the last rename wins.
    with tempfile.TemporaryDirectory(dir=folder) as work:
        compile_to(target, source, compiler, FLAGS, Path(work))
    return target


def _verdict(library: ctypes.CDLL, path: Path, check: Check) -> str:
    """Return the result of `check` for a library when it was first used on this machine."""
    checks = _hash(*(file.read_text() for file in sorted(Path(__file__).parent.glob("*.py"))))
    kept = path.with_name(f"{path.stem}-{checks}.verdict")
    with contextlib.suppress(FileNotFoundError):
        return kept.read_text()
    with _one_thread():
        verdict = check(library) or _AGREES
    # A cache that cannot be written to costs every process its own check, and nothing else.
    with contextlib.suppress(OSError), tempfile.TemporaryDirectory(dir=path.parent) as work:
        written = Path(work) / "verdict"
        written.write_text(verdict)
        os.replace(written, kept)
    return verdict


@contextlib.contextmanager
def _one_thread() -> Iterator[None]:
    """Run OpenMP regions of this thread on one thread: ranks check side by side, and waiting for each other is slow.

    Not by torch.set_num_threads, which changes settings of MKL for good.
    """
    openmp = ctypes.CDLL(None)  # that of torch
    before = openmp.omp_get_max_threads()
    openmp.omp_set_num_threads(1)
    try:
        yield
    finally:
        openmp.omp_set_num_threads(before)


def _hash(*parts: str) -> str:
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:16]


def _processor() -> str:
    """Return the processor that -march=native depends on."""
    info = Path("/proc/cpuinfo")
    if not info.exists():
        return platform.processor() + platform.machine()
    lines = info.read_text().splitlines()
    return "".join(sorted({line for line in lines if line.startswith(("model name", "flags", "Features"))}))
