"""Heartbeats of runs on several machines: each machine is a folder of its own here."""

from __future__ import annotations

import json
import os
import shutil
import zlib
from collections.abc import Callable
from pathlib import Path

import pytest

from megarl.runtime import health, machine_beats
from megarl.runtime.health import Heartbeat, Watch, read_beat
from megarl.runtime.machine_beats import BY_MACHINE, MachineBeats


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Changes the machine on which this process is. Nothing copies in the background."""
    monkeypatch.setenv(BY_MACHINE, "1")
    monkeypatch.setattr(machine_beats.Copier, "_keep_copying", lambda copier: None)
    monkeypatch.setattr(machine_beats, "_views", {})
    monkeypatch.setattr(machine_beats, "_by_machine", False)

    def move(name: str) -> None:
        (tmp_path / name).mkdir(exist_ok=True)
        monkeypatch.setattr(machine_beats.tempfile, "gettempdir", lambda: str(tmp_path / name))
        monkeypatch.setattr(machine_beats.socket, "gethostname", lambda: name)

    move("far")
    return move


def test_a_launcher_reads_ranks_of_its_machine_directly_and_others_as_they_were_copied(tmp_path, machine):
    far = Heartbeat(tmp_path, 1)
    far.beat("first")
    far._copier.copy()
    far.beat("later")
    machine("near")
    near = Heartbeat(tmp_path, 0)
    near.beat("now")
    machine_beats.watch_machines(tmp_path)
    assert [read_beat(tmp_path, rank).phase for rank in (0, 1)] == ["now", "first"]
    assert read_beat(tmp_path, 2) is None
    assert not [*(tmp_path / "heartbeats").glob("rank_*")], "nothing is mapped on the shared file system"
    machine("far")
    far.finish()
    machine("near")
    machine_beats.machines_of(tmp_path)._read = 0.0
    assert read_beat(tmp_path, 1).over


def test_a_file_that_is_being_written_keeps_what_it_had(tmp_path, machine):
    Heartbeat(tmp_path, 1)._copier.copy()
    machine("near")
    view = MachineBeats(tmp_path)
    blocks = view.blocks(1)
    [path] = (tmp_path / "heartbeats").glob("machine_*")
    path.write_bytes(path.read_bytes()[:-9])
    view._read = 0.0
    assert view.blocks(1) == blocks != []


def test_a_thousand_ranks_are_read_once_a_second_with_one_file_per_machine(tmp_path, machine, monkeypatch):
    block = health.Heartbeat(tmp_path, 0)
    machine("near")
    data = machine_beats.base64.b64encode(block._path.read_bytes().rstrip(b"\0")).decode()
    for number in range(128):
        ranks = json.dumps({8 * number + i: [data, 0] for i in range(8)}).encode()
        (tmp_path / f"heartbeats/machine_{number}").write_bytes(b"%08x" % zlib.crc32(ranks) + ranks)
    machine_beats.watch_machines(tmp_path)
    opened, read = [], Path.read_bytes
    monkeypatch.setattr(machine_beats.time, "monotonic", lambda: 1e6)  # all within one second
    monkeypatch.setattr(Path, "read_bytes", lambda path: opened.append(path.name) or read(path))
    watch = Watch(tmp_path, range(1024), 1e9, 1e9)
    for _ in range(3):
        watch._looked = 0.0
        assert watch.check(range(1024)) is None
    assert len([name for name in opened if name.startswith("machine")]) == 128
    assert len({seen for seen, _ in watch._seen.values()}) == 1, "all have reported in"


def test_another_rank_of_a_machine_copies_when_the_first_one_stops(tmp_path, machine, monkeypatch):
    first = Heartbeat(tmp_path, 0)._copier
    monkeypatch.setenv("LOCAL_RANK", "1")
    second = Heartbeat(tmp_path, 1)._copier
    clock = [1e6]
    monkeypatch.setattr(machine_beats.time, "monotonic", lambda: clock[0])
    first.copy()
    due = []
    for clock[0] in (1e6 + 0.9, 1e6 + 1.4, 1e6 + 2.1):
        due.append([first.is_due(), second.is_due()])
    assert due == [[True, False], [True, False], [True, True]]


def test_a_copy_from_before_a_reboot_is_old(tmp_path, machine, monkeypatch):
    copier = Heartbeat(tmp_path, 0)._copier
    clock = [1e6]
    monkeypatch.setattr(machine_beats.time, "monotonic", lambda: clock[0])
    copier.copy()
    clock[0] = 30.0
    assert copier.is_due()


def test_machines_that_share_the_folder_of_temporary_files_keep_their_own_ranks(tmp_path, machine, monkeypatch):
    far = Heartbeat(tmp_path, 5)
    far._map[24:32] = (2**22 + 1).to_bytes(8, "little")  # a process that this machine does not have
    monkeypatch.setattr(machine_beats.socket, "gethostname", lambda: "near")
    Heartbeat(tmp_path, 0)
    assert far._path.is_file()


def test_machines_with_one_host_name_keep_their_own_files(tmp_path, machine, monkeypatch):
    first = Heartbeat(tmp_path, 5)
    first._copier.copy()
    monkeypatch.setattr(machine_beats, "process_scope", lambda: "another machine")
    second = Heartbeat(tmp_path, 0)
    second._copier.copy()
    assert first._path.parent != second._path.parent
    assert len([*(tmp_path / "heartbeats").glob("machine_*")]) == 2
    machine_beats.watch_machines(tmp_path)
    assert None not in [read_beat(tmp_path, rank) for rank in (0, 5)]
    assert [machine_beats.machines_of(tmp_path).is_here(rank) for rank in (0, 5)] == [True, False]


def test_what_a_rank_starts_does_not_inherit_that_machines_copy(tmp_path, machine):
    Heartbeat(tmp_path, 0)
    assert BY_MACHINE not in os.environ
    assert Heartbeat(tmp_path, 1)._copier is not None, "the rank itself goes on"


def test_a_rank_that_moved_is_read_from_where_it_is(tmp_path, machine):
    old = Heartbeat(tmp_path, 1)
    old.beat("before")
    old._copier.copy()
    machine("other")
    machine_beats.watch_machines(tmp_path)
    watch = Watch(tmp_path, [1], 60, 60)
    assert watch.check([1]) is None
    watch.begin_again([1])
    assert watch._seen[1][0] == -1
    watch._looked = 0.0
    watch.check([1])
    assert watch._seen[1][0] == -1, "the old process's heartbeat is not the new one's first"
    new = Heartbeat(tmp_path, 1)
    new._map[24:32] = (os.getpid() + 1).to_bytes(8, "little")  # another process
    machine_beats.machines_of(tmp_path)._read = 0.0
    assert read_beat(tmp_path, 1).phase == "idle"
    watch._looked = 0.0
    watch.check([1])
    assert watch._seen[1][0] > 0


def test_heartbeats_of_ended_processes_are_removed_when_a_rank_starts(tmp_path, machine):
    gone = Heartbeat(tmp_path, 5)
    gone._map[24:32] = (2**22 + 1).to_bytes(8, "little")  # above the largest process id
    Heartbeat(tmp_path, 0)
    names = {path.name for path in machine_beats.local_folder(tmp_path).glob("rank_*")}
    assert names == {"rank_0"}


def test_a_folder_of_another_user_is_refused(tmp_path, machine):
    folder = machine_beats.local_folder(tmp_path)
    shutil.rmtree(folder)
    folder.symlink_to(tmp_path)
    with pytest.raises(OSError, match="belongs to another user"):
        machine_beats.local_folder(tmp_path)
