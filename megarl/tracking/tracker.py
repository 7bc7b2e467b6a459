"""Records a run's metrics and samples to all destinations.

RUN_DIR/metrics.jsonl   one line per `log` call, on disk when it returns
RUN_DIR/samples.jsonl   generations of held-out prompts
RUN_DIR/training_samples.jsonl   groups of training samples, of some steps
RUN_DIR/run.json        name, status, machine, resolved configuration
RUN_DIR/trace/          phases per rank; trace.json at the end
RUN_DIR/report.html     at the end
MLflow                  parameters once, metrics per step, the files above at the end
W&B, TensorBoard, ...   the same without the files (megarl.tracking.loggers)
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from megarl.artifacts.jsonl import COLUMNS, STEP, JsonlWriter, read_jsonl, rewrite_jsonl
from megarl.artifacts.lock import refuse_if_taken
from megarl.artifacts.records import RUN, read_run, write_record
from megarl.artifacts.run_folder import accept_config
from megarl.system.errors import ConfigError
from megarl.system.machine import machine_info
from megarl.system.processes import COMMAND, identity
from megarl.system.tracing import keep_beating
from megarl.tracking.console import ConsoleView
from megarl.tracking.loggers import LoggedRun, LoggerThread, describe_run
from megarl.tracking.mlflow_log import STATUS, MlflowLog, logged_to
from megarl.tracking.mlflow_store import default_store, folder_of_default_store
from megarl.tracking.sample_images import FOLDER
from megarl.tracking.trace import merge_trace

if TYPE_CHECKING:
    from rich.console import Console

    from megarl.config.run import TrackingConfig

Status = Literal["finished", "failed", "stopped", "killed"]
Part = Literal["whole", "first", "second"]
_SHOW_LIMIT_S = 1800.0  # deadline for writing the files that show a finished run
_LINES = ("metrics.jsonl", "samples.jsonl", "training_samples.jsonl")
_ARTIFACTS = ("report.html", "trace.json", *_LINES, "config.yaml", "run.json", "graph.svg")
log = logging.getLogger(__name__)


def end_text(name: str, stage: str, status: str) -> str:
    """Return the title of the final table, which ends with how the command ended."""
    return f"{name}: {stage} {status}"


class Tracker:
    """Writes a run's metrics and samples; created on one rank only.

    Args:
        run_dir: run folder, created if missing.
        cfg: the `tracking` section.
        name: run name.
        resolved: resolved configuration as plain data.
        stage: `train` or `sft`; stages of one run folder count their own steps.
        total_steps: steps of this stage; None: unknown.
        resume_step: step after which the run continues; later lines of this stage are cut. None: a new start, which
            moves lines of an earlier start to `metrics.old-N.jsonl`; a second part moves only lines of its stage.
        part: whether this stage is the whole run, its first phase (whose end does not end the run), or its second.
        restarts: whether the launcher may restart the run after a failure; of a failed run the launcher then prints the
          final table, if it does not restart the run (`megarl.tracking.close.show_end`).
        last: whether no other team ends after this one; otherwise the launcher writes trace.json when all have ended
            (`megarl.tracking.close.complete_trace`).
        console: where to print; None: standard output.
    """

    def __init__(
        self,
        run_dir: str | os.PathLike[str],
        cfg: TrackingConfig,
        name: str,
        resolved: dict[str, Any],
        *,
        stage: str = "train",
        total_steps: int | None = None,
        resume_step: int | None = None,
        part: Part = "whole",
        restarts: bool = False,
        last: bool = True,
        console: Console | None = None,
    ) -> None:
        self.run_dir = Path(run_dir).absolute()
        self.run_dir.mkdir(parents=True, exist_ok=True)
        self._cfg, self._name, self._stage, self._part, self._last = cfg, name, stage, part, last
        self._restarts = restarts
        refuse_if_taken(self.run_dir)
        accept_config(self.run_dir)
        for file in _LINES:
            self._prepare(self.run_dir / file, resume_step)
        self._metrics = JsonlWriter(self.run_dir / "metrics.jsonl")
        self._samples = JsonlWriter(self.run_dir / "samples.jsonl", durable=False)
        self._groups = JsonlWriter(self.run_dir / "training_samples.jsonl", durable=False)
        started = self._started() if part == "second" or resume_step is not None else time.time()
        self._run = {"name": name, "stage": stage, "status": "running", "started": started}
        self._run |= {"process": identity(), "command": os.environ.get(COMMAND)}
        self._run |= {"machine": machine_info(), "folder": os.getcwd(), "config": resolved}
        self._write_run()
        self.view = ConsoleView(total_steps, console, "step" if stage == "train" else stage, cfg.console)
        earlier = self._lines(self.run_dir / "metrics.jsonl")  # lines from before the run was resumed
        for line in earlier:
            self.view.recall(line["step"], line)
        about = describe_run(self.run_dir, cfg.project, name, stage, resolved, started=started, resume_step=resume_step)
        self._mlflow = self._open_mlflow(about) if cfg.mlflow else None
        if self._mlflow is not None:
            self._mlflow.catch_up(earlier)
        self._loggers = [LoggerThread(logger, about) for logger in cfg.loggers]

    def log(self, step: int, metrics: dict[str, float]) -> None:
        """Record metrics of a step, which may get several calls. Raise ConfigError if MLflow or another tracker could
        not be started, or a metric has the name of another column of metrics.jsonl.
        """
        reserved = COLUMNS & metrics.keys()
        if reserved:
            problem = f"the metric name {min(reserved)!r} is reserved in metrics.jsonl"
            allowed = "names with a prefix, such as my_stage/time"
            raise ConfigError(problem, where="metrics of a stage", allowed=allowed, fix="rename the metric")
        refuse_if_taken(self.run_dir)
        self._metrics.write({"step": step, "stage": self._stage, "time": time.time(), **metrics})
        self.view.step(step, metrics)
        if self._mlflow is not None:
            self._mlflow.metrics(step, metrics)
        for logger in self._loggers:
            logger.log(step, metrics)

    def samples(self, step: int, rows: Iterable[dict[str, Any]]) -> None:
        """Record generations for the report: dicts with prompt, response, answer, score and further known values."""
        refuse_if_taken(self.run_dir)
        copies = list(rows)
        for row in copies:
            self._samples.write({"step": step, "stage": self._stage, **row})
        for logger in self._loggers:
            logger.samples(step, copies)

    def groups(self, step: int, rows: Iterable[dict[str, Any]]) -> None:
        """Record groups of training samples for the report, as `megarl.runtime.training_samples` makes them."""
        refuse_if_taken(self.run_dir)
        for row in rows:
            self._groups.write({"step": step, "stage": self._stage, **row})

    def progress(self, description: str, total: int | None = None) -> AbstractContextManager[Callable[[float], None]]:
        """Show the progress of long work: `with tracker.progress("validate", 64) as advance: ... advance(1)`."""
        return self.view.progress(description, total)

    def finish(self, status: Status = "finished") -> None:
        """Close everything: status, trace.json, report.html, MLflow artifacts, the final table. Raise FolderTaken if
        another attempt uses the folder and continues the run.
        """
        self._metrics.close()
        self._samples.close()
        self._groups.close()
        refuse_if_taken(self.run_dir)
        lines = self._lines(self.run_dir / "metrics.jsonl")
        if self._part == "first" and status == "finished":
            self.view.final(f"{self._name}: first phase ({self._stage}) is done", lines)
            self.view.note("the run continues with its second phase")
        else:
            self._run |= {"status": status, "ended": time.time()}
            self._write_run()
            with keep_beating(_SHOW_LIMIT_S):
                self._close_trace(status)
                self._close_files(status, lines)
        if self._mlflow is not None:
            self._mlflow.finish(STATUS[status], [self.run_dir / file for file in (*_ARTIFACTS, FOLDER)])
        with keep_beating(_SHOW_LIMIT_S):
            for logger in self._loggers:
                logger.finish(status)
        # otherwise another error, which is more important, is raised
        for logger in self._loggers if status == "finished" else ():
            logger.check()

    def _close_trace(self, status: Status) -> None:
        """Write trace.json, unless other teams are still running; a failure is only logged."""
        try:
            if self._last or status != "finished":
                merge_trace(self.run_dir)
            else:
                (self.run_dir / "trace.json").unlink(missing_ok=True)  # remove the trace of an earlier command
        except Exception as error:
            log.warning("trace.json could not be written: %s: %s", type(error).__name__, error)

    def _close_files(self, status: Status, lines: list[dict[str, Any]]) -> None:
        """Write report.html, logging a failure, and print the final table unless the run may be restarted."""
        report = None
        if self._cfg.report:
            from megarl.tracking.report import write_report

            try:
                report = write_report(self.run_dir)
            except Exception as error:
                log.warning("report.html could not be written: %s: %s", type(error).__name__, error)
        if status == "failed" and self._restarts:
            self.view.close()
            return
        self.view.final(end_text(self._name, self._stage, status), lines)
        if report is not None:
            self.view.note(f"report: {report}")

    def _started(self) -> float:
        """Return when the run first began: from run.json, else from metrics.jsonl, else the current time."""
        record = read_run(self.run_dir)
        if "started" in record:
            return float(record["started"])
        times = [line.get("time") for line in read_jsonl(self.run_dir / "metrics.jsonl", needs=STEP)]
        return min((time_ for time_ in times if isinstance(time_, (int, float))), default=time.time())

    def _lines(self, path: Path) -> list[dict[str, Any]]:
        return [line for line in read_jsonl(path, needs=STEP) if line["stage"] == self._stage]

    def _prepare(self, path: Path, resume_step: int | None) -> None:
        """Remove lines after the step from which the run resumes; for a new start, move old lines to another file."""
        if resume_step is not None:
            rewrite_jsonl(path, lambda line: line["stage"] != self._stage or line["step"] <= resume_step, needs=STEP)
            return
        rewrite_jsonl(path, lambda line: True, needs=STEP)  # only valid lines remain
        old = self._lines(path) if self._part == "second" else read_jsonl(path, needs=STEP)
        if not old:
            return
        number = 1
        while (target := path.with_name(f"{path.stem}.old-{number}.jsonl")).exists():
            number += 1
        archive = JsonlWriter(target, durable=False)
        for line in old:
            archive.write(line)
        archive.close()
        rewrite_jsonl(path, lambda line: self._part == "second" and line["stage"] != self._stage)

    def _open_mlflow(self, about: LoggedRun) -> MlflowLog:
        uri, artifacts, id_file = self._cfg.mlflow_uri, None, self.run_dir / f"mlflow.{self._stage}.json"
        if uri is None:
            earlier = logged_to(id_file) if about.resumed else None
            # The run may be resumed in another working folder, where a relative `tracking.dir` names another store.
            given = Path(self._cfg.dir).absolute()
            store = (earlier and folder_of_default_store(earlier)) or given
            if store.resolve() != given.resolve():
                print(f"MLflow: the run goes on in {store / 'mlflow.db'}, where it began", file=self._cfg.messages)
            store.mkdir(parents=True, exist_ok=True)
            uri, artifacts = default_store(store)
        return MlflowLog(uri, artifacts, about, id_file)

    def _write_run(self) -> None:
        write_record(self.run_dir / RUN, self._run)
