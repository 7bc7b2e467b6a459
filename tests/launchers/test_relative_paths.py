"""Relative paths of a recipe that lead to something in the current folder."""

from __future__ import annotations

import pytest

from megarl.config.load import load_config, recipe_names
from megarl.launchers.relative_paths import relative_paths
from tests.house.test_repository import ROOT


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """The current folder, with files and folders of a run."""
    modules = ("pack/__init__.py", "pack/envs.py", "plain/envs.py", "json/tool.py", "megarl/rewards.py", "text.py")
    for name in ("train.jsonl", "my_reward.py", "chat.jinja", *modules):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("")
    for name in ("Qwen/Qwen3-8B", "rows", "math", "grpo"):
        (tmp_path / name).mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize(
    ("override", "key"),
    [
        ("data.train_files=[openai/gsm8k:main@train, train.jsonl]", "data.train_files[1]"),
        ("data.train_files=[./train.jsonl]", "data.train_files[0]"),
        ("data.val_files=[rows]", "data.val_files[0]"),
        ("data.val_files=[rows@test]", "data.val_files[0]"),
        ("data.val_files=['a task=train.jsonl']", "data.val_files[0]"),
        ("data.loader_kwargs={train: train.jsonl}", "data.loader_kwargs.train"),
        ("data.override_chat_template=chat.jinja", "data.override_chat_template"),
        ("sft.train_files=[train.jsonl]", "sft.train_files[0]"),
        ("reward.name=my_reward.py:score", "reward.name"),
        ("reward.name=pack.envs:score", "reward.name"),
        ("reward.name=plain.envs:score", "reward.name"),
        ("model.path=Qwen/Qwen3-8B", "model.path"),
        ("model.path=rows", "model.path"),
        ("model.tokenizer=rows", "model.tokenizer"),
        ("teacher.path=rows", "teacher.path"),
        ("trainer.resume=rows", "trainer.resume"),
    ],
)
def test_a_relative_path_is_found_with_its_key(override, key, folder):
    found = relative_paths(load_config("grpo_qwen3_30b_a3b_32gpu", [override]))
    assert list(found) == [key]


@pytest.mark.parametrize(
    "override",
    [
        "data.train_files=[{folder}/train.jsonl]",
        "data.train_files=['text:train.jsonl', other.jsonl]",
        "reward.name={folder}/my_reward.py:score",
        "reward.name=other.py:score",
        "reward.name=math",  # a reward, though there is a folder of that name
        "reward.name=json.tool:main",  # an installed module hides that of the folder
        "reward.name=pack.others:score",
        "reward.name=megarl.rewards:score",
        "launch.slurm.image=./train.jsonl",
    ],
)
def test_other_texts_are_none(override, folder):
    override = override.format(folder=folder)
    assert relative_paths(load_config("grpo_qwen3_30b_a3b_32gpu", [override], check_own=False)) == {}


@pytest.mark.parametrize("name", recipe_names())
def test_shipped_recipes_name_no_relative_path(name, folder):
    assert relative_paths(load_config(name)).keys() <= {"model.path"}  # Qwen/Qwen3-8B is a folder of this one


def test_modules_of_this_package_are_in_every_image(monkeypatch):
    """Though a checkout that is installed as it is has them in the current folder only."""
    monkeypatch.chdir(ROOT)
    assert relative_paths(load_config("grpo_quickstart", ["reward.name=megarl.rewards:score"], check_own=False)) == {}
