"""A checkpoint of a worker whose run folder another attempt has taken."""

from __future__ import annotations

from pathlib import Path

import pytest

from megarl.artifacts.lock import ATTEMPT, FolderLock
from megarl.config.model import ParallelConfig
from megarl.errors import WorkerError
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
