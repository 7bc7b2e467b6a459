"""Who has a run folder, with and without flock, on this machine and on others; and who may write to it."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from megarl.artifacts import lock
from megarl.artifacts.lock import ATTEMPT, FolderLock, FolderTaken, is_held, join_attempt, refuse_if_taken
from megarl.system.errors import UserError

HOLDER = """
import errno, fcntl, pathlib, sys, time
def flock(file, how): raise OSError(int(sys.argv[2]), "no such lock")
if int(sys.argv[2]): fcntl.flock = flock
from megarl.artifacts.lock import FolderLock
with FolderLock(pathlib.Path(sys.argv[1])) as lock:
    print(lock.begin_attempt(), flush=True)
    time.sleep(100)
"""


@pytest.fixture
def no_flock(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> int:
    """This process's file systems have none."""
    number = getattr(request, "param", errno.ENOSYS)

    def flock(file: object, how: int) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(fcntl, "flock", flock)
    monkeypatch.setattr(lock, "_SETTLE_S", 0.1)
    return number


@contextmanager
def holder(run_dir: Path, number: int = 0) -> Iterator[subprocess.Popen[str]]:
    """Another process that has the folder; `number`: the error of its flock."""
    with subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(run_dir), str(number)], stdout=subprocess.PIPE, text=True
    ) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline()
            yield process
        finally:
            process.kill()


def record(run_dir: Path, machine: int = 0) -> dict[str, Any]:
    return json.loads((run_dir / (f".lock.{machine}.json" if machine else ".lock.json")).read_text())


def of_another_machine(run_dir: Path, seconds_ago: float, **fields: object) -> Path:
    """The record of a command there that showed life so long ago."""
    path = run_dir / ".lock.json"
    told = {"attempt": "old", "host": "node7", "place": "boot 1", "pid": 12, "began": 3, "machines": 1, "meets": ""}
    told |= {"folder": 1}  # another number there
    path.write_text(json.dumps(told | fields))
    os.utime(path, (time.time() - seconds_ago,) * 2)
    return path


@contextmanager
def living(path: Path) -> Iterator[None]:
    """Its command shows life."""
    over = threading.Event()

    def beat() -> None:
        for number in range(10**6):
            if over.wait(0.05):
                return
            os.utime(path, (time.time() + 2 * number,) * 2)

    thread = threading.Thread(target=beat)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def take(run_dir: Path, *arguments: Any) -> list[str]:
    """Take the folder and leave it again; what was to be told."""
    with FolderLock(run_dir, *arguments) as held:
        return held.notes


def test_a_folder_is_one_commands_at_a_time(tmp_path: Path) -> None:
    with FolderLock(tmp_path) as first:
        assert is_held(tmp_path)
        with pytest.raises(UserError, match=rf"another run is using(?s:.*)by process {os.getpid()} on"):
            take(tmp_path)
        assert first.is_ours()
    assert not is_held(tmp_path)
    assert take(tmp_path) == []
    assert not (tmp_path / ".lock.json").exists()


@pytest.mark.parametrize("no_flock", [errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP], indirect=True)
def test_where_flock_is_missing_a_file_with_a_living_process_keeps_others_out(tmp_path: Path, no_flock: int) -> None:
    with holder(tmp_path, no_flock) as process:
        assert is_held(tmp_path)
        with pytest.raises(UserError, match=f"another run is using(?s:.*)by process {process.pid} on"):
            take(tmp_path)
        process.kill()
        process.wait()
        assert not is_held(tmp_path)
        notes = take(tmp_path)
    assert "has no flock" in notes[0]
    assert ".lock.json keeps other commands out" in notes[0]


def test_other_errors_of_flock_are_told_as_they_are(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def flock(file: object, how: int) -> None:
        raise OSError(errno.EIO, "broken")

    monkeypatch.setattr(fcntl, "flock", flock)
    with pytest.raises(OSError, match="broken"):
        take(tmp_path)


def test_a_folder_whose_command_was_killed_is_taken_at_once(tmp_path: Path) -> None:
    with holder(tmp_path) as process:
        process.kill()
        process.wait()
        assert take(tmp_path) == []


def test_a_copy_of_a_folder_that_is_held_is_free(tmp_path: Path) -> None:
    run, copied = tmp_path / "run", tmp_path / "copied"
    run.mkdir()
    with holder(run):
        shutil.copytree(run, copied)
        assert is_held(run)
        assert not is_held(copied)
        with FolderLock(copied):
            assert is_held(copied)


def test_a_later_process_with_the_number_of_the_one_that_had_it_does_not_have_it(tmp_path: Path, no_flock: int) -> None:
    with FolderLock(tmp_path):
        told = record(tmp_path)
    (tmp_path / ".lock.json").write_text(json.dumps(told | {"began": told["began"] - 1}))
    take(tmp_path)


@pytest.mark.parametrize("flock", [True, False])
def test_of_another_machine_a_sign_of_life_counts(
    tmp_path: Path, flock: bool, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A lock that is each machine's own shows nothing."""
    if not flock:
        request.getfixturevalue("no_flock")
    monkeypatch.setattr(lock, "_SETTLE_S", 0.1)
    path = of_another_machine(tmp_path, seconds_ago=1)
    with living(path), pytest.raises(UserError, match=r"another run is using(?s:.*)by process 12 on node7"):
        take(tmp_path)
    assert record(tmp_path)["attempt"] == "old"
    of_another_machine(tmp_path, seconds_ago=lock.SILENT_S + 1)
    assert not is_held(tmp_path)
    assert take(tmp_path)[-1].startswith("megarl: process 12 on node7 held this run folder but was silent for 30 s")


def test_what_does_not_move_is_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(lock, "SILENT_S", 0.5)
    monkeypatch.setattr(lock, "_SETTLE_S", 0.1)
    of_another_machine(tmp_path, seconds_ago=-3600)  # the clocks differ
    assert "was silent for 0.5 s" in take(tmp_path)[0]
    assert "process 12 on node7 holds" in caplog.text
    assert "for a sign of life" in caplog.text


def test_who_was_slower_than_another_one_does_not_have_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    of_another_machine(tmp_path, seconds_ago=lock.SILENT_S + 1)
    monkeypatch.setattr(lock.time, "sleep", lambda seconds: of_another_machine(tmp_path, 0, attempt="faster"))
    with pytest.raises(UserError, match="another run is using"):
        take(tmp_path)
    assert record(tmp_path)["attempt"] == "faster"


@pytest.mark.parametrize("text", ["", "{", '{"attempt": 3}'])
def test_a_damaged_record_that_nobody_touches_is_in_nobodys_way(
    tmp_path: Path, text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lock, "SILENT_S", 0.2)
    monkeypatch.setattr(lock, "_SETTLE_S", 0.1)
    (tmp_path / ".lock.json").write_text(text)
    take(tmp_path)


def test_it_shows_life(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lock, "BEAT_S", 0.01)
    with FolderLock(tmp_path):
        os.utime(tmp_path / ".lock.json", (5.0, 5.0))
        deadline = time.monotonic() + 120
        while (tmp_path / ".lock.json").stat().st_mtime == 5.0 and time.monotonic() < deadline:
            time.sleep(0.01)
        assert (tmp_path / ".lock.json").stat().st_mtime > 5.0


def test_a_command_whose_folder_was_taken_begins_nothing_and_removes_nothing(tmp_path: Path) -> None:
    with FolderLock(tmp_path) as mine:
        of_another_machine(tmp_path, 0)
        assert not mine.is_ours()
        with pytest.raises(FolderTaken, match="process 12 on node7 has taken the run folder"):
            mine.begin_attempt()
    assert record(tmp_path)["attempt"] == "old"


def test_machines_of_a_command_have_a_lock_each_and_join_its_attempt(tmp_path: Path) -> None:
    with FolderLock(tmp_path, 1, 2, "node0:1"), FolderLock(tmp_path, 0, 2, "node0:1"):  # in any order
        assert take(tmp_path, 2, 2, "node0:1") == []
        with pytest.raises(UserError, match="another run is using"):
            take(tmp_path, 1, 2, "node0:1")


@pytest.mark.parametrize("other", [(0, 1, ""), (0, 2, "node5:1"), (0, 3, "node0:1")])
def test_a_machine_of_another_command_is_refused(tmp_path: Path, other: tuple[int, int, str]) -> None:
    with FolderLock(tmp_path, *other), pytest.raises(UserError, match=f"using(?s:.*)by process {os.getpid()}"):
        take(tmp_path, 1, 2, "node0:1")
    take(tmp_path, 1, 2, "node0:1")


def test_a_worker_writes_for_its_own_attempt_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(ATTEMPT, raising=False)
    refuse_if_taken(tmp_path)
    with FolderLock(tmp_path) as held:
        first = held.begin_attempt()
        monkeypatch.setenv(ATTEMPT, "")
        join_attempt(tmp_path)
        assert os.environ[ATTEMPT] == first
        refuse_if_taken(tmp_path)
        second = held.begin_attempt()
        text = rf"process {os.getpid()} on .* has taken the run folder .* \(attempt {second}\).* \({first}\), exits"
        with pytest.raises(FolderTaken, match=text):
            refuse_if_taken(tmp_path)
        join_attempt(tmp_path)
        assert os.environ[ATTEMPT] == first, "what it was told counts"
        (tmp_path / ".lock.json").write_text("{")
        refuse_if_taken(tmp_path)
    refuse_if_taken(tmp_path)
