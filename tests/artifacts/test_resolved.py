"""config.yaml of a run folder is that of the run, not that of a start which was refused."""

from __future__ import annotations

from pathlib import Path
from unittest import mock

import pytest

from megarl.artifacts.run_folder import accept_config, discard_config, next_config, write_next_config
from megarl.config.load import dump_config
from megarl.config.run import RunConfig
from megarl.runtime import worker


def test_a_new_folder_has_its_configuration_at_once(tmp_path: Path) -> None:
    write_next_config(tmp_path, "a: 1\n")
    assert next_config(tmp_path) == tmp_path / "config.yaml"
    assert next_config(tmp_path).read_text() == "a: 1\n"


def test_another_one_is_proposed_until_it_is_taken_up(tmp_path: Path) -> None:
    write_next_config(tmp_path, "a: 1\n")
    write_next_config(tmp_path, "a: 2\n")
    assert next_config(tmp_path).read_text() == "a: 2\n"
    assert (tmp_path / "config.yaml").read_text() == "a: 1\n"
    accept_config(tmp_path)
    discard_config(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["config.yaml"]
    assert (tmp_path / "config.yaml").read_text() == "a: 2\n"


def test_what_a_killed_start_left_is_not_read(tmp_path: Path) -> None:
    for text in ("a: 1\n", "a: 2\n", "a: 1\n"):
        write_next_config(tmp_path, text)
    assert next_config(tmp_path).read_text() == "a: 1\n"


@pytest.mark.parametrize(("rank", "watched", "left"), [(0, False, False), (1, False, True), (0, True, True)])
def test_a_worker_that_is_started_by_hand_forgets_what_a_killed_launcher_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rank: int, watched: bool, left: bool
) -> None:
    for name in ("of the run", "of a killed start"):
        write_next_config(tmp_path, dump_config(RunConfig(name=name)))
    names: list[str] = []
    monkeypatch.setattr(worker, "Heartbeat", lambda run_dir, rank: mock.Mock())
    monkeypatch.setattr(worker, "raise_descriptor_limit", lambda: None)
    monkeypatch.setattr(worker, "import_callable", lambda entry, **_: lambda config, run_dir: names.append(config.name))
    monkeypatch.setenv("RANK", str(rank))
    monkeypatch.delenv(worker.WATCHED, raising=False)
    if watched:
        monkeypatch.setenv(worker.WATCHED, "1")
    assert worker.run("any:entry", tmp_path / "config.yaml") == 0
    assert names == ["of a killed start" if watched else "of the run"]
    assert (tmp_path / "config.next.yaml").is_file() == left
