"""Compiles a kernel file for this machine and checks the library against its reference before its first use.

Libraries are in ~/.cache/megarl (or $XDG_CACHE_HOME/megarl), one for each source, compiler and processor, with the
verdict of the check next to each: compilers have produced wrong code from correct sources for some processors. Where a
compiler finds errors in a source, its message is kept instead.
"""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import os
import platform
import re
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
_SOURCE_ERROR = re.compile(r":\d+:\d+: error:")
"""A compiler's message about a line of the source, which the same compiler repeats in every run."""

Check = Callable[[ctypes.CDLL], str | None]
"""Runs a library on random input; returns what differs from the reference, or None."""


def compiled(source: Path, check: Check) -> ctypes.CDLL | None:
    """Compile a C++ file and return the library.

    Returns:
        None if there is no compiler; or, with a warning, if compiling fails or `check` finds that the library computes
            something else than its reference.
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
            f"{source.name} cannot be compiled, so generation and training are slower: {detail.strip()[:500]}",
            stacklevel=2,
        )
        return None
    verdict = _verdict(library, path, check)
    if verdict == _AGREES:
        return library
    warnings.warn(
        f"{source.name}: the library that {compiler} builds here differs from the reference ({verdict}), so the slower "
        "reference is used. Another compiler may work: set CXX to its path",
        stacklevel=2,
    )
    return None


def compile_to(target: Path, source: Path, compiler: str, flags: list[str], folder: Path) -> None:
    """Compile `source` to the library `target`, with intermediate files in `folder`.

    Raises:
        subprocess.SubprocessError: the compiler failed or took too long.
    """
    compiled_object, built = str(folder / "made.o"), str(folder / "made.so")
    # Link without -fopenmp: the symbols must come from torch's OpenMP, not from a second one.
    for command in (
        [compiler, *flags, "-c", str(source), "-o", compiled_object],
        [compiler, "-shared", compiled_object, "-o", built],
    ):
        subprocess.run(command, capture_output=True, text=True, check=True, timeout=_COMPILE_SECONDS)
    os.replace(built, target)


def difference(result: Tensor, expected: Tensor, tolerance: float) -> float | None:
    """Return the largest difference relative to the largest expected element; None if within `tolerance` and no NaN."""
    largest = max(float(expected.abs().max()), 1e-6)
    distance = float((result.double() - expected).abs().max()) / largest
    return None if distance <= tolerance else distance


def _build(source: Path, compiler: str) -> Path:
    """Compile a source if needed and return the library's path, which depends on the source, the headers beside it, the
    compiler and the processor.

    Raises:
        subprocess.SubprocessError: the compiler failed, now or, if it found errors in the source, in an earlier call.
    """
    version = subprocess.run([compiler, "--version"], capture_output=True, text=True, check=True, timeout=30).stdout
    headers = sorted(source.parent.glob("*.h"))
    key = _hash(*(file.read_text() for file in (source, *headers)), version, *FLAGS, _processor())
    folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "megarl"
    target = folder / f"{source.stem}-{key}.so"
    if target.exists():
        return target
    errors = target.with_suffix(".errors")
    if errors.exists():
        raise subprocess.SubprocessError(errors.read_text())
    folder.mkdir(parents=True, exist_ok=True)
    print(f"compiling {source.name} for this processor, once per version (cached in {folder})", flush=True)
    # Ranks may compile at the same time: each in its own folder, and the last rename wins.
    with tempfile.TemporaryDirectory(dir=folder) as work:
        try:
            compile_to(target, source, compiler, FLAGS, Path(work))
        except subprocess.CalledProcessError as failure:
            if _SOURCE_ERROR.search(failure.stderr):  # not a full disk or memory, with which another try may succeed
                _keep(errors, failure.stderr)
            raise
    return target


def _verdict(library: ctypes.CDLL, path: Path, check: Check) -> str:
    """Return the result of `check` for a library, cached from its first use on this machine."""
    checks = _hash(*(file.read_text() for file in sorted(Path(__file__).parent.glob("*.py"))))
    cached = path.with_name(f"{path.stem}-{checks}.verdict")
    with contextlib.suppress(FileNotFoundError):
        return cached.read_text()
    with _one_thread():
        verdict = check(library) or _AGREES
    _keep(cached, verdict)
    return verdict


def _keep(file: Path, text: str) -> None:
    """Write a file of the cache for other processes, which never see a part of it; without access every process
    computes the text again."""
    with contextlib.suppress(OSError), tempfile.TemporaryDirectory(dir=file.parent) as work:
        written = Path(work) / "text"
        written.write_text(text)
        os.replace(written, file)


@contextlib.contextmanager
def _one_thread() -> Iterator[None]:
    """Run OpenMP regions of this thread on one thread: ranks check at the same time and would wait for each other.

    torch.set_num_threads would also change MKL's settings permanently.
    """
    openmp = ctypes.CDLL(None)  # gives access to all symbols of this process, among them those of torch's OpenMP
    before = openmp.omp_get_max_threads()
    openmp.omp_set_num_threads(1)
    try:
        yield
    finally:
        openmp.omp_set_num_threads(before)


def _hash(*parts: str) -> str:
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:16]


def _processor() -> str:
    """Return a description of the processor, on which -march=native depends."""
    info = Path("/proc/cpuinfo")
    if not info.exists():
        return platform.processor() + platform.machine()
    lines = info.read_text().splitlines()
    return "".join(sorted({line for line in lines if line.startswith(("model name", "flags", "Features"))}))
