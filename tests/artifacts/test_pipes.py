"""Pipes and devices where files belong are refused: reading one would wait for ever."""

import os
from pathlib import Path

import pytest

from megarl.artifacts.facts import model_facts
from megarl.artifacts.pipes import is_special, refuse_pipes
from megarl.artifacts.trained import overrides_for_model
from megarl.checks.checklist import Checklist
from megarl.checks.files import check_source
from megarl.cli import main
from megarl.config.model import ModelConfig
from megarl.data.sources import files_of_folder, load_rows
from megarl.system.errors import UserError


@pytest.mark.parametrize(
    "place", ["run.json", "metrics.jsonl", "heartbeats/rank_0", "checkpoints/best.json", "checkpoints/step_2/meta.json"]
)
def test_a_pipe_in_a_run_folder_is_named(tmp_path, capsys, place):
    file = tmp_path / place
    file.parent.mkdir(parents=True, exist_ok=True)
    os.mkfifo(file)
    for command in (
        ["train", "grpo_quickstart", "--run-dir", str(tmp_path)],
        ["eval", str(tmp_path)],
        ["report", str(tmp_path)],
    ):
        assert main(command) == 2
        assert f"{place}: found a pipe, socket or device instead of a file" in capsys.readouterr().err


def test_files_folders_links_and_what_is_not_there_are_taken(tmp_path):
    (tmp_path / "a").mkdir()
    (tmp_path / "b").write_text("")
    (tmp_path / "c").symlink_to("b")
    (tmp_path / "d").symlink_to("nowhere")
    refuse_pipes(tmp_path)
    refuse_pipes(tmp_path / "nowhere")


def test_a_pipe_in_a_model_folder_is_named(tmp_path):
    os.mkfifo(tmp_path / "config.json")
    with pytest.raises(UserError, match=r"config\.json: found a pipe"):
        model_facts(ModelConfig(path=str(tmp_path)))


@pytest.mark.parametrize("device", [False, True])
def test_a_pipe_or_device_is_no_source_of_rows(tmp_path, device):
    source = "/dev/zero" if device else str(tmp_path / "rows.jsonl")
    if not device:
        os.mkfifo(source)
        assert files_of_folder(tmp_path) == []
    assert is_special(Path(source))
    checks = Checklist(name="data")
    check_source(source, "data.train_files", checks)
    assert [check.status for check in checks.items] == ["fail"]
    with pytest.raises(UserError, match="a pipe, socket or device cannot be a source"):
        load_rows(source)


@pytest.mark.parametrize("name", ["step_07", "step_\u00b2", "step_-1", "step_", "step_1.5"])
def test_a_folder_with_an_odd_name_is_no_checkpoint(tmp_path, name):
    (tmp_path / "config.yaml").write_text("")
    (tmp_path / "run.json").write_text("{}")
    for folder in (name, "step_7"):
        (tmp_path / "checkpoints" / folder).mkdir(parents=True)
        (tmp_path / "checkpoints" / folder / "meta.json").write_text("{}")
    assert overrides_for_model(tmp_path, "last")[0] == [f"trainer.resume={tmp_path}/checkpoints/step_7"]
