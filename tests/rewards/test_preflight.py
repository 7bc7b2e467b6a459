"""A reward that cannot be loaded is found before a run, and what its import does stays in another process."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from megarl.config.data import RewardConfig
from megarl.errors import ConfigError
from megarl.rewards.preflight import check_import

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
        ("made.py:score", {}, ["this is not callable"]),
        ("good.py:score", {"wait": 1}, ["does not take these arguments", "reward.kwargs"]),
    ],
)
def test_what_a_worker_would_refuse_is_refused(name, kwargs, words):
    with pytest.raises(ConfigError) as caught:
        check_import(RewardConfig(name=name, kwargs=kwargs), limit_s=60)
    for word in words:
        assert word in str(caught.value)


def test_good_ones_pass_and_their_prints_are_not_seen(capfd):
    check_import(RewardConfig(name="good.py:score", kwargs={"weight": 2.0}), limit_s=60)
    check_import(RewardConfig(name="numeric"))
    assert capfd.readouterr() == ("", "")


def test_one_that_takes_long_is_left_to_the_workers():
    check_import(RewardConfig(name="slow.py:score"), limit_s=0.5)


def test_what_the_import_starts_ends_with_the_check(tmp_path):
    check_import(RewardConfig(name="starts.py:score"), limit_s=60)
    status = Path(f"/proc/{(tmp_path / 'pid').read_text()}/status")
    deadline = time.monotonic() + 30
    while status.exists() and "State:\tZ" not in status.read_text():  # a zombie until its new parent looks
        assert time.monotonic() < deadline
        time.sleep(0.05)
