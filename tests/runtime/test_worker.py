import time

from megarl.runtime.worker import tell_waits
from megarl.tracing import phase


def test_a_long_phase_is_told_until_the_first_step_is_over(capsys):
    def told(within_s):
        """Return what is printed by the first line, or within so many seconds."""
        end, text = time.monotonic() + within_s, ""
        while not text and time.monotonic() < end:
            time.sleep(0.01)
            text += capsys.readouterr().out
        return text

    with tell_waits(silent_s=0.02, every_s=0.02):
        with phase("load_model"):
            assert "... building the model and reading its weights, 0 s\n" in told(30)
        with phase("step"), phase("rollout"):
            assert "... generating, 0 s" in told(30)
        time.sleep(0.1)
        capsys.readouterr()
        with phase("step"), phase("rollout"):
            assert "generating" not in told(0.2)
