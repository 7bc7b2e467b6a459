"""Trackers beside MLflow: the calls that a logger gets, and real W&B, TensorBoard and trackio without a network."""

import io
import json
import logging
import math
import os
import sqlite3
import subprocess
import sys
import time
from pathlib import Path

import pytest
from rich.console import Console

from megarl.config.run import TrackingConfig
from megarl.system.errors import ConfigError
from megarl.tracking.loggers import LoggedRun, describe_run
from megarl.tracking.tracker import Tracker

OWN = """
import json, pathlib

class Notes:
    def __init__(self, run):
        self.file = run.folder / "notes.jsonl"
        self.put(["begin", run.id, run.name, run.project, run.resumed, sorted(run.tags)])
    def put(self, line):
        with self.file.open("a") as file:
            file.write(json.dumps(line) + "\\n")
    def log(self, step, metrics):
        if step == 2:
            raise OSError("the service is away, https://me:secret@host")
        self.put([step, metrics])
    def samples(self, step, rows):
        self.put([step, rows])
    def finish(self, status):
        self.put([status])

class Broken:
    def __init__(self, run):
        raise ValueError("no key for https://me:secret@host")
"""
HERE = str(Path(__file__).parent)
ROWS = [{"prompt": "1+1=", "response": "2", "score": 1.0}, {"prompt": "2+2=", "response": "# 5", "answer": "4"}]


@pytest.fixture
def own(tmp_path):
    (tmp_path / "own.py").write_text(OWN)
    return f"{tmp_path / 'own.py'}"


def tracker(tmp_path, logger, **more):
    cfg = TrackingConfig(dir=str(tmp_path), mlflow=False, report=False, loggers=[logger], project="maths")
    resolved = {"model": {"path": "some/model"}, "trainer": {"steps": 3}}
    console = Console(file=io.StringIO(), width=140)
    return Tracker(tmp_path / "run", cfg, "my run", resolved, console=console, total_steps=3, **more)


def record(tmp_path, logger):
    """Three steps with samples in the second, the end."""
    t = tracker(tmp_path, logger)
    for step in (1, 2, 3):
        t.log(step, {"critic/score/mean": step / 4, "bad": math.nan})
    t.samples(3, ROWS)
    t.finish()


def test_a_logger_of_the_users_gets_finite_numbers_samples_and_the_end(tmp_path, own, caplog):
    with caplog.at_level(logging.WARNING):
        record(tmp_path, f"{own}:Notes")
    begin, *rest = [json.loads(line) for line in (tmp_path / "run" / "notes.jsonl").read_text().splitlines()]
    assert begin[2:5] == ["my run", "maths", False]
    assert {"run_dir", "model", "megarl"} <= set(begin[5])
    assert rest == [[1, {"critic/score/mean": 0.25}], [3, {"critic/score/mean": 0.75}], [3, ROWS], ["finished"]]
    assert "training continues: OSError: the service is away" in caplog.text  # and the third step arrived
    assert "1 calls" in caplog.text
    assert "secret" not in caplog.text


def test_a_resumed_run_is_the_same_run_and_another_start_is_not(tmp_path, own):
    for resume_step in (None, 1, None):
        tracker(tmp_path, f"{own}:Notes", resume_step=resume_step).finish("failed")
    lines = [json.loads(line) for line in (tmp_path / "run" / "notes.jsonl").read_text().splitlines()]
    first, resumed, fresh = (line for line in lines if line[0] == "begin")
    assert resumed[1] == first[1] != fresh[1]
    assert resumed[4] is True


def test_a_logger_that_cannot_start_ends_the_run_without_its_secrets(tmp_path, own):
    t = tracker(tmp_path, f"{own}:Broken")
    t._loggers[0]._thread.join()
    with pytest.raises(ConfigError, match=r"own.py:Broken could not be started: ValueError: no key") as caught:
        t.log(1, {"x": 1.0})
    assert "secret" not in str(caught.value)


def test_tensorboard_has_numbers_and_samples(tmp_path):
    pytest.importorskip("tensorboard")
    record(tmp_path, "tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(tmp_path / "run" / "tensorboard" / "train"))
    events.Reload()
    assert [(e.step, e.value) for e in events.Scalars("critic/score/mean")] == [(1, 0.25), (2, 0.5), (3, 0.75)]
    assert "bad" not in events.Tags()["scalars"]
    (samples,) = events.Tensors("samples/text_summary")
    assert b"    response: # 5" in samples.tensor_proto.string_val[0]


def test_tensorboard_shows_no_steps_that_the_run_has_made_again(tmp_path):
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    def shown() -> list[tuple[int, float]]:
        events = EventAccumulator(str(tmp_path / "run" / "tensorboard" / "train"))
        events.Reload()
        return [(e.step, e.value) for e in events.Scalars("critic/score/mean")]

    record(tmp_path, "tensorboard")
    resumed = tracker(tmp_path, "tensorboard", resume_step=1)
    resumed.log(2, {"critic/score/mean": 4.0})
    resumed.finish("stopped")
    assert shown() == [(1, 0.25), (2, 4.0)]
    again = tracker(tmp_path, "tensorboard")
    again.log(1, {"critic/score/mean": 5.0})
    again.finish()
    assert shown() == [(1, 5.0)]


def test_wandb_keeps_an_offline_run(tmp_path, monkeypatch):
    pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    record(tmp_path, "wandb")
    (folder,) = (tmp_path / "run" / "wandb").glob("offline-run-*")
    from wandb.proto import wandb_internal_pb2 as pb
    from wandb.sdk.internal.datastore import DataStore

    def read():
        store, found = DataStore(), []
        store.open_for_scan(str(next(folder.glob("*.wandb"))))
        while (data := store.scan_data()) is not None:
            one = pb.Record()
            one.ParseFromString(data)
            if one.WhichOneof("record_type") == "history":
                values = {item.key or ".".join(item.nested_key): item.value_json for item in one.history.item}
                found.append({key: json.loads(value) for key, value in values.items()})
        return found

    deadline = time.monotonic() + 60  # another process writes it, after the run is closed
    while len(history := read()) < 3:
        assert time.monotonic() < deadline
        time.sleep(0.05)
    assert [line.get("critic/score/mean") for line in history] == [0.25, 0.5, 0.75]
    assert history[-1]["samples.nrows"] == 2


def test_trackio_keeps_the_run(tmp_path):
    pytest.importorskip("trackio")
    # trackio reads where its store is when it is imported.
    code = f"from test_loggers import record; import pathlib; record(pathlib.Path({str(tmp_path)!r}), 'trackio')"
    environment = os.environ | {"TRACKIO_DIR": str(tmp_path), "PYTHONPATH": os.pathsep.join([HERE, *sys.path[1:]])}
    subprocess.run([sys.executable, "-c", code], env=environment, check=True, timeout=120)
    with sqlite3.connect(tmp_path / "maths.db") as store:
        rows = [(step, json.loads(metrics)) for step, metrics in store.execute("SELECT step, metrics FROM metrics")]
    assert [(s, m["critic/score/mean"]) for s, m in rows if "samples" not in m] == [(1, 0.25), (2, 0.5), (3, 0.75)]
    assert [s for s, m in rows if "samples" in m] == [3]


def test_names_of_trackers_are_checked_before_the_start(own):
    from megarl.checks.checklist import Checklist
    from megarl.checks.environment import _check_logger

    found = Checklist()
    for name in ("wanddb", f"{own}:Notes", f"{own}x.py:Notes"):
        _check_logger(name, found, starts=True)
    assert [item.found for item in found.items if item.status == "fail"] == ["wanddb", f"{own}x.py:Notes"]


def test_stages_of_a_run_have_runs_of_their_own(tmp_path):
    def described(stage: str) -> LoggedRun:
        return describe_run(tmp_path, "p", "run", stage, {}, started=1.5, resume_step=None)

    assert (described("sft").name, described("train").name) == ("run (sft)", "run")
    assert described("sft").id != described("train").id
