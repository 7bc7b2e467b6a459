"""Make an environment with one version of megatron-core: `python tools/megatron_env.py VERSION PACKAGES FOLDER`.

Current versions need Python 3.12, which is looked for in $PYTHON312, on the path, and in the folder of pyenv. The
folder PACKAGES gets the tested set of constraints.txt with that megatron-core, and may serve several checkouts. The
package index has torch for Python 3.12 with CUDA only, so that PACKAGES takes 7 GB and some minutes. FOLDER is made
in a second: an environment of this checkout's megarl, which imports everything else from PACKAGES.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import installer

ROOT = Path(__file__).resolve().parents[1]
_WANTED = "3.12"
COMPLETE = ".packages"  # a file that marks a finished installation


def candidates() -> Iterator[str]:
    """Yield interpreters that may be Python 3.12, most wanted first."""
    yield from filter(None, (os.environ.get("PYTHON312"), shutil.which(f"python{_WANTED}")))
    versions = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv")) / "versions"
    yield from (str(folder / "bin/python") for folder in sorted(versions.glob(f"{_WANTED}.*"), reverse=True))


def find_python() -> str | None:
    """Return a Python 3.12 that starts, or None; pyenv's shims are found on the path and may refuse to start."""
    code = "import sys; print('%d.%d' % sys.version_info[:2])"
    for python in candidates():
        try:
            answer = subprocess.run([python, "-c", code], capture_output=True, text=True, check=False)
        except OSError:
            continue
        if answer.stdout.strip() == _WANTED:
            return python
    return None


def make_packages(python: str, version: str, folder: Path) -> None:
    """Install everything but megarl into `folder`, if that is not complete."""
    complete = folder / COMPLETE
    if complete.is_file():
        return
    subprocess.run([python, "-m", "venv", "--clear", str(folder)], check=True)
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    lines = [line for line in lines if not line.startswith("megatron-core==")] + [f"megatron-core=={version}"]
    constraints = folder / "constraints.txt"
    constraints.write_text("\n".join(lines) + "\n")
    interpreter = folder / "bin/python"
    installer.install(interpreter, next(line for line in lines if line.startswith("torch==")))
    installer.install(interpreter, "-c", str(constraints), "-e", f"{ROOT}[dev]")
    subprocess.run([str(interpreter), "-m", "pip", "uninstall", "--quiet", "--yes", "megarl"], check=True)
    complete.touch()


def make_environment(packages: Path, folder: Path) -> None:
    """Make an environment of this checkout that sees `packages`."""
    subprocess.run([str(packages / "bin/python"), "-m", "venv", "--without-pip", "--clear", str(folder)], check=True)
    interpreter = folder / "bin/python"
    for place in folder.glob("lib/python*/site-packages"):
        packaged = packages / place.relative_to(folder)
        (place / "packages.pth").write_text(f"import site; site.addsitedir({str(packaged)!r})\n")
    # The build needs only setuptools, which PACKAGES has.
    installer.install(interpreter, "--no-deps", "--no-build-isolation", "-e", str(ROOT))


def main(version: str, packages: Path, folder: Path) -> int:
    """Make both folders, PACKAGES in one process at a time; return an exit code."""
    python = find_python()
    if python is None:
        print(
            f"Python {_WANTED} not found: set PYTHON312=/path/to/python{_WANTED} (megatron-core {version} needs it)",
            file=sys.stderr,
        )
        return 2
    packages.parent.mkdir(parents=True, exist_ok=True)
    with (packages.parent / f"{packages.name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        make_packages(python, version, packages)
    make_environment(packages, folder)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], Path(sys.argv[2]), Path(sys.argv[3])))
