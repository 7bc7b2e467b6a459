"""The relay as a process: what its start leaves in the trainer, and that it ends with it."""

import json
import os
import signal
import time
from pathlib import Path

import psutil
import pytest

from megarl.sync.transports.delta import start_relay
from megarl.system import tracing
from tests.dist import run_distributed


def be_a_trainer(folder: str) -> None:
    """Start a relay as a program, note what its start left here, and be killed."""
    beats: list[str] = []
    tracing._on_change = [beats.append]
    process, _ = start_relay(Path(folder), "key", 240.0)
    files = [file.path for file in psutil.Process().open_files()]
    (Path(folder) / "note").write_text(json.dumps({"relay": process.pid, "beats": len(beats), "files": files}))
    os.kill(os.getpid(), signal.SIGKILL)


def runs(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


@pytest.mark.procs
def test_the_start_of_a_relay_beats_leaves_no_file_open_and_it_ends_with_a_trainer_that_is_killed(tmp_path):
    with pytest.raises(AssertionError, match="-9"):
        run_distributed(be_a_trainer, 1, 300, str(tmp_path))
    note = json.loads((tmp_path / "note").read_text())
    assert note["beats"]  # the relay imports torch, which takes many polls
    assert str(tmp_path / "relay.log") not in note["files"]
    deadline = time.monotonic() + 120
    while runs(note["relay"]):
        assert time.monotonic() < deadline, "the relay lives on"
        time.sleep(0.1)
