"""What worker 0 prints of long waits."""

import time

import pytest

from megarl.runtime.worker import tell_waits
from megarl.tracing import phase


@pytest.fixture
def await_line(capsys):
    """await_line(text) -> all that is printed until it has that text."""

    def collect(text):
        end, printed = time.monotonic() + 60, ""
        while text not in printed:
            assert time.monotonic() < end, f"{text!r} did not come, but {printed!r}"
            time.sleep(0.01)
            printed += capsys.readouterr().out
        return printed

    return collect


def test_long_waits_are_told_except_in_steps_after_the_first(await_line):
    with tell_waits(silent_s=0.02, every_s=0.02):
        with phase("load_model"):
            await_line("... building the model and reading its weights, 0 s\n")
        with phase("step"), phase("rollout"):
            await_line("... generating, 0 s\n")
        with phase("reduce_metrics"):
            await_line("... waiting for the metrics of all workers, 0 s\n")
        time.sleep(0.05)  # between steps
        with phase("step"), phase("rollout"):
            time.sleep(0.05)
        with phase("finish"):
            printed = await_line("... finishing, 0 s\n")
        assert "generating" not in printed
        assert "importing" not in printed
