"""What worker 0 prints of long waits."""

import contextlib
import re
import time
from unittest import mock

import pytest

from megarl.runtime import worker
from megarl.runtime.worker import tell_waits
from megarl.tracing import phase


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
    with tell_waits(silent_s=0.02, every_s=0.02):
        with phase("load_model"):
            await_line("... building the model and reading its weights")
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
    monkeypatch.setattr(worker, "tell_waits", lambda: contextlib.nullcontext(calls.append(console)))
    monkeypatch.setattr(worker, "import_callable", lambda entry, where: lambda config, run_dir: None)
    monkeypatch.setattr(worker, "Heartbeat", lambda run_dir, rank: mock.Mock())
    monkeypatch.setattr(worker, "raise_descriptor_limit", lambda: None)
    monkeypatch.delenv(worker.WATCHED, raising=False)
    (tmp_path / "config.yaml").write_text(f"name: x\ntracking: {{console: {console}}}\n")
    assert worker.run("any:entry", tmp_path / "config.yaml") == 0
    assert calls == [console] * told
