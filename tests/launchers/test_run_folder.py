"""A run whose folder is deleted or moved ends, and says so."""

from __future__ import annotations

import shutil
from contextlib import closing
from pathlib import Path

import pytest

from megarl.artifacts.run_folder import RunFolder, refuse_other_files, restore_config
from megarl.cli import main
from megarl.system.errors import UserError
from tests.launchers.test_launchers import DEADLINE_S, Drive


@pytest.mark.procs
@pytest.mark.parametrize(
    ("launcher", "entry"),
    [("local", "lose_the_folder"), ("torchrun", "lose_the_folder"), ("local", "lose_the_folder_at_the_end")],
)
def test_a_run_that_loses_its_folder_ends_with_one_message(launcher: str, entry: str, tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    run_dir.mkdir()
    process = Drive(launcher, entry, str(run_dir), "1")
    said = "".join(process.communicate(timeout=DEADLINE_S))
    assert process.returncode == 2, said
    (line,) = [line for line in said.splitlines() if "megarl: " in line or "stopped: " in line]
    assert line.startswith(f"stopped: {run_dir}: the run has ended because its folder was deleted or moved")
    assert not (run_dir / "config.yaml").exists()  # nothing is written into what is no folder of the run


def test_another_folder_of_the_same_name_is_not_the_runs(tmp_path: Path) -> None:
    path = tmp_path / "run"
    path.mkdir()
    with closing(RunFolder(path)) as folder:
        shutil.rmtree(path)
        with pytest.raises(UserError, match="nothing is at this path now"):
            folder.check()
        path.mkdir()
        with pytest.raises(UserError, match="this path is now a folder with later files"):
            folder.check()
        folder.check(now=False)  # not so soon again


def test_a_folder_that_is_moved_and_comes_back_is_the_runs(tmp_path: Path) -> None:
    path, away = tmp_path / "runs" / "run", tmp_path / "away"
    path.mkdir(parents=True)
    with closing(RunFolder(path)) as folder:
        path.parent.rename(away)
        path.parent.touch()
        assert folder.is_gone()
        path.parent.unlink()
        away.rename(path.parent)
        assert not folder.is_gone()


def test_a_configuration_that_was_deleted_is_written_again(tmp_path: Path) -> None:
    restore_config(tmp_path, "name: run")
    restore_config(tmp_path, "name: of-another-start")
    assert (tmp_path / "config.yaml").read_text() == "name: run"


@pytest.mark.parametrize(
    "names",
    [(), (".DS_Store", "lost+found"), ("notes.txt", "run.json"), ("config.yaml", "log.txt"), (".lock", "config.yaml")],
)
def test_an_empty_folder_and_the_folder_of_a_run_are_taken(tmp_path: Path, names: tuple[str, ...]) -> None:
    for name in names:
        (tmp_path / name).touch()
    refuse_other_files(tmp_path)
    refuse_other_files(tmp_path / "new")


def test_a_folder_with_other_files_is_refused_before_the_start(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    for name in ("a.py", "b.csv", "config.yaml", "d", "e"):
        (tmp_path / name).touch()
    for command in ("train", "sft", "eval", "generate"):
        assert main([command, "grpo_quickstart", "--run-dir", str(tmp_path)]) == 2
        assert "a.py, b.csv, config.yaml and 2 more" in capsys.readouterr().err
    assert main(["launch", "grpo_quickstart", "--slurm", "--run-dir", str(tmp_path)]) == 2
    assert "this folder has files that do not belong to a run" in capsys.readouterr().err
    assert len(list(tmp_path.iterdir())) == 5
