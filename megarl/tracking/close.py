"""Records kept by launchers: the end of a run whose process was killed, stopped or hung, and automatic restarts."""

from __future__ import annotations

import functools
import logging
import threading
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megarl.artifacts.jsonl import STEP, JsonlWriter, read_jsonl
from megarl.artifacts.lock import is_held
from megarl.artifacts.records import RUN, Needs, has_fields, read_run, setting, write_record
from megarl.system.credentials import mask
from megarl.system.processes import has_ended

if TYPE_CHECKING:
    from megarl.tracking.tracker import Status

log = logging.getLogger(__name__)
RESTARTS = "restarts.jsonl"  # file in the run folder with the automatic restarts of a run or team, and their reasons
_RESTART: Needs = {"restart": int, "time": (int, float), "why": str}
_PROCESS: Needs = {"host": str, "pid": int, "began": (int, float)}
_MLFLOW = "mlflow.*.json"  # pattern of the files that hold the MLflow run of each stage
_BUDGET_S, _TRACE_S = 10.0, 60.0


def close_if_killed(run_dir: Path) -> None:
    """Close a run that is recorded as running although its launcher and processes are gone. Commands that read a run
    folder call this first. A run on another machine is not changed.
    """
    run = read_run(run_dir)
    if run.get("status") != "running" or not has_fields(run.get("process"), _PROCESS):
        return
    # In another container a process may have another number or be invisible; the launcher's lock is visible everywhere.
    if has_ended(run["process"]) and not is_held(run_dir):
        last = run_dir / "metrics.jsonl"  # every step writes this file, so the run ended soon after its last change
        close_run(run_dir, "killed", ended=last.stat().st_mtime if last.is_file() else run.get("started", 0.0))


def close_run(run_dir: Path, status: Status, budget_s: float = _BUDGET_S, *, ended: float | None = None) -> None:
    """Complete the files of a run that did not finish: status in run.json and MLflow, trace.json, report.html.

    Stops after `budget_s` seconds and raises no errors; does nothing if no run is recorded. `ended` is the unix time of
    the run's end; None: now.
    """
    at = time.time() if ended is None else ended
    parts = functools.partial(_close_files, run_dir, status, at), functools.partial(_close_mlflow, run_dir, status)
    _try_all(parts, budget_s)


def show_end(run_dir: Path) -> None:
    """Print the final table of a failed run that is not restarted, and the path of its report. Only the launcher
    calls this. Stops after 10 seconds and raises no errors.
    """

    def show() -> None:
        from megarl.tracking.console import ConsoleView
        from megarl.tracking.tracker import end_text

        run = read_run(run_dir)
        stage = run.get("stage", "train")
        lines = [line for line in read_jsonl(run_dir / "metrics.jsonl", needs=STEP) if line["stage"] == stage]
        mode = run.get("config", {}).get("tracking", {}).get("console", "auto")
        view, report = ConsoleView(None, mode=mode), run_dir / "report.html"
        view.final(end_text(run.get("name", run_dir.name), stage, "failed"), lines)
        if report.is_file():
            view.note(f"report: {report}")

    _try_all([show], _BUDGET_S)


def close_mlflow(run_dir: Path, status: Status) -> None:
    """Close only the MLflow run, as `close_run` does, for a run that is about to be restarted."""
    if any(run_dir.glob(_MLFLOW)):
        _try_all([functools.partial(_close_mlflow, run_dir, status)], _BUDGET_S)


def complete_trace(run_dir: Path) -> None:
    """Write trace.json of a run of several teams if it is missing, and upload it to MLflow. It is missing when
    other teams ended after the actor's team, which writes the run's files. Stops after a minute and raises no errors.
    """

    def write() -> None:
        from megarl.tracking.mlflow_log import add_artifact
        from megarl.tracking.trace import merge_trace

        trace, id_file = merge_trace(run_dir), run_dir / "mlflow.train.json"
        if trace is not None and id_file.is_file():
            add_artifact(id_file, trace)

    if not (run_dir / "trace.json").is_file():
        _try_all([write], _TRACE_S)


def _try_all(parts: Iterable[Callable[[], None]], budget_s: float) -> None:
    """Call all functions in a thread, and wait up to `budget_s` seconds for the thread."""

    def work() -> None:
        for part in parts:
            try:
                part()
            except Exception as error:
                log.warning("the record of the run is incomplete: %s", mask(f"{type(error).__name__}: {error}"))

    thread = threading.Thread(target=work, name="close-run", daemon=True)
    thread.start()
    thread.join(budget_s)


def _close_mlflow(run_dir: Path, status: Status) -> None:
    from megarl.tracking.mlflow_log import STATUS, close_open_run

    for id_file in run_dir.glob(_MLFLOW):
        close_open_run(id_file, STATUS[status])


def _close_files(run_dir: Path, status: Status, ended: float) -> None:
    """Write the final status to run.json if it lacks one, then write the files that show the status."""
    from megarl.tracking.report import write_report
    from megarl.tracking.trace import merge_trace

    run = read_run(run_dir)
    if run.get("status") != "running":
        return
    write_record(run_dir / RUN, run | {"status": status, "ended": ended})
    merge_trace(run_dir)
    if setting(run, "tracking", "report"):
        write_report(run_dir)


def note_restart(run_dir: Path, why: str, start: str) -> None:
    """Record a restart at the current time, with the failed worker's error and phase and the checkpoint `start`."""
    number = len(read_restarts(run_dir)) + 1
    writer = JsonlWriter(run_dir / RESTARTS)
    writer.write({"restart": number, "time": time.time(), "why": why, "start": start})
    writer.close()


def read_restarts(run_dir: Path) -> list[dict[str, Any]]:
    """Return all restarts of the run, oldest first."""
    return read_jsonl(run_dir / RESTARTS, needs=_RESTART)
