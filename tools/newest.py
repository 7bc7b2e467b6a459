"""Train two steps with the newest versions that setup.py allows, where uv has them on this machine.

`python tools/newest.py` downloads nothing: it uses uv's cache and the folders of wheels that pip is configured with,
and says so where they do not suffice. Where these versions are those of the tests, which train with them, a dry run
shows that setup.py names everything that a command imports; so it does where only packages are newer that setup.py
does not bound, because nothing here depends on their insides. `make campaign-install` downloads, and runs more.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from importlib import metadata
from pathlib import Path

from installer import uv_environment
from packaging.requirements import Requirement

ROOT = Path(__file__).resolve().parents[1]
#: A short run with everything that a local run has: two ranks, a supervised phase, generation, update, export.
RUN = ("train", "grpo_quickstart", "sft.steps=1", "trainer.steps=1", "data.max_val_samples=16")
_LIMIT_S = 300


def bounded() -> list[str]:
    """Return the names of the packages whose newest allowed version setup.py bounds, without those of extras."""
    requirements = [Requirement(text) for text in metadata.requires("megarl") or ()]
    needed = [each for each in requirements if each.marker is None or each.marker.evaluate({"extra": ""})]
    return [each.name for each in needed if "<" in str(each.specifier)]


def newer_versions(python: Path) -> dict[str, str]:
    """Return the bounded packages of which `python` has another version than this interpreter, with that version."""
    code = "import importlib.metadata as m, json, sys; print(json.dumps({n: m.version(n) for n in sys.argv[1:]}))"
    done = subprocess.run([python, "-c", code, *bounded()], capture_output=True, text=True, check=True)
    return {name: found for name, found in json.loads(done.stdout).items() if found != metadata.version(name)}


def main() -> int:
    """Return 0 where the run went through or could not be tried, else 1."""
    environment = uv_environment()
    if environment is None:
        print("newest versions: not tried, there is no uv here")
        return 0
    uv = [sys.executable, "-m", "uv"]
    with tempfile.TemporaryDirectory(prefix="megarl-newest-") as folder:
        python = Path(folder) / "env/bin/python"
        subprocess.run([*uv, "venv", "--quiet", "--python", sys.executable, python.parents[1]], check=True)
        offline = [*uv, "pip", "install", "--quiet", "--offline", "--python", str(python), "-e", str(ROOT)]
        if subprocess.run(offline, env=environment, capture_output=True, check=False).returncode:
            print("newest versions: not tried, uv does not have them here (make campaign-install downloads them)")
            return 0
        newer = newer_versions(python)
        form = ["--run-dir", f"{folder}/run"] if newer else ["--dry-run"]
        done = subprocess.run(
            [python.with_name("megarl"), *RUN, *form],
            cwd=folder,
            capture_output=True,
            text=True,
            check=False,
            timeout=_LIMIT_S,
        )
        if done.returncode:
            print(done.stdout, done.stderr, sep="\n")
        what = "a run of two steps" if newer else "a dry run"
        versions = ", ".join(f"{name} {version}" for name, version in newer.items()) or "the versions of the tests"
        print(f"newest versions: {'the run failed' if done.returncode else what} with {versions}")
        return int(done.returncode != 0)


if __name__ == "__main__":
    sys.exit(main())
