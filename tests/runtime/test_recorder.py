"""What a rank leaves when its run fails, and what every step ends with."""

import errno
import threading
from types import SimpleNamespace

import pytest

from megarl.config.run import RunConfig
from megarl.dag.placement import Placement, TeamPlan
from megarl.dag.stage import Role
from megarl.runtime import health, recorder
from megarl.runtime.context import no_progress
from megarl.runtime.rank_state import TeamContext
from megarl.runtime.recorder import Recorder
from megarl.system.comm import WorkerGroup
from megarl.system.metrics import Metrics
from megarl.system.offload_schedule import OffloadSchedule
from megarl.system.tracing import PhaseEvent, drain, phase
from tests.mail import FolderMail


class FakeTracker:
    """`finish` does what the test says."""

    def __init__(self, finish):
        self.finish = finish
        self.progress = object()


@pytest.fixture
def make(tmp_path, monkeypatch):
    def build(finish):
        monkeypatch.setattr("megarl.tracking.tracker.Tracker", lambda *args, **more: FakeTracker(finish))
        config = SimpleNamespace(
            tracking=None,
            cluster=RunConfig(name="x").cluster,
            trainer=RunConfig(name="x").trainer,
            name="x",
            model_dump=lambda mode: {},
        )
        c = SimpleNamespace(
            run_dir=tmp_path,
            layout=SimpleNamespace(rank=0, world=WorkerGroup.alone()),
            config=config,
            team=TeamContext.of_all(RunConfig(name="x")),
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


def test_a_full_disk_is_said_without_a_traceback(tmp_path, capsys, monkeypatch):
    error = OSError(errno.ENOSPC, "No space left on device")
    found = health.report(tmp_path, error, 0)
    assert found == health.read_errors(tmp_path)[0]
    assert (found.exit_code, found.explained, found.repeats) == (2, True, True)
    assert "a disk to which the run writes is full" in found.message

    def full(*given):
        raise error

    monkeypatch.setattr(health, "write_atomically", full)
    health.write_error(tmp_path, found)
    said = capsys.readouterr().err
    assert "free some space" in said
    assert "Traceback" not in said


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


def test_free_pages_go_back_to_the_kernel_every_100_steps(make, monkeypatch):
    steps, trims = [], []
    monkeypatch.setattr(recorder, "find_malloc_trim", lambda: trims.append)
    monkeypatch.setattr(FakeTracker, "log", lambda self, step, numbers: None, raising=False)
    c, record = make(lambda status: None)
    c.metrics, c.layout.is_lead = Metrics(), True
    monkeypatch.setattr(recorder, "resident_bytes", lambda: 2_500_000_000 + len(steps))
    with record:
        for step in (1, 100, 101, 200):
            record.start_step()
            assert record.end_step(step)["perf/resident_gb"] == 2.5 + len(steps) / 1e9
            steps.append(step)
    assert trims == [0, 0]


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
    offload = OffloadSchedule()
    offload.add_servers(SimpleNamespace(hold=lambda *parts: None))
    with phase("step"), offload.phase("publish"):
        pass
    assert [event.path for event in drain()] == ["step/residency/meet", "step/residency", "step"]


class QueuedMail(FolderMail):
    """A buffer in which something waits."""

    def queues(self) -> dict[str, int]:
        return {"teacher_logp/train": 3}


def of_team(name: str, tmp_path) -> SimpleNamespace:
    """A worker of one of two teams, with their mail in a folder."""
    parallel = RunConfig(name="run").actor.parallel
    plans = (
        TeamPlan("train", (Role.ACTOR,), 1, 0, parallel, ()),
        TeamPlan("frozen", (Role.TEACHER,), 1, 1, parallel, ()),
    )
    placement = Placement(plans)
    team = TeamContext(placement[name], placement, QueuedMail(tmp_path / "mail"))
    config = SimpleNamespace(
        tracking=SimpleNamespace(peak_tflops=None),
        model=SimpleNamespace(dtype="fp32"),
        cluster=RunConfig(name="x").cluster,
        trainer=RunConfig(name="x").trainer,
        name="x",
        model_dump=lambda mode: {},
    )
    layout = SimpleNamespace(rank=0, is_lead=True, world=WorkerGroup.alone())
    c = SimpleNamespace(run_dir=tmp_path, layout=layout, config=config, team=team, mail=team.buffer, metrics=Metrics())
    c.context = c
    return c


class Clock:
    """Time that passes when the test says so."""

    def __init__(self, monkeypatch) -> None:
        self.seconds, self.events = 0, []
        monkeypatch.setattr(recorder.time, "perf_counter", lambda: float(self.seconds))
        monkeypatch.setattr(recorder.time, "time_ns", lambda: self.seconds * 10**9)
        monkeypatch.setattr(recorder.tracing, "drain", self.drain)

    def spend(self, path: str, seconds: int, waits_for: str = "") -> None:
        begun, self.seconds = self.seconds, self.seconds + seconds
        self.events.append(PhaseEvent(path, begun * 10**9, self.seconds * 10**9, 1, waits_for))

    def drain(self) -> list[PhaseEvent]:
        events, self.events = self.events, []
        return events


def test_the_step_of_the_actors_team_has_what_all_teams_measured(tmp_path, monkeypatch):
    logged = []
    monkeypatch.setattr("megarl.tracking.tracker.Tracker", lambda *args, **more: FakeTracker(lambda status: None))
    monkeypatch.setattr(FakeTracker, "log", lambda self, step, numbers: logged.append(step), raising=False)
    monkeypatch.setattr(recorder, "peak_flops", lambda *_: 1e12)
    monkeypatch.setattr(recorder, "peak_memory_gb", lambda: 3.0)
    clock = Clock(monkeypatch)
    beside, lead = (of_team(name, tmp_path) for name in ("frozen", "train"))
    records = [recorder.Recorder(c, "train", total_steps=2) for c in (beside, lead)]
    clock.spend("await_start", 3600, "train")  # the other team's cold start
    records[1].channel = SimpleNamespace(tokens=600)
    for record in records:
        record.start_step()
    clock.spend("step/take/wait", 6, "train")
    for path, seconds in {"step/take": 0, "step/teacher_logp": 2, "step/validate": 0}.items():
        clock.spend(path, seconds)
    beside.metrics.sum("perf/flops", 4e12)
    beside.metrics.mean("both", 1, 1)
    lead.metrics.sum("perf/total_tokens", 600)
    lead.metrics.sum("perf/flops", 2e12)
    lead.metrics.mean("both", 0, 3)
    records[0].end_step(1)
    for path in ("step/await_weights", "await_metrics"):
        clock.spend(path, 1, "frozen")
    first = records[1].end_step(1)
    assert (first["team/frozen/wait_s"], first["team/frozen/busy"]) == (6, pytest.approx(0.25))
    assert (first["team/train/wait_s"], first["team/train/busy"]) == (2, pytest.approx(0.8))
    assert (first["timing_s/step"], first["timing_s/teacher_logp"]) == (10, 2)
    assert first["both"] == 0.25
    assert first["team/train/wait_for/frozen_s"] == 2
    assert (first["perf/bottleneck/train"], first["perf/bottleneck/frozen"]) == (1, 0)
    assert first["store/queue/teacher_logp/train"] == 3
    assert (first["team/train/tokens_per_s"], first["team/frozen/tokens_per_s"]) == (60, 0)
    assert "timing_s/validate" not in first, "the team tells it with what it has measured"
    assert (first["perf/total_memory_gb"], first["perf/flops"]) == (6.0, 6e12)
    assert first["perf/throughput"] == 600 / 10 / 2, "of the workers of all teams"

    clock.spend("await_checkpoint", 4, "train")  # between two steps, and of the team's own time
    for record in records:
        record.start_step()
    clock.spend("step/teacher_logp", 4)
    records[0].end_step(2)
    second = records[1].end_step(2)
    assert (second["team/frozen/wait_s"], second["team/frozen/busy"]) == (4, pytest.approx(0.6))
    assert (second["team/train/wait_s"], second["team/train/busy"]) == (0, 1)
    assert logged == [1, 2]


@pytest.mark.parametrize("share", [False, True])
def test_a_peak_is_measured_again_unless_prefixes_are_shared(tmp_path, monkeypatch, share):
    monkeypatch.setattr(recorder, "peak_flops", lambda *_: 1.0)
    monkeypatch.setattr(recorder, "remeasured_peak", lambda *_: 2.0)
    c = of_team("train", tmp_path)
    engine = {"engine": {"share_prefixes": share}}
    c.config = RunConfig.model_validate({"name": "x", "model": {"dtype": "fp32"}, "actor": engine})
    record = recorder.Recorder.__new__(recorder.Recorder)
    record._c, record._peak, record._remeasured = c, None, False
    numbers = {"perf/total_tokens": 1.0, "timing_s/step": 1.0, "perf/flops": 4.0, "perf/max_memory_gb": 1.0}
    assert record._perf(numbers)["perf/mfu"] == (2.0 if share else 1.0)
