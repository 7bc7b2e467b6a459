"""Processes that end with those that started them, also with one that was gone before they began."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import pytest

from megarl.system.parents import PARENTS, any_parent_ended, as_parent, began, parents

CHILD = "from megarl.system.parents import end_with_parents; end_with_parents({}); print('lives', flush=True)"


def start(environment: dict[str, str], poll_s: str = "0.05", then: str = "") -> subprocess.Popen[str]:
    command = [sys.executable, "-c", CHILD.format(poll_s) + then]
    return subprocess.Popen(command, env=os.environ | environment, stdout=subprocess.PIPE, text=True)


@pytest.fixture
def other() -> subprocess.Popen[bytes]:
    return subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])


def test_a_child_ends_with_any_of_those_above_it(other: subprocess.Popen[bytes]) -> None:
    above = f"{other.pid}:{began(other.pid)}"
    with start(as_parent(above), then="; import time; time.sleep(600)") as child:
        assert child.stdout is not None
        assert child.stdout.readline() == "lives\n"
        other.kill()  # and is not waited for: a zombie has ended
        assert child.wait(120) == -signal.SIGKILL
    other.wait()


def test_a_child_whose_parent_was_gone_before_it_began_ends_at_once(other: subprocess.Popen[bytes]) -> None:
    above = f"{other.pid}:{began(other.pid)}"
    other.kill()
    other.wait()
    with start({PARENTS: above}, "60") as child:
        assert child.stdout is not None
        assert (child.stdout.read(), child.wait(120)) == ("", -signal.SIGKILL)


def test_a_later_process_with_the_number_of_a_parent_is_none() -> None:
    told = began(os.getpid())
    assert told is not None
    assert not any_parent_ended([(os.getpid(), told)])
    assert any_parent_ended([(os.getpid(), told - 1)])


def test_without_a_word_it_is_the_parent_of_now(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(PARENTS, raising=False)
    assert parents() == [(os.getppid(), began(os.getppid()))]


def test_what_cannot_be_found_out_ends_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_file(*arguments: object) -> None:
        raise OSError(24, "Too many open files")

    monkeypatch.setattr("builtins.open", no_file)
    assert not any_parent_ended([(os.getpid(), 0)])


def test_a_guardian_whose_trainer_was_gone_before_it_began_ends_its_worker(other: subprocess.Popen[bytes]) -> None:
    above = f"{other.pid}:{began(other.pid)}"
    other.kill()
    other.wait()
    code = "from megarl.system.reaper import guarded; guarded(); import time; time.sleep(600)"
    guardian = subprocess.Popen([sys.executable, "-c", code], env=os.environ | {PARENTS: above})
    assert guardian.wait(120) == -signal.SIGKILL
