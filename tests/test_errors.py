"""Texts of errors, also of exceptions that have none, and of limits that an input exceeds."""

import errno

import pytest

from megarl.cli import main
from megarl.envs.tools.worker import DataError
from megarl.runtime.health import failure_of
from megarl.system.errors import describe, text_of
from megarl.system.imports import import_callable


class SilentError(Exception):
    """An exception whose text cannot be made."""

    def __str__(self) -> str:
        raise RuntimeError("no text")


def test_an_exception_without_text_is_described():
    assert describe(SilentError()) == "SilentError: its text cannot be shown, because its __str__ raises RuntimeError"
    assert text_of(DataError("a")) == "a"
    assert "SilentError" in failure_of(SilentError(), 0).traceback


def test_a_module_that_raises_an_exception_without_text_is_named(tmp_path):
    (tmp_path / "mine.py").write_text("class E(Exception):\n    def __str__(self):\n        return 1 / 0\nraise E\n")
    with pytest.raises(Exception, match="does not import: E: its text cannot be shown"):
        import_callable(f"{tmp_path / 'mine.py'}:f", where="reward.name")


@pytest.mark.parametrize(
    "override",
    [
        "data.train_files=[{}.jsonl]",
        "model.tokenizer={}",
        "reward.name={}.py:f",
        "trainer.resume={}",
        "tracking.dir={}",
    ],
)
def test_a_text_that_is_too_long_for_a_path_is_said_to_be(capsys, override):
    assert main(["train", "grpo_quickstart", "--dry-run", override.format("x" * 300)]) == 2
    assert "a path is longer than the file system allows" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (MemoryError(), "not enough memory"),
        (OSError(errno.ENOMEM, "Cannot allocate memory"), "not enough memory"),
        (ImportError("libtorch.so: failed to map segment from shared object"), "not enough memory"),
        (RecursionError("maximum recursion depth exceeded"), "too many lists or objects inside one another"),
    ],
)
def test_a_limit_of_the_machine_is_no_traceback(monkeypatch, capsys, error, words):
    def fail(pattern):
        raise error

    monkeypatch.setattr("megarl.commands.keys.show_keys", fail)
    assert main(["keys"]) == 2
    text = capsys.readouterr().err
    assert words in text
    assert "log:" not in text
