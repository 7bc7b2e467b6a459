"""A worker of an earlier attempt, in a run folder that another one has: it says so, and changes nothing there."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from megarl.artifacts.lock import ATTEMPT, FolderLock, FolderTaken
from megarl.config.run import TrackingConfig
from megarl.runtime import worker
from megarl.runtime.health import report
from megarl.tracking.tracker import Tracker


@pytest.fixture
def later(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FolderLock]:
    """Has the folder; this process's attempt is its first, until it begins another."""
    with FolderLock(tmp_path) as lock:
        monkeypatch.setenv(ATTEMPT, lock.begin_attempt())
        monkeypatch.setenv(worker.WATCHED, "1")
        yield lock


def contents(folder: Path) -> dict[str, str]:
    return {str(path.relative_to(folder)): path.read_text() for path in folder.rglob("*") if path.is_file()}


def test_one_that_begins_late_does_not_begin(
    tmp_path: Path, later: FolderLock, capsys: pytest.CaptureFixture[str]
) -> None:
    later.begin_attempt()
    before = contents(tmp_path)
    assert worker.run("any:entry", tmp_path / "config.yaml") == 1
    assert "has taken the run folder" in capsys.readouterr().err
    assert contents(tmp_path) == before


def test_its_error_is_none_of_the_later_attempts(
    tmp_path: Path, later: FolderLock, capsys: pytest.CaptureFixture[str]
) -> None:
    report(tmp_path, RuntimeError("in time"), 0)
    later.begin_attempt()
    before = contents(tmp_path)
    assert report(tmp_path, RuntimeError("too late"), 0).message == "too late"
    assert "rank 0: too late" in capsys.readouterr().err
    assert contents(tmp_path) == before


def test_its_numbers_and_its_end_are_not_written(tmp_path: Path, later: FolderLock) -> None:
    tracker = Tracker(tmp_path, TrackingConfig(mlflow=False), "x", {})
    tracker.log(1, {"a": 1.0})
    later.begin_attempt()
    before = contents(tmp_path)
    with pytest.raises(FolderTaken):
        tracker.log(2, {"a": 2.0})
    with pytest.raises(FolderTaken):
        tracker.samples(2, [{"prompt": "?"}])
    with pytest.raises(FolderTaken):
        tracker.finish("failed")
    with pytest.raises(FolderTaken):
        Tracker(tmp_path, TrackingConfig(mlflow=False), "x", {})
    assert contents(tmp_path) == before
    assert json.loads(before["run.json"])["status"] == "running"


def test_one_that_is_started_by_hand_has_the_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv(worker.WATCHED, raising=False)
    monkeypatch.setenv("RANK", "0")
    with FolderLock(tmp_path):
        assert worker.run("any:entry", tmp_path / "config.yaml") == 2
    assert "another run is using this run folder" in capsys.readouterr().err
    assert not (tmp_path / "errors").exists()
