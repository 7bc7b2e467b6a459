"""Where the commands of runs print what is not a step's record."""

from __future__ import annotations

import argparse
from pathlib import Path

import pytest

from megarl.artifacts.trained import Exported, write_exported
from megarl.commands import job
from megarl.errors import UserError


@pytest.mark.parametrize("console", ["plain", "json"])
def test_json_has_standard_output_for_itself(console, tmp_path: Path, monkeypatch, capsys) -> None:
    (tmp_path / "config.yaml").write_text("name: x\n")

    def use_run(arguments: argparse.Namespace) -> str:
        arguments.recipe = str(tmp_path / "config.yaml")
        return "the last one"

    monkeypatch.setattr(job, "_use_run", use_run)
    arguments = argparse.Namespace(
        command="eval", recipe=str(tmp_path), overrides=[], console=console, weights="last", prompt=None
    )
    assert job.read_recipe(arguments).tracking.console == console
    said = capsys.readouterr()
    text = "model: the last one\n"
    assert (said.out, said.err) == (("", text) if console == "json" else (text, ""))


def finished_run(run_dir: Path) -> Path:
    """Write a run with a model of step 1000 and a checkpoint of step 900."""
    (run_dir / "config.yaml").write_text("name: x\nmodel: {path: base, lora: {rank: 4}}\n")
    (run_dir / "hf").mkdir()
    (run_dir / "hf" / "config.json").touch()
    write_exported(run_dir, [Exported("hf", 1000, "last")])
    checkpoint = run_dir / "checkpoints" / "step_900"
    checkpoint.mkdir(parents=True)
    (checkpoint / "meta.json").touch()
    return checkpoint


def eval_arguments(run_dir: Path, *overrides: str, weights: str | None = None) -> argparse.Namespace:
    return argparse.Namespace(
        command="eval", recipe=str(run_dir), overrides=list(overrides), console="plain", weights=weights, prompt=None
    )


def test_a_named_checkpoint_is_the_model_that_is_used_and_named(tmp_path: Path, capsys) -> None:
    checkpoint = finished_run(tmp_path)
    config = job.read_recipe(eval_arguments(tmp_path, f"trainer.resume={checkpoint}"))
    assert capsys.readouterr().out == f"model: {checkpoint} (named in trainer.resume)\n"
    assert config.trainer.resume == str(checkpoint)
    assert (config.model.path, config.model.lora is None) == ("base", False)  # what the checkpoint's adapters adapt


def test_resuming_automatically_is_no_choice_of_a_model(tmp_path: Path, capsys) -> None:
    finished_run(tmp_path)
    config = job.read_recipe(eval_arguments(tmp_path, "trainer.resume=auto", weights="last"))
    assert config.model.path == str(tmp_path / "hf")
    assert capsys.readouterr().out == f"model: {tmp_path / 'hf'} (last, step 1000)\n"


@pytest.mark.parametrize("weights", ["best", "last"])
def test_a_named_checkpoint_and_weights_are_two_choices(weights: str, tmp_path: Path) -> None:
    checkpoint = finished_run(tmp_path)
    with pytest.raises(UserError, match=rf"two choices of weights(?s:.*)--weights {weights} trainer.resume="):
        job.read_recipe(eval_arguments(tmp_path, f"trainer.resume={checkpoint}", weights=weights))
