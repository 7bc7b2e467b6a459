"""What killed processes leave is removed; what a process still has is not."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from megarl.system import leftovers as module
from megarl.system.leftovers import leftovers, remove_leftovers

FOLDERS = ["megarl-abc12_9z", "torchelastic_xyz", "torch-shm-dir-Ab3dE"]
GONE = 2**22 + 1  # beyond the numbers that Linux gives to processes


@pytest.fixture
def places(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "_JUST_MADE_S", -1.0)
    monkeypatch.setattr(module, "_UNSEEN_S", -1.0)
    temporary, shared = tmp_path / "tmp", tmp_path / "shm"
    temporary.mkdir()
    shared.mkdir()
    return temporary, shared


def test_what_nobody_has_is_removed_and_nothing_else(places):
    temporary, shared = places
    others = temporary / "ray" / f"session_2026-01-01_00-00-00_2_{GONE}"
    for folder in [*(temporary / name for name in FOLDERS), others]:
        (folder / "inside").mkdir(parents=True)
    files = [temporary / "megarl-command-1", shared / f"torch_{GONE}_77_0", shared / "sgl_shm_megarl_ab_1"]
    kept = [temporary / "megarl-abc12_9z.log", temporary / "megarl-notes", shared / f"torch_{os.getpid()}_77_0"]
    for file in [*files, *kept]:
        file.touch()
    removed = remove_leftovers(temporary, shared)
    assert sorted(removed) == sorted([*(temporary / name for name in FOLDERS), *files])
    assert all(path.exists() for path in [*kept, others])
    assert leftovers(temporary, shared) == []


#: How a process uses a file or makes a socket in `folder`, which its command line does not name.
USES = {
    "open file": "file = open(folder + '/file')",
    "socket": "import socket; s = socket.socket(socket.AF_UNIX); s.bind(folder + '/s')",
    "map": "import ctypes; file = open(folder + '/file')\n"
    "ctypes.CDLL(None).mmap(None, ctypes.c_size_t(1), 1, 1, file.fileno(), ctypes.c_long(0)); file.close()",
}


@pytest.mark.parametrize("way", ["environment", "command line", "working folder", *USES])
def test_what_a_process_has_stays(places, way):
    temporary, shared = places
    folder = temporary / "torchelastic_of_somebody"
    folder.mkdir()
    (folder / "file").write_text("content")
    code = "import sys; print(flush=True); sys.stdin.read()"
    if way in USES:
        code = f"import os; folder = os.listdir()[0]\n{USES[way]}\n{code}"
    arguments = [sys.executable, "-c", code, *([str(folder)] if way == "command line" else [])]
    cwd: Path = folder if way == "working folder" else temporary
    environment = {**os.environ, **({"WHERE": str(folder)} if way == "environment" else {})}
    with subprocess.Popen(arguments, cwd=cwd, env=environment, stdin=-1, stdout=-1) as process:
        assert process.stdout is not None
        process.stdout.readline()
        assert leftovers(temporary, shared) == []
        process.kill()
    assert leftovers(temporary, shared) == [folder]


def test_what_was_just_made_stays(tmp_path):
    (tmp_path / "torchelastic_new").mkdir()
    (tmp_path / "torch-shm-dir-old").mkdir()
    os.utime(tmp_path / "torch-shm-dir-old", (1, 1))
    assert leftovers(tmp_path, tmp_path) == [tmp_path / "torch-shm-dir-old"]


def test_a_killed_process_that_shared_tensors_leaves_nothing_for_long(tmp_path):
    code = (
        "import torch, torch.multiprocessing as mp, os, signal\n"
        "mp.set_sharing_strategy('file_system')\n"
        "held = torch.ones(9).share_memory_()\n"
        "print(os.getpid(), flush=True)\n"
        "os.killpg(0, signal.SIGKILL)"
    )
    done = subprocess.run([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, start_new_session=True)
    remove_leftovers(tmp_path)
    assert not list(module.SHARED.glob(f"torch_{done.stdout.strip()}_*"))


def test_the_command_says_what_it_has_removed(monkeypatch, tmp_path, capsys):
    from megarl import cli

    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setenv("RAY_TMPDIR", str(tmp_path))  # else /tmp is looked at, too, where others leave folders
    monkeypatch.setattr(module.tempfile, "tempdir", None)
    monkeypatch.setattr(module, "SHARED", tmp_path)
    folder = tmp_path / "torchelastic_old"
    folder.mkdir()
    os.utime(folder, (1, 1))
    assert cli.main(["doctor", "--clean"]) == 0
    assert str(folder) in capsys.readouterr().out
    assert not folder.exists()
    cli.main(["doctor", "--clean"])
    assert "killed processes left nothing" in capsys.readouterr().out


def test_of_a_ray_that_was_lost_only_the_logs_stay_until_the_next_start(places, monkeypatch):
    from megarl.launchers import ray_folder, ray_health

    temporary, shared = places
    monkeypatch.setenv("RAY_TMPDIR", str(temporary))
    monkeypatch.setattr(ray_folder, "_LONGEST", 4096)
    monkeypatch.setattr(ray_health, "_shut_down", lambda: None)
    folder = ray_folder.make_ray_folder()
    session = folder / ray_folder.INNER / f"session_2026-01-01_00-00-00_1_{os.getpid()}"
    for name in ("logs", "ray_spilled_objects_ab", "sockets"):
        (session / name).mkdir(parents=True)
        (session / name / "file").touch()
    (session / "gcs_server_port_ab").touch()
    lost = ray_health.OwnRay(folder)
    lost.leave()
    assert [path.name for path in session.iterdir()] == ["logs"]
    assert leftovers(temporary, shared) == []  # this process runs
    os.close(lost._held)  # as at its end
    assert remove_leftovers(temporary, shared) == [folder]


def test_the_folder_of_a_ray_is_found_wherever_it_may_be(places, monkeypatch):
    temporary, shared = places
    monkeypatch.setenv("RAY_TMPDIR", str(temporary))
    (temporary / "megarl-abc12_9z").mkdir()
    assert temporary / "megarl-abc12_9z" in leftovers(shared=shared)
