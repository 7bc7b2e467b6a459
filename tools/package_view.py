"""Run a tool on the package as it is installed: `python tools/package_view.py mypy`, or `lint-imports`.

`benchmarks`, `kernels`, `launchers` and `recipes` stand at the top of the repository and are installed inside `megarl`.
Tools that map files to module names by folder do not know that, so they run on a copy in which everything stands where
it is imported from; paths in their output are turned back into the repository's.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
VIEW = ROOT / ".cache" / "package_view"
MAPPED = ("benchmarks", "kernels", "launchers", "recipes")
TOOLS = {
    "mypy": ["-m", "mypy", "--config-file", str(ROOT / "pyproject.toml"), "-p", "megarl", "--num-workers", "2"],
    "lint-imports": ["-c", "from importlinter.cli import lint_imports_command as run; run()", "--config"],
}
# mypy gives its workers three seconds to start, which a busy machine may not manage.
NO_WORKER = "Failed to establish connection with worker"


def make_view() -> None:
    """Copy the sources, with their times, so that the tools' caches stay valid."""
    shutil.rmtree(VIEW, ignore_errors=True)
    ignore = shutil.ignore_patterns("__pycache__")
    shutil.copytree(ROOT / "megarl", VIEW / "megarl", ignore=ignore)
    for name in MAPPED:
        shutil.copytree(ROOT / name, VIEW / "megarl" / name, ignore=ignore)


def to_repository_paths(text: str) -> str:
    """Turn paths of the package (`megarl/launchers/local.py:3: error`) into those of the repository."""
    text = text.replace(f"{VIEW}{os.sep}", "")
    return re.sub(rf"\bmegarl/({'|'.join(MAPPED)})/", r"\1/", text)


def main(tool: str) -> int:
    """Make the view, run `tool` in it, print its output; returns its exit code."""
    make_view()
    command = [sys.executable, *TOOLS[tool]]
    if tool == "lint-imports":
        command.append(str(ROOT / "pyproject.toml"))
    environment = os.environ | {"PYTHONPATH": str(VIEW), "MYPYPATH": str(VIEW)}
    environment["MYPY_CACHE_DIR"] = str(ROOT / ".mypy_cache")
    done = subprocess.run(command, cwd=VIEW, env=environment, capture_output=True, text=True, check=False)
    if NO_WORKER in done.stdout + done.stderr:
        command[-1] = "0"
        done = subprocess.run(command, cwd=VIEW, env=environment, capture_output=True, text=True, check=False)
    print(to_repository_paths(done.stdout + done.stderr), end="")
    return done.returncode


if __name__ == "__main__":
    if len(sys.argv) != 2 or sys.argv[1] not in TOOLS:
        sys.exit(f"usage: python {sys.argv[0]} {'|'.join(TOOLS)}")
    sys.exit(main(sys.argv[1]))
