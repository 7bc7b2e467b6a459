"""A checkpoint of a worker whose run folder another attempt has taken, or somebody deleted."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from megarl.artifacts.lock import ATTEMPT, FolderLock
from megarl.artifacts.run_folder import held
from megarl.config.model import ParallelConfig
from megarl.system.errors import UserError, WorkerError
from megarl.training import checkpoint, saving
from tests.dist import fresh_layout
from tests.training import cases


@pytest.mark.parametrize("when", ["before", "meanwhile"])
def test_it_is_not_written_beside_those_of_the_later_attempt(
    alone: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, when: str
) -> None:
    parallel, root = ParallelConfig(), tmp_path / "checkpoints"
    engines = {"actor": cases.make_engine("dense", parallel, layout=fresh_layout(parallel))}
    left = ["step_1"]
    with FolderLock(tmp_path) as lock:
        monkeypatch.setenv(ATTEMPT, lock.begin_attempt())
        checkpoint.save(root, 1, engines, {}, keep_last=1)
        if when == "before":
            lock.begin_attempt()
            left.append("step_7.tmp-4f2a")  # what the later one writes just now
            (root / left[-1]).mkdir()
        else:
            write = saving._write

            def write_and_lose(*arguments: object) -> None:
                write(*arguments)
                lock.begin_attempt()

            monkeypatch.setattr(saving, "_write", write_and_lose)
        with pytest.raises(WorkerError, match="has taken the run folder"):
            checkpoint.save(root, 2, engines, {}, keep_last=1)
    assert sorted(path.name for path in root.iterdir()) == left


@pytest.mark.parametrize("when", ["before", "meanwhile"])
def test_a_folder_that_was_deleted_is_not_made_again_for_it(
    alone: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, when: str
) -> None:
    """Else the next start there goes on from a checkpoint whose steps have no metrics."""
    parallel, run_dir = ParallelConfig(), tmp_path / "run"
    run_dir.mkdir()
    engines = {"actor": cases.make_engine("dense", parallel, layout=fresh_layout(parallel))}
    with held(run_dir):
        if when == "before":
            shutil.rmtree(run_dir)
        else:
            write = saving._write

            def write_and_lose(folder: Path, *arguments: Any) -> None:
                write(folder, *arguments)
                copy = shutil.copytree(run_dir, tmp_path / "copy")
                shutil.rmtree(run_dir)
                copy.rename(run_dir)

            monkeypatch.setattr(saving, "_write", write_and_lose)
        with pytest.raises(UserError, match="deleted or moved"):
            checkpoint.save(run_dir / "checkpoints", 2, engines, {})
    assert checkpoint.named_steps(run_dir / "checkpoints") == []
