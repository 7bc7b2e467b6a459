"""config.yaml of a run folder is that of the run, not that of a start which was refused."""

from __future__ import annotations

from pathlib import Path

from megarl.config.resolved import propose, proposed, take_up, withdraw


def test_a_new_folder_has_its_configuration_at_once(tmp_path: Path) -> None:
    propose(tmp_path, "a: 1\n")
    assert proposed(tmp_path) == tmp_path / "config.yaml"
    assert proposed(tmp_path).read_text() == "a: 1\n"


def test_another_one_is_proposed_until_it_is_taken_up(tmp_path: Path) -> None:
    propose(tmp_path, "a: 1\n")
    propose(tmp_path, "a: 2\n")
    assert proposed(tmp_path).read_text() == "a: 2\n"
    assert (tmp_path / "config.yaml").read_text() == "a: 1\n"
    take_up(tmp_path)
    withdraw(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["config.yaml"]
    assert (tmp_path / "config.yaml").read_text() == "a: 2\n"


def test_what_a_killed_start_left_is_not_read(tmp_path: Path) -> None:
    for text in ("a: 1\n", "a: 2\n", "a: 1\n"):
        propose(tmp_path, text)
    assert proposed(tmp_path).read_text() == "a: 1\n"
