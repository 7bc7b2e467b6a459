"""Files that change in place between a start and a resume are noticed, or refused."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from megarl.runtime.files_read import changes_in_place, files_read
from megarl.runtime.resume_compatibility import COLD_START
from megarl.system.errors import ConfigError

TOKENIZER = {"eos_token": "<eos>", "chat_template": "{{ messages }}"}


@pytest.fixture
def recipe(tmp_path: Path) -> dict[str, Any]:
    """A recipe, as plain data, whose files are in `tmp_path`."""
    (tmp_path / "model").mkdir()
    (tmp_path / "pictures").mkdir()
    contents = {
        "model/config.json": json.dumps({"rope_theta": 1e4, "transformers_version": "5"}),
        "model/tokenizer_config.json": json.dumps(TOKENIZER),
        "model/generation_config.json": "{}",
        "model/model.safetensors": "weights",
        "pictures/a.png": "picture",
    }
    names = ("rows.jsonl", "held_out.jsonl", "cold.jsonl", "reward.py", "tools.py", "template.jinja")
    for name, content in (contents | dict.fromkeys(names, "before")).items():
        (tmp_path / name).write_text(content)
    at = lambda name: str(tmp_path / name)  # noqa: E731
    return {
        "model": {"path": at("model"), "tokenizer": None},
        "critic": {"path": at("model")},
        "data": {
            "train_files": [at("rows.jsonl")],
            "val_files": [at("held_out.jsonl")],
            "override_chat_template": at("template.jinja"),
            "image_dir": at("pictures"),
            "system_prompt": "~all of you: a. b",
        },
        "reward": {"name": f"{at('reward.py')}:score", "kwargs": {"cache": at("rows.jsonl")}},
        "env": {"name": "tools", "tools": [f"{at('tools.py')}:look"]},
        "sft": {"train_files": [at("cold.jsonl")]},
    }


@pytest.fixture
def changes(recipe: dict[str, Any]) -> Callable[..., list[str]]:
    """changes() -> what a resume from the checkpoint of a run with the recipe says."""
    before = json.loads(json.dumps(files_read(recipe)))
    return lambda now=recipe: changes_in_place(before, files_read(now), (recipe, now), "train", begun=True)


def test_files_as_they_were_are_not_spoken_of(changes: Callable[..., list[str]], tmp_path: Path) -> None:
    (tmp_path / "model" / "model.safetensors").write_text("the checkpoint has the weights")
    (tmp_path / "model" / "config.json").write_text('{"transformers_version": "6",\n "rope_theta": 10000.0}')
    os.utime(tmp_path / "rows.jsonl", (1, 1))
    assert changes() == []


@pytest.mark.parametrize(
    ("file", "key"),
    [
        ("rows.jsonl", "data.train_files"),
        ("held_out.jsonl", "data.val_files"),
        ("reward.py", "reward.name"),
        ("tools.py", "env.tools"),
        ("template.jinja", "data.override_chat_template"),
        ("model/generation_config.json", "model.path"),
    ],
)
def test_contents_that_may_change_are_named(
    changes: Callable[..., list[str]], tmp_path: Path, file: str, key: str
) -> None:
    (tmp_path / file).write_text("after ")
    assert changes() == [f"{key}: {tmp_path / file} has other contents"]
    (tmp_path / file).unlink()
    assert changes() == [f"{key}: {tmp_path / file} is gone or cannot be read"]


def test_pictures_a_chat_template_and_rows_of_a_cold_start(changes: Callable[..., list[str]], tmp_path: Path) -> None:
    (tmp_path / "pictures" / "a.png").write_text("another picture")
    (tmp_path / "cold.jsonl").write_text("after")
    (tmp_path / "model" / "tokenizer_config.json").write_text(json.dumps({**TOKENIZER, "chat_template": "x"}))
    assert changes() == [
        f"data.image_dir: {tmp_path / 'pictures'} has other contents",
        f"model.path: {tmp_path / 'model/tokenizer_config.json'} (chat_template) has other contents",
        f"sft.train_files: {tmp_path / 'cold.jsonl'} has other contents ({COLD_START})",
    ]


@pytest.mark.parametrize("file", ["config.json", "tokenizer_config.json", "merges.txt"])
def test_contents_that_decide_what_weights_mean_are_refused(
    changes: Callable[..., list[str]], recipe: dict[str, Any], tmp_path: Path, file: str
) -> None:
    (tmp_path / "model" / file).write_text('{"rope_theta": 5}')
    with pytest.raises(ConfigError, match="cannot be continued with the new contents") as refused:
        changes()
    assert refused.value.where in ("model.path", "critic.path")
    others = {section: {"path": "another/model"} for section in ("model", "critic")}
    assert changes({**recipe, **others}) == [], "announced as a change of the key"


def test_a_checkpoint_of_an_earlier_version_has_nothing_to_compare(recipe: dict[str, Any]) -> None:
    assert changes_in_place(None, files_read(recipe), (recipe, recipe), "train", begun=True) == []


def test_a_folder_of_data_has_the_files_that_are_read(tmp_path: Path) -> None:
    for folder in ("elsewhere", "rows/.ipynb_checkpoints"):
        (tmp_path / folder).mkdir(parents=True)
        (tmp_path / folder / "a.jsonl").write_text("{}")
    (tmp_path / "rows" / "linked").symlink_to(tmp_path / "elsewhere")
    rows = str(tmp_path / "rows")
    assert [*files_read({"data": {"train_files": [rows]}})["data.train_files"]] == [f"{rows}/linked/a.jsonl"]
