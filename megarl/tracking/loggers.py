"""Trackers in addition to MLflow: W&B, TensorBoard, trackio, or the user's own class.

    tracking: {loggers: [wandb, tensorboard, my_loggers.py:Chat], project: maths}

Each tracker is called in its own thread, so that a slow service delays no step. A tracker that cannot be started ends
the run at the next step. A call that fails later is logged once and counted, because metrics.jsonl has every number.
"""

from __future__ import annotations

import contextlib
import getpass
import hashlib
import logging
import math
import os
import queue
import subprocess
import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import megarl
from megarl.system.credentials import mask
from megarl.system.errors import ConfigError, describe
from megarl.system.imports import import_callable
from megarl.system.processes import COMMAND

log = logging.getLogger(__name__)
_KEY = "tracking.loggers"
_GIT_S = 5.0
_FINISH_TIMEOUT_S = 120.0
_MOST_WAITING = 10_000  # maximum number of calls that wait for a slow service
_TABLE = ("prompt", "response", "answer", "score")  # columns in the table of samples; absent ones are left out
_TEXT_CHARS = 20_000  # maximum number of characters of one sample in TensorBoard


@dataclass(frozen=True)
class LoggedRun:
    """The description of a run that is passed to trackers (W&B, TensorBoard, ...).

    Attributes:
        id: unique id of the run; a resumed run keeps it.
        name: the recipe's name, with the stage if that is not `train`.
        stage: `train` or `sft`.
        folder: run folder.
        project: `tracking.project`.
        config: the resolved recipe, as plain data, without credentials.
        tags: command, commit, user, model and run folder (`run_tags`).
        resumed: whether the run continues an earlier attempt, whose last steps it may repeat.
        first_step: first step of this attempt; records of this and later steps by earlier attempts are obsolete.
    """

    id: str
    name: str
    stage: str
    folder: Path
    project: str
    config: dict[str, Any]
    tags: dict[str, str]
    resumed: bool
    first_step: int = 0


class RunLogger(Protocol):
    """A tracker, constructed with a `LoggedRun`. All calls come in order from one thread."""

    def log(self, step: int, metrics: dict[str, float]) -> None:
        """Record finite numbers of a step. A step may get several calls, with different metrics."""

    def samples(self, step: int, rows: Sequence[dict[str, Any]]) -> None:
        """Record generations: dicts with `prompt`, `response`, `answer`, `score` and further values."""

    def finish(self, status: str) -> None:
        """Close the run, whose status is `finished`, `failed`, `stopped` or `killed`."""


class _TableLogger:
    """Implements the calls that W&B and trackio share. `_package` is the imported package, `_run` its run."""

    _package: Any
    _run: Any
    _first_columns: tuple[str, ...] = ()

    def log(self, step: int, metrics: dict[str, float]) -> None:
        """Record the numbers of a step."""
        self._run.log(metrics, step=step)

    def samples(self, step: int, rows: Sequence[dict[str, Any]]) -> None:
        """Log generated samples as a table of the tracker."""
        columns = [*self._first_columns, *columns_of(rows)]
        data = [[_cell((row | {"step": step}).get(column)) for column in columns] for row in rows]
        self._run.log({"samples": self._package.Table(columns=columns, data=data)}, step=step)


class WandbLogger(_TableLogger):
    """A run of Weights & Biases; with `WANDB_MODE=offline` it is stored in the folder `wandb` of the run folder.

    W&B accepts each step only once, so steps that a resumed run repeats keep the metrics of the first time.
    """

    _first_columns = ("step",)

    def __init__(self, run: LoggedRun) -> None:
        os.environ.setdefault("WANDB_ERROR_REPORTING", "false")  # otherwise W&B sends its own errors over the network
        import wandb

        self._package = wandb
        # Capturing the console would take standard output from the worker's log; perf/* already reports the load.
        settings = wandb.Settings(console="off", silent=True, x_disable_stats=True)
        self._run = wandb.init(
            project=run.project,
            name=run.name,
            id=run.id,
            resume="allow" if os.environ.get("WANDB_MODE") != "offline" else None,  # W&B cannot resume offline runs
            dir=run.folder,
            config=run.config | {"tags": run.tags},
            job_type=run.stage,
            settings=settings,
        )

    def finish(self, status: str) -> None:
        """Close the run and wait for its upload."""
        self._run.summary["status"] = status
        self._run.finish(exit_code=0 if status in ("finished", "stopped") else 1)


class TensorboardLogger:
    """Event files in the folder `tensorboard/STAGE` of the run folder; every start of the run adds a file.

    For steps in several files, TensorBoard shows only the latest file.
    """

    def __init__(self, run: LoggedRun) -> None:
        from torch.utils.tensorboard import SummaryWriter

        make: Any = SummaryWriter  # SummaryWriter has no type hints
        self._writer = make(str(run.folder / "tensorboard" / run.stage), purge_step=run.first_step)
        lines = "\n".join(f"    {key}: {value}" for key, value in run.tags.items())
        self._writer.add_text("run", f"{run.name}\n\n{lines}")

    def log(self, step: int, metrics: dict[str, float]) -> None:
        """Record the numbers of a step, readable at once."""
        for name, value in metrics.items():
            self._writer.add_scalar(name, value, step)
        self._writer.flush()

    def samples(self, step: int, rows: Sequence[dict[str, Any]]) -> None:
        """Record samples as text, indented so that Markdown shows them unformatted."""
        columns = columns_of(rows)
        text = "\n\n".join("\n".join(f"{c}: {_cell(row.get(c))}" for c in columns)[:_TEXT_CHARS] for row in rows)
        indented = "".join(f"    {line}" for line in text.splitlines(keepends=True))
        self._writer.add_text("samples", indented, step)

    def finish(self, status: str) -> None:
        """Close the event file."""
        self._writer.add_text("status", status)
        self._writer.close()


class TrackioLogger(_TableLogger):
    """A run of trackio, stored locally or in the place that trackio's environment variables name."""

    def __init__(self, run: LoggedRun) -> None:
        import trackio

        self._package = trackio
        self._run = trackio.init(
            project=run.project,
            name=f"{run.name} {run.id}",  # trackio identifies a resumed run by its name
            config=run.config | {"tags": run.tags},
            resume="allow",
            embed=False,
            auto_log_gpu=False,
            auto_log_cpu=False,
        )

    def finish(self, status: str) -> None:
        """Close the run."""
        self._run.finish()


#: Name in `tracking.loggers` -> class. The package to import has the same name.
LOGGERS: dict[str, Callable[[LoggedRun], RunLogger]] = {
    "wandb": WandbLogger,
    "tensorboard": TensorboardLogger,
    "trackio": TrackioLogger,
}


def describe_run(
    folder: Path,
    project: str,
    name: str,
    stage: str,
    config: dict[str, Any],
    *,
    started: float,
    resume_step: int | None,
) -> LoggedRun:
    """Return the description of a run for trackers."""
    number = hashlib.sha256(f"{folder} {stage} {started!r}".encode()).hexdigest()[:12]
    title = name if stage == "train" else f"{name} ({stage})"
    resumed, first_step = resume_step is not None, 0 if resume_step is None else resume_step + 1
    return LoggedRun(number, title, stage, folder, project, config, run_tags(folder, config), resumed, first_step)


def run_tags(folder: Path, config: dict[str, Any]) -> dict[str, str]:
    """Return tags for the run's origin: run folder, model, command, user, commit of the current folder, and version."""
    user, commit, model = None, None, config.get("model", {})
    with contextlib.suppress(KeyError, OSError):  # in a container the user number may have no name
        user = getpass.getuser()
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        command = ["git", "rev-parse", "HEAD"]
        commit = subprocess.run(command, capture_output=True, text=True, timeout=_GIT_S, check=True).stdout.strip()
    tags = {
        "run_dir": str(folder),
        "model": model.get("path") or (model.get("hf_config") or {}).get("model_type"),
        "command": os.environ.get(COMMAND),
        "user": user,
        "commit": commit,
        "megarl": megarl.__version__,
    }
    return {key: str(value) for key, value in tags.items() if value}


def columns_of(rows: Sequence[dict[str, Any]]) -> list[str]:
    """Return the columns of the table of samples for which any row has a value."""
    return [name for name in _TABLE if any(name in row for row in rows)]


def _cell(value: Any) -> Any:
    return value if value is None or isinstance(value, (str, int, float)) else str(value)


class LoggerThread:
    """Calls one tracker in a thread of its own, so that a slow tracker does not delay training.

    Args:
        name: an element of `tracking.loggers`.
        run: description of the run.
    """

    def __init__(self, name: str, run: LoggedRun) -> None:
        self._name, self._run = name, run
        self._calls: queue.SimpleQueue[Callable[[RunLogger], None] | None] = queue.SimpleQueue()
        self._start_error: Exception | None = None
        self.failures = 0
        self._thread = threading.Thread(target=self._serve, name=f"megarl-{name}", daemon=True)
        self._thread.start()

    def log(self, step: int, metrics: dict[str, float]) -> None:
        """Queue the finite numbers of a step. Raise ConfigError if the tracker could not be started."""
        self.check()
        finite = {name: float(value) for name, value in metrics.items() if math.isfinite(value)}
        self._put(lambda logger: logger.log(step, finite))

    def samples(self, step: int, rows: Iterable[dict[str, Any]]) -> None:
        """Queue samples for the tracker."""
        copies = list(rows)
        if copies:
            self._put(lambda logger: logger.samples(step, copies))

    def finish(self, status: str) -> None:
        """Close the tracker's run, wait for it up to `_FINISH_TIMEOUT_S`, and log how many calls failed."""
        self._calls.put(lambda logger: logger.finish(status))
        self._calls.put(None)
        self._thread.join(_FINISH_TIMEOUT_S)
        if self._thread.is_alive():
            log.warning("%s: %s did not receive everything within %g s", _KEY, self._name, _FINISH_TIMEOUT_S)
        if self.failures:
            log.warning("%s: %d calls of %s failed; metrics.jsonl is complete", _KEY, self.failures, self._name)

    def _put(self, call: Callable[[RunLogger], None]) -> None:
        if self._calls.qsize() < _MOST_WAITING:
            self._calls.put(call)
        else:
            self.failures += 1

    def check(self) -> None:
        """Raise a ConfigError if the tracker could not be started."""
        if self._start_error is not None:
            error = self._start_error
            offline = ", set WANDB_MODE=offline" if self._name == "wandb" else ""
            raise ConfigError(
                f"{self._name} could not be started: {mask(describe(error))}",
                where=_KEY,
                found=self._name,
                fix=f"fix the error above{offline}, or remove the tracker from the list",
            ) from error

    def _serve(self) -> None:
        try:
            make = LOGGERS.get(self._name) or import_callable(self._name, where=_KEY)
            logger: RunLogger = make(self._run)
        except Exception as error:
            self._start_error = error
            return
        while (call := self._calls.get()) is not None:
            try:
                call(logger)
            except Exception as error:
                self.failures += 1
                if self.failures == 1:
                    text = mask(describe(error))
                    log.warning("%s: a call of %s failed, training continues: %s", _KEY, self._name, text)
