"""Where the commands of runs print what is not a step's record."""

from __future__ import annotations

import argparse
from pathlib import Path

import pytest

from megarl.artifacts.records import write_record
from megarl.artifacts.trained import Exported, write_exported
from megarl.checks.checklist import Checklist
from megarl.checks.files import check_data
from megarl.commands import job
from megarl.system.errors import ConfigError, UserError


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
    given = {"weights": weights, "prompt": None, "run_dir": None, "console": "plain"}
    return argparse.Namespace(command="eval", recipe=str(run_dir), overrides=list(overrides), **given)


def test_a_named_checkpoint_is_the_model_that_is_used_and_named(tmp_path: Path, capsys) -> None:
    checkpoint = finished_run(tmp_path)
    config = job.read_recipe(eval_arguments(tmp_path, f"trainer.resume={checkpoint}"))
    assert capsys.readouterr().out == f"model: {checkpoint} (from trainer.resume)\n"
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
    with pytest.raises(UserError, match=rf"the weights are given twice(?s:.*)--weights {weights} trainer.resume="):
        job.read_recipe(eval_arguments(tmp_path, f"trainer.resume={checkpoint}", weights=weights))


@pytest.fixture
def started_elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A finished run that was started in the folder `start`, whose recipe names files there; `here` is current."""
    for name in ("start", "here"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "rows.jsonl").touch()
    run_dir = tmp_path / "start" / "runs"
    run_dir.mkdir()
    finished_run(run_dir)
    (run_dir / "config.yaml").write_text("name: x\nmodel: {path: base}\ndata: {val_files: [rows.jsonl]}\n")
    write_record(run_dir / "run.json", {"folder": str(tmp_path / "start")})
    monkeypatch.chdir(tmp_path / "here")
    return run_dir


@pytest.mark.parametrize(
    ("key", "value", "expected"),
    [
        ("data.val_files", "[rows.jsonl, rows.jsonl@test]", "['{here}/rows.jsonl', '{here}/rows.jsonl@test']"),
        ("data.val_files", "rows.jsonl", "['{here}/rows.jsonl']"),
        ("data.val_files", "[openai/gsm8k@test]", "['openai/gsm8k@test']"),
        ("model.tokenizer", "rows.jsonl", "{here}/rows.jsonl"),
        ("reward.name", "my.py:score", "{here}/my.py:score"),
        ("reward.name", "rows.jsonl", "rows.jsonl"),
        ("rollout.sampling.n", "4", "4"),
        ("reward", "{{name: math}}", "{{name: math}}"),
    ],
)
def test_paths_of_the_command_line_keep_their_meaning(
    key: str, value: str, expected: str, started_elsewhere: Path
) -> None:
    here = Path.cwd()
    arguments = eval_arguments(started_elsewhere, f"{key}={value.format()}")
    job.read_recipe(arguments)
    given = [text for text in arguments.overrides if text.startswith(f"{key}=")]
    assert given[-1].replace('"', "'") == f"{key}={expected.format(here=here)}"
    assert Path.cwd() == started_elsewhere.parent


def test_an_override_that_cannot_be_read_is_named(started_elsewhere: Path) -> None:
    with pytest.raises(ConfigError, match=r"the value of data\.val_files cannot be read"):
        job.read_recipe(eval_arguments(started_elsewhere, "data.val_files=[a"))


def test_a_run_is_read_from_where_it_was_started_and_its_results_go_into_it(started_elsewhere: Path) -> None:
    arguments = eval_arguments(started_elsewhere)
    arguments.run_dir = Path("mine")
    here = Path.cwd()
    assert job.read_recipe(arguments).data.val_files == ["rows.jsonl"]
    assert (Path.cwd(), arguments.run_dir, arguments.results) == (
        started_elsewhere.parent,
        here / "mine",
        started_elsewhere,
    )


def test_a_folder_of_the_start_that_is_gone_is_named(started_elsewhere: Path, capsys) -> None:
    write_record(started_elsewhere / "run.json", {"folder": "/gone"})
    here = Path.cwd()
    job.read_recipe(eval_arguments(started_elsewhere))
    assert Path.cwd() == here
    assert f"the run was started in /gone, which does not exist here; its relative paths now start at {here}" in (
        capsys.readouterr().err
    )


def test_a_prompt_needs_no_rows(started_elsewhere: Path, capsys) -> None:
    (started_elsewhere / "config.yaml").write_text("name: x\nmodel: {path: base}\ndata: {train_files: [gone.jsonl]}\n")
    arguments = eval_arguments(started_elsewhere)
    arguments.command, arguments.prompt = "generate", ["1+1="]
    checks = Checklist()
    check_data(job.read_recipe(arguments), "generate", checks)
    assert [check.status for check in checks.items] == ["ok"]
    assert "system message: none; the training data cannot be read here" in capsys.readouterr().out


def test_a_file_that_was_moved_is_named_with_the_folder_where_it_was(started_elsewhere: Path) -> None:
    (started_elsewhere.parent / "rows.jsonl").unlink()
    checks = Checklist()
    check_data(job.read_recipe(eval_arguments(started_elsewhere)), "eval", checks)
    [problem] = [check.fix for check in checks.items if check.status == "fail"]
    assert problem == f"check the path; relative paths start at {started_elsewhere.parent}"
