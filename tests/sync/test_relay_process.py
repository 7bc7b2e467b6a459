"""The relay as a process: what its start leaves in the trainer, and that it ends with it."""

import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from megarl.sync.transports.delta import start_relay
from megarl.system import tracing

TRAINER = """
import os, signal, sys
from pathlib import Path
from megarl.sync.transports.delta import start_relay
print(start_relay(Path(sys.argv[1]), "key", 240.0)[0].pid, flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.procs
def test_the_start_of_a_relay_beats_and_leaves_no_file_open(tmp_path, monkeypatch):
    beats: list[str] = []
    monkeypatch.setattr(tracing, "_on_change", [beats.append])
    process, _ = start_relay(tmp_path, "key", 240.0)
    try:
        assert beats  # the relay imports torch, which takes many polls
        assert str(tmp_path / "relay.log") not in [file.path for file in psutil.Process().open_files()]
    finally:
        process.kill()
        process.wait()


def runs(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


@pytest.mark.procs
def test_a_relay_ends_with_a_trainer_that_is_killed(tmp_path):
    command = [sys.executable, "-c", TRAINER, str(tmp_path)]
    trainer = subprocess.run(command, stdout=subprocess.PIPE, text=True, cwd=Path(__file__).parents[2], timeout=300)
    pid, deadline = int(trainer.stdout), time.monotonic() + 120
    while runs(pid):
        assert time.monotonic() < deadline, "the relay lives on"
        time.sleep(0.1)
