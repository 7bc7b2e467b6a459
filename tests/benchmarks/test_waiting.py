"""What a policy waits for physics, measured on processes that sleep."""

import pytest

from megarl.benchmarks.waiting import measure

pytestmark = pytest.mark.procs


@pytest.mark.parametrize("halves", [False, True])
def test_a_rollout_takes_no_less_than_its_floor(halves):
    found = measure(halves=halves, slots=4, turns=3, chunk=2, step_ms=10.0, fixed_ms=10.0, row_ms=1.0)
    # a turn of all slots: 20 ms of physics and 14 ms of the policy; of halves: 20 ms and 12 ms
    assert found["floor"] == pytest.approx(3 * (0.032 if halves else 0.034))
    assert found["seconds"] >= 0.95 * found["floor"]  # the last chunk of one half ends with nothing after it
    assert 0 < found["waits"] < 1
