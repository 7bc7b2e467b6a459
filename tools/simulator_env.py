"""Make the interpreter that a simulator runs in: `python tools/simulator_env.py libero`; prints where it is.

It lies in the cache folder under the simulator's name and version, and is used again by every clone and run. What
constraints-NAME.txt lists is installed, and nothing else. An installation that was interrupted, or made of another list
or Python, is made again by the next call.
"""

from __future__ import annotations

import argparse
import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from tools import installer  # noqa: E402

COMPLETE = ".complete"
#: Simulator -> package whose version names the folder. The package is installed last and without its requirements, most
#: of which the simulator does not need.
PACKAGES = {"libero": "hf-libero", "metaworld": "metaworld"}
#: Simulator -> Python code that checks that it works, run with this repository on the path.
CHECKS = {
    "libero": "import bddl, mujoco; from megarl.robots.simulators.libero import Libero; "
    "assert len(Libero.tasks({})) == 40",
    "metaworld": "from megarl.robots.simulators.metaworld import MetaWorld; assert len(MetaWorld.tasks({})) == 50",
}


def pins(name: str) -> dict[str, str]:
    """Map each package to `package==version`, for every line of constraints-NAME.txt."""
    lines = [line.strip() for line in (ROOT / f"constraints-{name}.txt").read_text().splitlines()]
    return {line.partition("==")[0]: line for line in lines if line and not line.startswith("#")}


def folder_of(name: str) -> Path:
    """Return the folder of this simulator's interpreter."""
    cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(cache) / "megarl" / f"{name}-{pins(name)[PACKAGES[name]].partition('==')[2]}"


def install(folder: Path, name: str) -> None:
    """Make a virtual environment in `folder` and check that the simulator imports in it."""
    wanted = pins(name)
    installer.make_environment(folder)
    python = folder / "bin" / "python"
    last = wanted.pop(PACKAGES[name])
    # torch is installed first and by itself: if pip resolves it with the other packages, it may choose a build of
    # several gigabytes.
    if torch := wanted.pop("torch", None):
        installer.install(python, torch)
    with tempfile.NamedTemporaryFile("w", suffix=".txt") as rest:
        rest.write("\n".join(wanted.values()))
        rest.flush()
        installer.install(python, "-r", rest.name)
    installer.install(python, "--no-deps", last)
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONDONTWRITEBYTECODE": ""}
    subprocess.run([str(python), "-W", "ignore", "-c", CHECKS[name]], check=True, env=environment)


def main() -> None:
    """Reuse the interpreter or make it; print where it is."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("name", choices=sorted(PACKAGES))
    name = parser.parse_args().name
    folder = folder_of(name)
    digest = hashlib.sha256("\n".join(pins(name).values()).encode() + sys.version.encode()).hexdigest()
    folder.parent.mkdir(parents=True, exist_ok=True)
    with (folder.parent / f".{folder.name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # a second call waits for the first and finds its work done
        complete = folder / COMPLETE
        if not complete.is_file() or complete.read_text() != digest:
            shutil.rmtree(folder, ignore_errors=True)
            install(folder, name)
            complete.write_text(digest)
    print(folder / "bin" / "python")


if __name__ == "__main__":
    main()
