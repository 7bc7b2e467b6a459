"""A run whose launcher was killed does not say for ever that it is running."""

import fcntl
import json
import os
import subprocess
import sys
import time

import pytest

from megarl.config.run import TrackingConfig
from megarl.system.processes import has_ended, identity
from megarl.system.tracing import PhaseEvent
from megarl.tracking import mlflow_log, tracker
from megarl.tracking.close import close_if_killed, complete_trace
from megarl.tracking.trace import TraceWriter
from megarl.tracking.tracker import Tracker

WHO = "import json; from megarl.system.processes import identity; print(json.dumps(identity()), flush=True); "


@pytest.fixture
def gone():
    """Identity of a process that was there."""
    return json.loads(subprocess.run([sys.executable, "-c", WHO], capture_output=True, check=True).stdout)


def test_a_process_is_told_from_a_later_one_with_its_number(gone):
    mine = identity()
    assert not has_ended(mine)
    assert has_ended(gone)
    assert has_ended(mine | {"began": mine["began"] - 60})
    assert not has_ended(gone | {"host": "elsewhere"}), "nothing is known of it"


def test_a_process_that_nobody_waits_for_has_ended():
    process = subprocess.Popen([sys.executable, "-c", WHO], stdout=subprocess.PIPE)
    who = json.loads(process.stdout.readline())
    process.stdout.read()
    deadline = time.monotonic() + 20
    while not has_ended(who) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert has_ended(who)
    process.wait()


def record(folder, **fields):
    run = {"status": "running", "started": 100.0, "config": {"tracking": {"report": False}}, **fields}
    (folder / "run.json").write_text(json.dumps(run))
    (folder / "metrics.jsonl").write_text("")
    os.utime(folder / "metrics.jsonl", (500.0, 500.0))


def status(folder):
    return json.loads((folder / "run.json").read_text())


def test_a_killed_run_is_closed_with_the_time_of_its_last_line(tmp_path, gone):
    record(tmp_path, process=gone)
    close_if_killed(tmp_path)
    assert (status(tmp_path)["status"], status(tmp_path)["ended"]) == ("killed", 500.0)


def test_a_run_whose_launcher_holds_its_folder_lives_wherever_its_process_is(tmp_path, gone):
    record(tmp_path, process=gone)
    with (tmp_path / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        close_if_killed(tmp_path)
        assert status(tmp_path)["status"] == "running"
    close_if_killed(tmp_path)
    assert status(tmp_path)["status"] == "killed"


@pytest.mark.parametrize("fields", [{}, {"process": identity()}, {"status": "finished"}])
def test_other_runs_stay_as_they_are(tmp_path, fields, gone):
    record(tmp_path, **({"process": gone} if "status" in fields else {}), **fields)
    before = status(tmp_path)
    close_if_killed(tmp_path)
    assert status(tmp_path) == before


@pytest.mark.parametrize("command", [["report"], ["eval"]])
def test_commands_that_read_the_folder_close_it(tmp_path, gone, command):
    from megarl import cli

    record(tmp_path, process=gone)
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "stage": "train", "x": 1.0, "time": 1.0}\n')
    cli.main([*command, str(tmp_path)])  # eval: there is no config.yaml
    assert status(tmp_path)["status"] == "killed"


def test_what_a_team_did_after_the_end_of_the_record_is_in_the_trace(tmp_path, caplog):
    writer = TraceWriter(tmp_path, 0)
    writer.write([PhaseEvent("step", 0, 1, 1)])
    writer.write([PhaseEvent("export", 2, 3, 1)])
    complete_trace(tmp_path)
    assert '"export"' in (tmp_path / "trace.json").read_text()
    (tmp_path / "trace" / "rank_1.jsonl").write_text("[]\n{}\n")
    complete_trace(tmp_path)
    assert caplog.text == "", "it is written once"
    (tmp_path / "trace.json").unlink()
    (tmp_path / "trace.json.tmp").mkdir()
    complete_trace(tmp_path)
    assert "the record of the run is incomplete" in caplog.text


@pytest.mark.parametrize(
    ("last", "status", "merged"), [(True, "finished", 1), (False, "finished", 0), (False, "failed", 1)]
)
def test_a_trace_that_others_add_to_is_left_to_the_launcher(tmp_path, monkeypatch, last, status, merged):
    calls = []
    monkeypatch.setattr(tracker, "merge_trace", calls.append)
    (tmp_path / "trace.json").write_text("of an earlier command")
    one = Tracker(tmp_path, TrackingConfig(report=False, mlflow=False), "x", {}, last=last)
    one.finish(status)
    assert len(calls) == merged
    assert (tmp_path / "trace.json").is_file() == bool(merged)


def test_mlflow_gets_a_trace_that_is_written_after_its_run_was_closed(tmp_path, monkeypatch):
    class Client:
        def log_artifact(self, run_id: str, path: str) -> None:
            sent.append((run_id, path))

    sent: list[tuple[str, str]] = []
    monkeypatch.setattr(mlflow_log, "_connect", lambda uri: Client())
    monkeypatch.setattr(mlflow_log, "unreachable", lambda uri: None)
    (tmp_path / "mlflow.train.json").write_text('{"uri": "somewhere", "run_id": "7", "status": "FINISHED"}')
    complete_trace(tmp_path)
    assert sent == [], "there is no trace"
    TraceWriter(tmp_path, 0).write([PhaseEvent("step", 0, 1, 1)])
    complete_trace(tmp_path)
    assert sent == [("7", str(tmp_path / "trace.json"))]
