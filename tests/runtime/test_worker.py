"""What workers print of long waits, and of signals."""

import contextlib
import faulthandler
import os
import re
import signal
import sys
import time
from pathlib import Path
from unittest import mock

import pytest

from megarl.artifacts.run_folder import SAVE_REQUEST
from megarl.launchers.ray import Actor
from megarl.runtime import worker
from megarl.runtime.worker import print_long_waits
from megarl.system.tracing import phase


@pytest.fixture
def await_line(capsys):
    """await_line(text) -> all that is printed until it has that text, with a number of seconds after it."""

    def collect(text):
        end, printed = time.monotonic() + 60, ""
        while not re.search(re.escape(text) + r", \d+ s\n", printed):
            assert time.monotonic() < end, f"{text!r} did not come, but {printed!r}"
            time.sleep(0.01)
            printed += capsys.readouterr().out
        return printed

    return collect


def test_long_waits_are_told_except_in_steps_after_the_first(await_line):
    with print_long_waits(silent_s=0.02, every_s=0.02):
        with phase("load_model"):
            await_line("... importing the model's libraries, building it and reading its weights")
        with phase("step"), phase("rollout"):
            await_line("... generating")
        with phase("reduce_metrics"):
            await_line("... waiting for the metrics of all workers")
        time.sleep(0.05)  # between steps
        with phase("step"), phase("rollout"):
            time.sleep(0.05)
        with phase("finish"):
            printed = await_line("... finishing")
        assert "generating" not in printed
        assert "importing" not in printed


@pytest.mark.parametrize(("console", "told"), [("quiet", False), ("plain", True)])
def test_a_quiet_console_is_told_no_waits(console, told, monkeypatch, tmp_path):
    calls = []
    monkeypatch.setattr(worker, "print_long_waits", lambda: contextlib.nullcontext(calls.append(console)))
    monkeypatch.setattr(worker, "import_callable", lambda entry, **_: lambda config, run_dir: None)
    monkeypatch.setattr(worker, "Heartbeat", lambda run_dir, rank: mock.Mock())
    monkeypatch.setattr(worker, "raise_descriptor_limit", lambda: None)
    monkeypatch.delenv(worker.WATCHED, raising=False)
    (tmp_path / "config.yaml").write_text(f"name: x\ntracking: {{console: {console}}}\n")
    assert worker.run("any:entry", tmp_path / "config.yaml") == 0
    assert calls == [console] * told


@pytest.fixture
def actor(monkeypatch):
    """An actor in this process, which keeps its own output, path and handlers of signals."""
    monkeypatch.setattr(worker, "redirect_output", lambda log_dir: None)
    monkeypatch.setattr(os, "register_at_fork", lambda **functions: None)
    monkeypatch.setattr(faulthandler, "register", lambda *_, **settings: None)
    monkeypatch.setattr(sys, "path", [*sys.path])
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    yield Actor()
    for number, handler in before.items():
        signal.signal(number, handler)


def test_a_signal_asks_for_a_checkpoint_while_a_worker_works_and_is_ignored_after(actor, monkeypatch, tmp_path, capfd):
    def work(entry: str, config_path: Path) -> int:
        signal.raise_signal(signal.SIGTERM)
        return 0

    monkeypatch.setattr(worker, "run", work)
    config = str(tmp_path / "config.yaml")
    assert actor.run("any:entry", config, str(tmp_path), {}) == 0
    assert "SIGTERM: requests a checkpoint; the launcher ends the run" in capfd.readouterr().err
    (tmp_path / SAVE_REQUEST).unlink()

    signal.raise_signal(signal.SIGTERM)
    assert capfd.readouterr().err == ""
    assert not (tmp_path / SAVE_REQUEST).exists()


@pytest.mark.parametrize(
    ("name", "value", "allowed"),
    [("MASTER_PORT", "a", "1 to 65535"), ("WORLD_SIZE", "0", "1 or more"), ("RANK", "-1", "0 or more")],
)
def test_a_worker_whose_place_in_its_team_is_no_number_names_the_variable(name, value, allowed, monkeypatch, capsys):
    for number, variable in enumerate(worker.NEEDED):
        monkeypatch.setenv(variable, str(number + 1))
    monkeypatch.setenv(name, value)
    with pytest.raises(SystemExit) as end:
        worker.main(["--entry", "m:f", "--config", "config.yaml"])
    assert end.value.code == 2
    error = capsys.readouterr().err
    assert f"{name}: " in error
    assert f"allowed: {allowed}" in error
