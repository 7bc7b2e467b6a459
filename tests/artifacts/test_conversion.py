"""What `megarl convert` refuses before it imports anything heavy."""

from pathlib import Path

import pytest

from megarl.artifacts.conversion import check_conversion
from megarl.system.errors import ConfigError


@pytest.fixture
def run_dir(tmp_path):
    for step in (9, 10):
        (tmp_path / "run" / "checkpoints" / f"step_{step}").mkdir(parents=True)
        (tmp_path / "run" / "checkpoints" / f"step_{step}" / "meta.json").write_text("{}")
    (tmp_path / "file").write_text("")
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "x").write_text("")
    return tmp_path / "run"


def test_what_can_be_converted_passes(run_dir):
    check_conversion(run_dir / "checkpoints" / "step_9", run_dir / "new" / "deeper", 4.0)


@pytest.mark.parametrize(
    ("source", "target", "gb", "words"),
    [
        (".", "new", 4.0, ["neither a model nor a checkpoint", "step_10?"]),
        ("checkpoints", "new", 4.0, ["neither a model nor a checkpoint", "step_10?"]),
        ("../nowhere", "new", 4.0, ["folder does not exist", "check the path"]),
        ("checkpoints/step_9", "../full", 4.0, ["not an empty folder"]),
        ("checkpoints/step_9", "../file", 4.0, ["not an empty folder"]),
        ("checkpoints/step_9", "../file/below", 4.0, ["cannot create the target below a file"]),
        ("checkpoints/step_9", "/proc/new", 4.0, ["cannot write into", "'/proc'"]),  # not even by root
        ("checkpoints/step_9", "new", 0.0, ["--max-shard-gb", "the size of a file must be above 0"]),
    ],
)
def test_what_cannot_is_refused(run_dir, source, target, gb, words):
    with pytest.raises(ConfigError) as caught:
        check_conversion(run_dir / source, run_dir / target, gb)
    assert all(word in str(caught.value) for word in words), caught.value


def test_a_path_into_a_folder_that_is_here_is_no_hub_name(run_dir, monkeypatch):
    monkeypatch.chdir(run_dir.parent)
    with pytest.raises(ConfigError) as caught:
        check_conversion(Path("run/chekpoints"), Path("new"), 4.0)
    words = ["folder does not exist", "did you mean run/checkpoints?", "run hf download run/chekpoints first"]
    assert all(word in str(caught.value) for word in words), caught.value
    check_conversion(Path("elsewhere/model"), Path("new"), 4.0)  # the hub may have it


def test_a_model_in_the_hubs_cache_is_taken_beside_a_folder_of_its_organisations_name(run_dir, monkeypatch):
    monkeypatch.chdir(run_dir.parent)
    monkeypatch.setenv("HF_HUB_CACHE", str(run_dir.parent / "cache"))
    cached = run_dir.parent / "cache" / "models--run--model"
    (cached / "refs").mkdir(parents=True)
    (cached / "refs" / "main").write_text("1")
    (cached / "snapshots" / "1").mkdir(parents=True)
    check_conversion(Path("run/model"), Path("new"), 4.0)
