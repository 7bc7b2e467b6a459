"""A batch job whose own files are damaged, or whose disk is full."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from megarl.launchers import submit
from megarl.launchers.slurm_job.files import Folder
from tests.launchers.test_slurm_job import World


@pytest.fixture
def world(tmp_path):
    return World(tmp_path)


DAMAGED = {"state.json": "", "excluded.jsonl": "\0\0\0\n[1]\n{}\n", "chain": "", "events.jsonl": "{\n"}


def test_damaged_files_of_a_job_do_not_end_it(world):
    job = world.job()
    submit.write_scripts(job)
    submit.prepare(job)
    (world.run_dir / "run.json").write_text("")
    for name, text in DAMAGED.items():
        (job.folder / name).write_text(text)
    (job.folder / "jobs.txt").write_text("\0\0\0\n7\tthen\t2\n")
    (world.folder / "steps").write_text("0")
    command = [sys.executable, "-m", "slurm_job", str(world.run_dir)]
    done = subprocess.run(command, cwd=job.folder, env=world.outside("n1,n2"), capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert [note["kind"] for note in submit.notes_of(world.run_dir)] == ["started", "finished"]
    assert [told.number for told in submit.jobs_of(world.run_dir)] == ["7"]
    (job.folder / "plan.json").write_text("")
    done = subprocess.run(command, cwd=job.folder, env=world.outside("n1,n2"), capture_output=True, text=True)
    assert done.returncode == 1
    assert "plan.json is missing or damaged" in done.stderr


def test_a_full_disk_does_not_end_a_job(tmp_path, monkeypatch, capsys):
    (tmp_path / "launch").mkdir()
    (tmp_path / "launch" / "plan.json").write_text('{"nodes": 2}')
    folder = Folder(tmp_path)

    def full(*given: object, **more: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "open", full)
    monkeypatch.setattr(Path, "write_text", full)
    (folder.path / "alive").touch()
    os.utime(folder.path / "alive", (1, 1))
    folder.say("7", "started", "attempt 1")
    folder.set_state(failures=1)
    folder.set_chain(1)
    folder.note_job("8")
    folder.write_heartbeat()
    assert (folder.path / "alive").stat().st_mtime > 1, "the guard sees that the driver lives"
    assert capsys.readouterr().out.count("No space left on device") == 4
