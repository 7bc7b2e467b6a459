"""A reward that cannot be loaded is found before a run, and what its import does stays in another process."""

from __future__ import annotations

import contextlib
import signal
import time
from pathlib import Path

import psutil
import pytest

from megarl.config.data import RewardConfig
from megarl.rewards.preflight import check_import
from megarl.system.errors import ConfigError
from megarl.system.imports import import_file

pytestmark = pytest.mark.usefixtures("programs")
FILES = {
    "good.py": "print('hello')\ndef score(samples, weight=1.0):\n    return [weight for s in samples]\n",
    "no_import.py": "import a_package_that_is_nowhere\ndef score(samples):\n    return [0.0 for s in samples]\n",
    "raises.py": "print('{}')\nvalue = {}['missing']\ndef score(samples):\n    return [0.0 for s in samples]\n",
    "slow.py": "import time\ntime.sleep(60)\ndef score(samples):\n    return []\n",
    "made.py": "score = 3\n",
    "starts.py": "import subprocess\nstarted = subprocess.Popen(['sleep', '600'], stdout=subprocess.DEVNULL)\n"
    "open('pid', 'w').write(str(started.pid))\ndef score(samples):\n    return []\n",
}


@pytest.fixture(autouse=True)
def files(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name, text in FILES.items():
        (tmp_path / name).write_text(text)


@pytest.mark.parametrize(
    ("name", "kwargs", "words"),
    [
        (
            "no_import.py:score",
            {},
            ["does not import", "a_package_that_is_nowhere", "no_import.py:1", "correct the file"],
        ),
        ("raises:score", {}, ["'raises' does not import: KeyError", "raises.py:2"]),
        ("made.py:score", {}, ["this name is not callable"]),
        ("good.py:score", {"wait": 1}, ["does not take these arguments", "reward.kwargs"]),
    ],
)
def test_what_a_worker_would_refuse_is_refused(name, kwargs, words):
    with pytest.raises(ConfigError) as caught:
        check_import(RewardConfig(name=name, kwargs=kwargs), limit_s=60)
    for word in words:
        assert word in str(caught.value)


@pytest.mark.parametrize(
    ("code", "words"),
    [
        (
            "import os; os._exit(0)",
            ["reward.name: importing and checking this ended the process (exit code 0)", "'it.py:score'"],
        ),
        ("import os; os.abort()", ["ended the process (signal SIGABRT)"]),
        ("raise SystemExit", ["does not import", "it raises SystemExit while it is imported", "it.py:1"]),
        ("import sys; sys.exit('no GPU here')", ["it raises SystemExit while it is imported: no GPU here"]),
        ("raise KeyboardInterrupt", ["it raises KeyboardInterrupt while it is imported", "it.py:1"]),
        ("print('{' * 10000)\nraise SystemExit(0)", ["it raises SystemExit"]),
    ],
)
def test_a_file_that_ends_its_program_is_refused(code, words):
    Path("it.py").write_text(f"{code}\ndef score(samples):\n    return []\n")
    with pytest.raises(ConfigError) as caught:
        check_import(RewardConfig(name="it.py:score"), limit_s=60)
    assert all(word in str(caught.value) for word in words), caught.value


def test_an_interrupt_by_a_signal_is_none_of_the_file():
    Path("long.py").write_text("import signal\nsignal.raise_signal(signal.SIGINT)\n")
    handler = signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs ignore the signal
    try:
        with pytest.raises(KeyboardInterrupt):
            import_file("long.py")
    finally:
        signal.signal(signal.SIGINT, handler)


PRINTS_MORE = """
import sys
class Chatty:
    def write(self, text):
        print(text, 'more', sep=chr(10), file=sys.__stdout__, flush=True)
    def flush(self):
        pass
sys.stdout = Chatty()
{}['missing']
"""


def test_prints_after_the_answer_do_not_hide_it():
    Path("chatty.py").write_text(PRINTS_MORE)
    with pytest.raises(ConfigError, match="KeyError: 'missing'"):
        check_import(RewardConfig(name="chatty.py:score"), limit_s=60)


def test_good_ones_pass_and_their_prints_are_not_seen(capfd):
    check_import(RewardConfig(name="good.py:score", kwargs={"weight": 2.0}), limit_s=60)
    check_import(RewardConfig(name="numeric"))
    assert capfd.readouterr() == ("", "")


def test_one_that_takes_long_is_left_to_the_workers():
    check_import(RewardConfig(name="slow.py:score"), limit_s=0.5)


def test_what_the_import_starts_ends_with_the_check(tmp_path):
    check_import(RewardConfig(name="starts.py:score"), limit_s=60)
    deadline = time.monotonic() + 120
    with contextlib.suppress(psutil.NoSuchProcess):
        started = psutil.Process(int((tmp_path / "pid").read_text()))
        while started.status() != psutil.STATUS_ZOMBIE:  # until its new parent looks
            assert time.monotonic() < deadline
            time.sleep(0.05)
