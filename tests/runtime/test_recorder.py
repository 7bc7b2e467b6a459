"""What a rank leaves when its run fails, and what every step ends with."""

import threading
from types import SimpleNamespace

import pytest

from megarl.comm import WorkerGroup
from megarl.metrics import Metrics
from megarl.phase import PhaseEvent, drain, phase
from megarl.residency import Residency
from megarl.runtime import health, recorder
from megarl.runtime.context import no_progress
from megarl.runtime.recorder import Recorder


class FakeTracker:
    """`finish` does what the test says."""

    def __init__(self, finish):
        self.finish = finish
        self.progress = object()


@pytest.fixture
def make(tmp_path, monkeypatch):
    def build(finish):
        monkeypatch.setattr("megarl.tracking.tracker.Tracker", lambda *args, **more: FakeTracker(finish))
        config = SimpleNamespace(tracking=None, name="x", model_dump=lambda mode: {})
        c = SimpleNamespace(
            run_dir=tmp_path,
            layout=SimpleNamespace(rank=0, world=WorkerGroup.alone()),
            config=config,
            team=SimpleNamespace(leads=True, others=[]),
            progress=no_progress,
        )
        c.context = c
        return c, Recorder(c, "train", total_steps=1)

    return build


def test_the_error_is_on_disk_before_the_run_is_closed_and_is_not_replaced(make, tmp_path):
    seen = []

    def finish(status):
        seen.append((status, health.read_errors(tmp_path)[0].message))
        raise OSError("disk full")

    c, record = make(finish)

    def run():
        with record:
            assert c.progress is not no_progress
            raise ValueError("the first")

    with pytest.raises(ValueError, match="the first") as caught:
        run()
    assert seen == [("failed", "the first")]
    assert c.progress is no_progress
    assert health.report(tmp_path, caught.value, 0).time == health.read_errors(tmp_path)[0].time


def test_a_slow_end_does_not_hold_a_failed_run(make, monkeypatch):
    monkeypatch.setattr(recorder, "_AFTER_FAILURE_S", 0.1)
    go_on, ended = threading.Event(), []
    _, record = make(lambda status: ended.append(go_on.wait(60)))
    with pytest.raises(KeyboardInterrupt), record:
        raise KeyboardInterrupt
    assert ended == [], "it waited for the slow end"
    go_on.set()


def test_an_error_while_closing_a_finished_run_is_an_error(make):
    def finish(status):
        raise OSError(status)

    _, record = make(finish)
    with pytest.raises(OSError, match="finished"), record:
        pass


def test_every_step_ends_with_a_look_at_the_heap(make, monkeypatch):
    steps = []
    monkeypatch.setattr(recorder, "heap_bound", lambda: SimpleNamespace(after_step=lambda: steps.append(1)))
    monkeypatch.setattr(FakeTracker, "log", lambda self, step, numbers: None, raising=False)
    c, record = make(lambda status: None)
    c.metrics, c.layout.is_lead = Metrics(), True
    monkeypatch.setattr(recorder, "resident_bytes", lambda: 2_500_000_000 + len(steps))
    with record:
        for step in range(3):
            record.start_step()
            assert record.end_step(step)["perf/resident_gb"] == 2.5 + step / 1e9
    assert len(steps) == 3


def test_moves_are_those_of_the_step_without_the_wait_for_other_ranks():
    seconds = {
        "start/residency": 100,
        "resume/residency": 100,
        "checkpoint/residency": 100,
        "checkpoint/residency/meet": 100,
        "step/generate/residency/meet": 3,
        "step/generate/residency": 4,
        "step/generate": 9,
        "step/residency": 2,
        "step/update/micro": 50,
        "sft/train/residency": 16,
    }
    events = [PhaseEvent(path, 0, s * 1_000_000_000, 1) for path, s in seconds.items()]
    assert recorder._stage_seconds(events) == {"residency": 4 - 3 + 2 + 16, "generate": 9}


def test_the_wait_for_other_ranks_has_a_name_of_its_own():
    drain()
    residency = Residency()
    residency.add_servers(SimpleNamespace(hold=lambda *parts: None))
    with phase("step"), residency.phase("publish"):
        pass
    assert [event.path for event in drain()] == ["step/residency/meet", "step/residency", "step"]
