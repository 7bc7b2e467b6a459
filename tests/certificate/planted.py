"""Sections with faults, for the tests of the harness."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from megarl.certificate.findings import Findings, Skipped


def passes(found: Findings, folder: Path) -> None:
    found.check("one", True, "fine")
    found.figure("rate", 2.0, "GB/s", 4.0, "data sheet")
    with (folder.parent / "runs").open("a") as file:
        file.write("x")


def fails(found: Findings, folder: Path) -> None:
    found.check("one", True)
    found.within("two", float("nan"), 1.0)


def raises(found: Findings, folder: Path) -> None:
    found.check("one", True)
    raise RuntimeError("no such kernel")


def dies(found: Findings, folder: Path) -> None:
    found.check("one", True)
    os.kill(os.getpid(), signal.SIGKILL)


def hangs(found: Findings, folder: Path) -> None:
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
    found.check("one", True)
    (folder.parent / "child").write_text(str(child.pid))
    time.sleep(600)


def dies_with_a_child(found: Findings, folder: Path) -> None:
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
    (folder.parent / "child").write_text(str(child.pid))
    os.kill(os.getpid(), signal.SIGKILL)


def is_skipped(found: Findings, folder: Path) -> None:
    raise Skipped("no GPU")
