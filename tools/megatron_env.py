"""Make an environment with one version of megatron-core: `python tools/megatron_env.py VERSION FOLDER`.

Current versions need Python 3.12, which is looked for in $PYTHON312, on the path, and in the folder of pyenv. The
environment holds the tested set of constraints.txt with the other megatron-core, and this checkout in editable form.
The package index has torch for Python 3.12 with CUDA only, so that the environment takes 7 GB and some minutes.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import installer

ROOT = Path(__file__).resolve().parents[1]
_WANTED = "3.12"


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


def main(version: str, folder: Path) -> int:
    """Make the environment in `folder` if it is not complete; return an exit code."""
    python = find_python()
    if python is None:
        print(
            f"Python {_WANTED} not found: set PYTHON312=/path/to/python{_WANTED} (megatron-core {version} needs it)",
            file=sys.stderr,
        )
        return 2
    interpreter, complete = folder / "bin/python", folder / ".complete"
    if not complete.is_file():
        subprocess.run([python, "-m", "venv", "--clear", str(folder)], check=True)
        constraints = ROOT / "constraints.txt"
        lines = constraints.read_text().splitlines()
        installer.install(interpreter, next(line for line in lines if line.startswith("torch==")))
        installer.install(interpreter, "-c", str(constraints), "-e", f"{ROOT}[dev]")
        # setup.py allows older versions only, and all versions require the same packages.
        installer.install(interpreter, "--no-deps", f"megatron-core=={version}")
        complete.touch()
    else:
        installer.install(interpreter, "--no-deps", "-e", str(ROOT))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], Path(sys.argv[2])))
