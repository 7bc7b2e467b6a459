"""Where the commands of runs print what is not a step's record."""

from __future__ import annotations

import argparse
from pathlib import Path

import pytest

from megarl.commands import job


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
