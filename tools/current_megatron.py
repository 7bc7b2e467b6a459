"""Run a part of the tests with the current Megatron-Core, where this machine can: `python tools/current_megatron.py`.

It needs Python 3.12 and an environment of 7 GB (tools/megatron_env.py), which is made if there is room. Everything
together ends within `LIMIT_S`; what was not done is printed, and is no failure. `make campaign-megatron-0.19.2` runs
all tests that depend on Megatron-Core.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import megatron_env

ROOT = Path(__file__).resolve().parents[1]
VERSION = "0.19.2"
CACHE = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "megarl"
LIMIT_S = 230
_ROOM = 12 << 30  # bytes that an installation takes, with the archives that it reads
_TESTS = ("system/compat/test_megatron.py", "models/test_logits.py", "training/test_optimizer.py")


def run(command: list[str], seconds: float) -> tuple[int | None, str]:
    """Return the exit code of a command, None if it was killed after `seconds`, and what it printed."""
    process = subprocess.Popen(
        command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True
    )
    try:
        output, _ = process.communicate(timeout=max(seconds, 0))
        return process.returncode, output
    except subprocess.TimeoutExpired:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        return None, process.communicate()[0]


def obstacle(packages: Path) -> str | None:
    """Return why the environment cannot be made here, or None."""
    if megatron_env.find_python() is None:
        return "there is no Python 3.12 here"
    if (packages / megatron_env.COMPLETE).is_file():
        return None
    CACHE.mkdir(parents=True, exist_ok=True)
    free = shutil.disk_usage(CACHE).free
    return f"{CACHE} has {free >> 30} GB of room, an environment takes {_ROOM >> 30}" if free < _ROOM else None


def main() -> int:
    """Return 0 if the tests passed or could not be run, else 1."""
    deadline = time.monotonic() + LIMIT_S
    packages, folder = CACHE / f"megatron-{VERSION}", ROOT / f"build/megatron-{VERSION}"
    name = f"megatron-core {VERSION}"
    if problem := obstacle(packages):
        print(f"{name}: not tried, {problem}")
        return 0
    make = [sys.executable, str(ROOT / "tools/megatron_env.py"), VERSION, str(packages), str(folder)]
    code, output = run(make, deadline - time.monotonic())
    if code != 0:
        why = f"is not complete after {LIMIT_S} s" if code is None else f"could not be made: {output.strip()[-500:]}"
        print(f"{name}: not tried, its environment {why}")
        return 0
    python, tests = str(folder / "bin/python"), [f"tests/{file}" for file in _TESTS]
    test = [python, "-m", "pytest", "-p", "no:cacheprovider", "-m", "not servers", *tests]
    code, output = run(test, deadline - time.monotonic())
    if code:
        print(output)
    last = (output.strip().splitlines() or [""])[-1]
    print(f"{name}: {last if code is not None else f'the tests had not ended after {LIMIT_S} s'}")
    return int(bool(code))


if __name__ == "__main__":
    sys.exit(main())
