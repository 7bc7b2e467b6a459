"""Whatever a power cut or a full disk did to the files beside the checkpoints: the run goes on and is shown."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from megarl.artifacts import records
from megarl.artifacts.run_folder import repair
from megarl.artifacts.timings import read_timings
from megarl.artifacts.trained import best_step, exported, untrained_best_note
from megarl.commands.cluster import last_step
from megarl.config.run import TrackingConfig
from megarl.launchers.common import process_of
from megarl.runtime.health import failure_of, forget, read_errors, write_error
from megarl.system.tracing import PhaseEvent
from megarl.tracking.close import close_if_killed, close_run, note_restart, read_restarts
from megarl.tracking.mlflow_log import close_open_run
from megarl.tracking.report import write_report
from megarl.tracking.trace import TraceWriter
from megarl.tracking.tracker import Tracker

DAMAGES: dict[str, Callable[[Path], object]] = {
    "empty": lambda path: path.write_bytes(b""),
    "cut": lambda path: path.write_bytes(path.read_bytes()[: path.stat().st_size // 2]),
    "zeros": lambda path: path.write_bytes(bytes(path.stat().st_size)),
    "zeros in it": lambda path: path.write_bytes(b"\0" * 64 + b"\n" + path.read_bytes()),
    "a list": lambda path: path.write_text("[1, 2]\n"),
    "a number": lambda path: path.write_text("7\n"),
    "other fields": lambda path: path.write_text(
        '{"step": "x", "stage": 3, "config": [], "process": 1, "status": {}}\n'
    ),
    "not UTF-8": lambda path: path.write_bytes(b"\xff\xfe\x00\xd8\n" * 20),
    "missing": lambda path: path.unlink(),
    "a folder": lambda path: (path.unlink(), path.mkdir(), (path / "inside").touch()),
}
FILES = ["run.json", "metrics.jsonl", "samples.jsonl", "restarts.jsonl", "exported.json", "trace/rank_0.jsonl"]
FILES += ["trace.json", "report.html", "config.yaml", "graph.svg", "log.txt", "mlflow.train.json"]
FILES += ["checkpoints/best.json", "errors/rank_1.json"]
#: They are written and never read back: whether they are there is all that can matter.
UNREAD = ("report.html", "log.txt")
CONFIG = {"tracking": {"report": True}, "trainer": {"best_metric": "val/acc", "steps": 9}, "cluster": {"nproc": 1}}
CONFIG |= {"placement": {"teams": {}}}


def write_run(folder: Path, *, resume_step: int | None) -> None:
    tracker = Tracker(folder, TrackingConfig(mlflow=False), "it", CONFIG, resume_step=resume_step)
    first = 0 if resume_step is None else resume_step + 1
    writer = TraceWriter(folder, 0)
    for step in range(first, first + 4):
        tracker.log(step, {"val/acc": step / 10, "timing_s/step": 1.0})
        tracker.samples(step, [{"prompt": "p", "response": "r", "score": 1.0}])
        writer.write([PhaseEvent("step", step, step + 1, step)])
    writer.close()
    tracker.finish()


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs") / "whole"
    write_run(folder, resume_step=None)
    note_restart(folder, "rank 1 died", "from the beginning")
    write_error(folder, failure_of(ValueError("of an earlier attempt"), 1))
    (folder / "checkpoints").mkdir()
    (folder / "checkpoints/best.json").write_text('{"step": 3}')
    (folder / "exported.json").write_text('[{"folder": "hf", "step": 3, "which": "last"}]')
    (folder / "mlflow.train.json").write_text('{"uri": "sqlite:///no.db", "run_id": "a", "status": "FINISHED"}')
    for name in ("config.yaml", "graph.svg", "log.txt"):
        (folder / name).write_text("name: it\n")
    return folder


def look(folder: Path) -> None:
    """What commands that only read do with a run folder."""
    close_if_killed(folder)
    (
        process_of(folder),
        last_step(folder),
        untrained_best_note(folder),
        best_step(folder / "checkpoints"),
        exported(folder),
    )
    read_restarts(folder), read_errors(folder)
    close_run(folder, "killed")
    close_open_run(folder / "mlflow.train.json", "KILLED")
    if (folder / "metrics.jsonl").is_file():
        write_report(folder)


@pytest.mark.parametrize(
    ("name", "damage"),
    [(name, damage) for name in FILES for damage in (("empty", "missing", "a folder") if name in UNREAD else DAMAGES)],
)
def test_a_run_goes_on_whatever_happened_to_a_file_beside_its_checkpoints(whole, tmp_path, monkeypatch, name, damage):
    monkeypatch.setattr(records, "_reported", set())
    folder = tmp_path / "run"
    shutil.copytree(whole, folder)
    DAMAGES[damage](folder / name)
    look(folder)
    repair(folder)
    forget(folder)
    write_run(folder, resume_step=3)
    note_restart(folder, "rank 0 died", "from the beginning")
    look(folder)
    assert json.loads((folder / "run.json").read_text())["status"] == "finished"
    steps = [json.loads(line)["step"] for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert steps[-4:] == [4, 5, 6, 7]
    assert damage == "zeros in it" or name == "metrics.jsonl" or steps == [*range(8)]
    assert read_timings(folder).last == 7
    assert (folder / "trace.json").is_file()
    assert "rank 0 died" in (folder / "report.html").read_text()


@pytest.mark.parametrize("name", ["run.json", "metrics.jsonl", "samples.jsonl"])
@pytest.mark.parametrize("damage", ["empty", "cut", "zeros", "a list", "not UTF-8", "a folder"])
def test_damage_is_told_in_one_line_that_names_the_file(whole, tmp_path, monkeypatch, caplog, name, damage):
    monkeypatch.setattr(records, "_reported", set())
    folder = tmp_path / "run"
    shutil.copytree(whole, folder)
    DAMAGES[damage](folder / name)
    repair(folder)
    write_run(folder, resume_step=3)
    silent = name != "run.json" and damage in ("empty", "cut", "zeros")  # a line that a kill has cut is nothing new
    assert [str(folder / name) in message for message in caplog.messages] == ([] if silent else [True])


def test_a_run_without_its_record_began_with_its_first_line(whole, tmp_path):
    folder = tmp_path / "run"
    shutil.copytree(whole, folder)
    first = json.loads((folder / "metrics.jsonl").read_text().splitlines()[0])["time"]
    (folder / "run.json").write_bytes(b"")
    write_run(folder, resume_step=3)
    assert json.loads((folder / "run.json").read_text())["started"] == first


@pytest.mark.parametrize("name", ["trace", "errors", "heartbeats", "logs"])
def test_a_file_in_place_of_a_folder_is_set_aside(tmp_path, name, caplog):
    (tmp_path / name).write_text("")
    repair(tmp_path)
    assert not (tmp_path / name).exists()
    assert f"{name}.damaged-1" in caplog.text
