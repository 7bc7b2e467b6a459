"""Make the interpreter that SGLang servers run in: `python tools/sglang_env.py [--kind auto|cpu|cuda]`.

It lies in the cache folder, one per kind and set of versions, and is used again by every clone and run. `cpu` installs
constraints-sglang.txt (about 3 GB); `cuda` installs sglang with all it asks for (about 11 GB), and gives the servers
and the interpreter that runs this file one version of NCCL. An interrupted installation has no `.complete` and is made
again by the next call.
"""

from __future__ import annotations

import argparse
import fcntl
import hashlib
import json
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PINS = ROOT / "constraints-sglang.txt"
sys.path.insert(0, str(ROOT))

from megarl.system.compat.cuda import (  # noqa: E402
    MAJOR,
    driver_problem,
    nccl_wheel,
    own_toolkit,
    site_folders,
    toolkit_problem,
    version_in,
)
from megarl.system.compat.sglang import COMPLETE, STAND_INS, environments_folder  # noqa: E402
from tools import installer  # noqa: E402

#: Version of NCCL that both interpreters get: the one of the torch that SGLang requires, which is the newer of the two.
NCCL = "2.30.7"
IMPORTS = (
    "vision_operators, sglang.launch_server, sglang.srt.entrypoints.http_server, sglang.srt.managers.scheduler, "
    "sglang.srt.multimodal.processors.qwen_vl"
)


def pins() -> dict[str, str]:
    """Map each package to `package==version`, for every line of constraints-sglang.txt."""
    lines = [line.strip() for line in PINS.read_text().splitlines()]
    return {line.partition("==")[0]: line for line in lines if line and not line.startswith("#")}


def install(folder: Path, kind: str) -> None:
    """Make a virtual environment in `folder`; of the kind `cpu`, check that the server imports in it."""
    wanted = pins()
    installer.make_environment(folder)
    python = folder / "bin" / "python"
    if kind == "cuda":
        installer.install(python, wanted["sglang"])
    else:
        # torch is installed first and by itself: if pip resolves it with the other packages, it may choose a build of
        # several gigabytes.
        installer.install(python, wanted["torch"])
        with tempfile.NamedTemporaryFile("w", suffix=".txt") as rest:
            rest.write("\n".join(line for name, line in wanted.items() if name not in ("torch", "sglang")))
            rest.flush()
            installer.install(python, "-r", rest.name)
        installer.install(python, "--no-deps", wanted["sglang"])
        code = f"import sys; sys.path.insert(0, {str(STAND_INS[0])!r}); import {IMPORTS}"
        subprocess.run([str(python), "-W", "ignore", "-c", code], check=True, env={"SGLANG_USE_CPU_ENGINE": "1"})


def add_toolkit(python: Path) -> None:
    """Install a compiler of the CUDA that torch brings, if there is none: a newer one would mix headers."""
    if not (own_toolkit(python) / "bin/nvcc").is_file():
        installer.install(python, "cuda-toolkit[nvcc,cccl]")
        lay_out_toolkit(python)


def lay_out_toolkit(python: Path) -> None:
    """Link compiler, headers and libraries of the CUDA wheels into a folder that has the form of a toolkit's."""
    home = own_toolkit(python)
    shutil.rmtree(home, ignore_errors=True)
    for wheels in (site / "nvidia" / f"cu{MAJOR}" for site in site_folders(python)):
        if not (wheels / "bin/nvcc").is_file():
            continue
        (home / "lib64").mkdir(parents=True)
        for name in ("bin", "include", "nvvm"):
            (home / name).symlink_to(wheels / name)
        for library in sorted((wheels / "lib").glob("lib*.so*")):
            for name in {library.name, library.name.partition(".so")[0] + ".so"}:
                if not (home / "lib64" / name).exists():
                    (home / "lib64" / name).symlink_to(library)


def agree_on_nccl(*pythons: Path) -> None:
    """Give these interpreters the wheel of one NCCL, where they have one: NCCL joins no group with another version.

    Each torch names one exact version, so both cannot be asked for in one resolution; newer ones keep the interface.
    """
    for python in pythons:
        wheel = nccl_wheel(python)
        if wheel is not None and wheel.version != NCCL:
            installer.install(python, "--no-deps", f"{wheel.wheel}=={NCCL}")


def advice(servers: Path, trainer: Path) -> list[str]:
    """Return what still keeps servers on GPUs from starting here, or from taking weights of this trainer."""
    notes = [
        f"{problem.what}: {problem.found}; {problem.fix}"
        for problem in (driver_problem(), toolkit_problem(python=servers))
        if problem
    ]
    ours, theirs = (str(version_in(python, "torch")).partition("+")[0] for python in (trainer, servers))
    if ours != theirs:
        notes.append(
            f"the trainer has torch {ours} and the servers {theirs}, which were not tried together on GPUs: install "
            "the trainer with constraints-gpu.txt"
        )
    return notes


def main() -> None:
    """Reuse the environment or make it; print where its interpreter is."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kind", choices=["auto", "cpu", "cuda"], default="auto")
    kind = parser.parse_args().kind
    if kind == "auto":
        kind = "cuda" if shutil.which("nvidia-smi") else "cpu"
    version = pins()["sglang"].partition("==")[2]
    digest = hashlib.sha256(PINS.read_bytes() + sys.version.encode()).hexdigest()[:8]
    folder = environments_folder() / f"{kind}-{version}-{digest}"
    folder.parent.mkdir(parents=True, exist_ok=True)
    with (folder.parent / f".{folder.name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # a second call waits for the first and finds its work done
        if not (folder / COMPLETE).is_file():
            shutil.rmtree(folder, ignore_errors=True)
            install(folder, kind)
            (folder / COMPLETE).write_text(json.dumps({"kind": kind, "sglang": version}))
        if kind == "cuda":
            python, trainer = folder / "bin" / "python", Path(sys.executable)
            agree_on_nccl(python, trainer)
            add_toolkit(python)
            for note in advice(python, trainer):
                print(f"warning: {note}", file=sys.stderr)
    print(folder / "bin" / "python")


if __name__ == "__main__":
    main()
