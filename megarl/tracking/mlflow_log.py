"""Logging to MLflow in a thread: importing MLflow takes seconds, and a remote server may be slow.

A store that cannot be opened at the start ends the run (at the next `metrics` call). A server that is down, or that
returns errors after being down, does not: calls wait in the queue until it works or the run ends. A call that fails
later is logged once and counted at the end, because metrics.jsonl has every number.
"""

from __future__ import annotations

import logging
import math
import os
import queue
import threading
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from megarl.artifacts.jsonl import COLUMNS
from megarl.artifacts.records import Needs, read_record, write_record
from megarl.config.yamlio import flatten
from megarl.system.credentials import MASK, PASSWORD, mask, put_back
from megarl.system.errors import ConfigError
from megarl.system.tracing import beat
from megarl.tracking.loggers import LoggedRun
from megarl.tracking.mlflow_store import down_text, make_store, unreachable
from megarl.tracking.names import SafeNames

log = logging.getLogger(__name__)
STATUS = {"finished": "FINISHED", "failed": "FAILED", "stopped": "KILLED", "killed": "KILLED"}
_PARAM_CHARS = 500  # the smallest limit on a parameter's length among MLflow's stores
_PARAMS_PER_CALL = 100
_METRICS_PER_CALL = 1000
_FINISH_TIMEOUT_S = 120.0  # deadline for sending the remaining data (report, trace) to a server that replies
_ASK_S = 3.0  # seconds between two probes of a server at the end
_RETRY_S = 30.0  # seconds between two probes of a server that was down
_MOST_WAITING = 10_000  # maximum number of calls that wait for a server that is down, about 100 MB
_FOLDER_TAG = "run_dir"  # tag of `run_tags` with the run folder
# MLflow's states of a run that was deleted and can be restored, and of one that is gone
_DELETED, _GONE = "deleted", "RESOURCE_DOES_NOT_EXIST"
_REJECTED = ("INVALID_PARAMETER_VALUE", "BAD_REQUEST")

# fields of the file that holds the MLflow run's id
_ID_NEEDS: Needs = {"uri": str, "run_id": str, "status": str}
_Call = Callable[[Any, str], None]


class MlflowLog:
    """One MLflow run. A file in the run folder keeps its id and status, so that a resumed run continues it and the
    launcher can close it if this process could not.

    Args:
        uri: tracking URI.
        artifacts: folder for artifacts of a new experiment, for stores on this machine; None: the server decides.
        run: description of the run. Its project is the experiment, created if missing; its configuration is logged
            once.
        id_file: file that keeps the id of the MLflow run.
    """

    def __init__(self, uri: str, artifacts: str | None, run: LoggedRun, id_file: Path) -> None:
        self._uri, self._artifacts, self._run, self._id_file = uri, artifacts, run, id_file
        self._calls: queue.SimpleQueue[_Call | None] = queue.SimpleQueue()
        self._steps: dict[str, frozenset[int]] = {}
        self._names, self._rejected = SafeNames(), set[str]()
        self._start_error: Exception | None = None
        self._opened: tuple[Any, str] | None = None  # MLflow's client, and the id of the run
        # id of the created MLflow run, so that a second attempt does not create another
        self._created: str | None = None
        self._down = self._refused = False
        self._ending = threading.Event()
        self.failures = 0
        self._thread = threading.Thread(target=self._serve, name="megarl-mlflow", daemon=True)
        self._thread.start()

    def metrics(self, step: int, values: dict[str, float]) -> None:
        """Queue the finite numbers of one step, under names that MLflow accepts (`safe_name`). Raise ConfigError if the
        store could not be opened.
        """
        self._check()
        if self._calls.qsize() < _MOST_WAITING:
            self._calls.put(self._step_call(step, values, time.time()))
        else:
            self.failures += 1

    def catch_up(self, lines: Iterable[dict[str, Any]]) -> None:
        """Queue earlier steps (lines of metrics.jsonl) that the store lacks. A killed process may not have sent its
        last steps, and a different store has no steps yet. Steps already in the store are not changed.
        """
        for line in lines:
            values = {key: value for key, value in line.items() if key not in COLUMNS and value is not None}
            self._calls.put(self._step_call(line["step"], values, line.get("time", time.time())))

    def _step_call(self, step: int, values: dict[str, float], when: float) -> _Call:
        """Return the call that logs the finite numbers of one step, measured at unix time `when`."""

        def call(client: Any, run_id: str) -> None:
            finite = {self._names.of(key): float(value) for key, value in values.items() if math.isfinite(value)}
            wanted = [key for key in finite if key not in self._rejected]
            new = [key for key in wanted if step not in self._earlier(client, run_id, key)]
            for start in range(0, len(new), _METRICS_PER_CALL):
                part = new[start : start + _METRICS_PER_CALL]
                self._send(client, run_id, {key: finite[key] for key in part}, int(when * 1000), step)

        return call

    def _send(self, client: Any, run_id: str, values: dict[str, float], now: int, step: int) -> None:
        """Send a batch of metrics. If MLflow rejects it, send each metric separately and log the rejected ones."""
        from mlflow.entities import Metric

        metrics = [Metric(key, value, now, step) for key, value in values.items()]
        try:
            client.log_batch(run_id, metrics=metrics)
            return
        except Exception as error:
            if not _is_rejection(error):
                raise
            whole = error
        reasons: dict[str, str] = {}
        for metric in metrics:
            try:
                client.log_batch(run_id, metrics=[metric])
            except Exception as error:
                if not _is_rejection(error):
                    raise
                reasons[metric.key] = _text(error)
        # if all fail, the run is to blame (it was deleted, for example), not the metrics
        if len(reasons) == len(metrics) > 1:
            raise whole
        self._rejected |= reasons.keys()
        for key, reason in reasons.items():
            log.warning("MLflow rejects the metric %r, so it is missing there; metrics.jsonl has it: %s", key, reason)

    def finish(self, status: str, artifacts: Iterable[Path]) -> None:
        """Upload files and folders, close the run (`FINISHED`, `FAILED`, `KILLED`), wait, and log failed calls."""
        paths = [path for path in artifacts if path.exists()]

        def call(client: Any, run_id: str) -> None:
            for path in paths:
                if path.is_dir():
                    client.log_artifacts(run_id, str(path), path.name)
                else:
                    client.log_artifact(run_id, str(path))

        self._calls.put(call)
        self._calls.put(lambda client, run_id: self._close(client, run_id, status))
        self._calls.put(None)
        self._ending.set()
        gone = self._await_end()
        if gone is not None:
            todo = "run the command again to send the rest"
            log.warning("tracking.mlflow_uri: MLflow at %s: %s; its run is incomplete: %s", self._uri, gone, todo)
        if self.failures:
            log.warning("MLflow at %s: %d calls failed; metrics.jsonl is complete", self._uri, self.failures)
        if status == "FINISHED":  # otherwise the run's own error, which is more important, is raised
            self._check()

    def _await_end(self) -> str | None:
        """Wait until the queue is empty or the server stops replying; return why waiting ended early, or None."""
        deadline = time.monotonic() + _FINISH_TIMEOUT_S
        self._thread.join(_ASK_S)
        while self._thread.is_alive():
            beat()  # report progress, as the wait has its own deadline
            reason = unreachable(self._uri)
            if reason is not None:
                return f"does not reply ({reason})"
            if time.monotonic() > deadline:
                return f"did not receive everything within {_FINISH_TIMEOUT_S:g} s"
            self._thread.join(_ASK_S)
        return None

    def _close(self, client: Any, run_id: str, status: str) -> None:
        client.set_terminated(run_id, status)
        self._keep(run_id, status)

    def _keep(self, run_id: str, status: str) -> None:
        known = {"uri": self._uri, "experiment": self._run.project, "run_id": run_id, "status": status}
        write_record(self._id_file, known)

    def _earlier(self, client: Any, run_id: str, key: str) -> frozenset[int]:
        """Return the steps at which earlier processes logged a metric, because a resumed run repeats some of them."""
        if not self._run.resumed:
            return frozenset()
        if key not in self._steps:
            self._steps[key] = frozenset(point.step for point in client.get_metric_history(run_id, key))
        return self._steps[key]

    def _check(self) -> None:
        if self._start_error is not None:
            error = self._start_error
            problem = f"MLflow could not be started: {_text(error)}"
            fix = "correct the URI, or set tracking.mlflow: false"
            raise ConfigError(problem, where="tracking.mlflow_uri", found=self._uri, fix=fix) from error

    def _serve(self) -> None:
        self._is_ready()  # check now, so that errors are raised early
        while self._start_error is None and (call := self._calls.get()) is not None:
            if not self._make_call(call):
                # This call failed, and so do the calls in the queue. At the end of a run, the queue also has the end
                # mark, which is counted in place of this call.
                self.failures += self._calls.qsize()
                return

    def _make_call(self, call: _Call) -> bool:
        """Wait until the MLflow server replies, then make one call to it; return False if the run ends before that."""
        while self._await_server():
            assert self._opened is not None
            try:
                call(*self._opened)
                return True
            except Exception as error:
                reason = unreachable(self._uri)
                if reason is not None:  # the server is down again: wait for it, and retry
                    self._lost(reason)
                    continue
                self.failures += 1
                if self.failures == 1:
                    log.warning("MLflow call failed, training continues: %s", _text(error))
                return True
        return False

    def _await_server(self) -> bool:
        """Wait until the server replies and return whether it does. After `finish` was called, probe it only once."""
        while not self._is_ready() and self._start_error is None:
            if self._ending.is_set():
                return False
            self._ending.wait(_RETRY_S)
        return self._start_error is None

    def _is_ready(self) -> bool:
        if self._opened is not None and not self._down:
            return True
        reason = unreachable(self._uri)
        if reason is None:
            try:
                self._opened = self._opened or self._open()
            except Exception as error:
                reason = unreachable(self._uri)
                if reason is None:
                    self._refuse(error)
                    return False
        if reason is not None:
            self._lost(reason)
            return False
        if self._down:
            log.warning("MLflow at %s replies again and receives the waiting calls", self._uri)
            self._down = self._refused = False
        return True

    def _refuse(self, error: Exception) -> None:
        """Handle an error of a reachable store: it fails the run's start; if the server was down before, only warn once
        and retry."""
        if not self._down:
            self._start_error = error
        elif not self._refused:
            log.warning("MLflow at %s returns an error; retrying later: %s", self._uri, _text(error))
            self._refused = True

    def _lost(self, reason: str) -> None:
        if not self._down:
            log.warning("%s", down_text(self._uri, reason))
        self._down = True

    def _open(self) -> tuple[Any, str]:
        client = _connect(self._uri)
        run_id = (self._continued(client) if self._run.resumed else None) or self._create(client)
        self._keep(run_id, "RUNNING")
        return client, run_id

    def _continued(self, client: Any) -> str | None:
        """Return the id of this folder's MLflow run, set to running again; None when this store has no such run."""
        known = read_record(self._id_file, _ID_NEEDS)
        if known.get("uri") != self._uri:
            return None
        run = self._found(client, known["run_id"])
        if run is None or self._belongs_elsewhere(run):
            return None
        client.set_tag(known["run_id"], _FOLDER_TAG, str(self._run.folder))  # the run folder may have been moved
        client.update_run(known["run_id"], status="RUNNING")
        return str(known["run_id"])

    def _found(self, client: Any, run_id: str) -> Any:
        """Return the MLflow run, restored if it or its experiment was deleted; None if it no longer exists."""
        try:
            run = client.get_run(run_id)
        except Exception as error:
            if getattr(error, "error_code", None) != _GONE:
                raise
            log.warning("MLflow no longer has run %s: a new run is created for this folder, with all its steps", run_id)
            return None
        self._restore_experiment(client, client.get_experiment(run.info.experiment_id))
        if client.get_run(run_id).info.lifecycle_stage == _DELETED:  # restoring an experiment also restores its runs
            client.restore_run(run_id)
            log.warning("the MLflow run %s of this folder was deleted: it is restored", run_id)
        return run

    def _restore_experiment(self, client: Any, experiment: Any) -> None:
        if experiment.lifecycle_stage == _DELETED:
            client.restore_experiment(experiment.experiment_id)
            log.warning("the MLflow experiment %r was deleted: it is restored", experiment.name)

    def _belongs_elsewhere(self, run: Any) -> bool:
        """Return whether this folder is a copy of the MLflow run's folder, which still exists."""
        folder = Path(run.data.tags.get(_FOLDER_TAG, self._run.folder))
        if not folder.is_dir() or folder.samefile(self._run.folder):
            return False
        return read_record(folder / self._id_file.name, _ID_NEEDS, tell=False).get("run_id") == run.info.run_id

    def _create(self, client: Any) -> str:
        experiment = client.get_experiment_by_name(self._run.project)
        if experiment is None:
            experiment_id = client.create_experiment(self._run.project, artifact_location=self._artifacts)
        else:
            self._restore_experiment(client, experiment)
            experiment_id = experiment.experiment_id
        if self._created is None:
            self._created = str(
                client.create_run(experiment_id, run_name=self._run.name, tags=self._run.tags).info.run_id
            )
        from mlflow.entities import Param

        names = SafeNames()
        params = [Param(names.of(key), str(value)[:_PARAM_CHARS]) for key, value in flatten(self._run.config)]
        for start in range(0, len(params), _PARAMS_PER_CALL):
            client.log_batch(self._created, params=params[start : start + _PARAMS_PER_CALL])
        return self._created


def _connect(uri: str) -> Any:
    """Return a client of the store at `uri`; importing MLflow takes seconds."""
    os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")  # otherwise MLflow sends usage data over the network
    for name in ("mlflow", "alembic"):
        logging.getLogger(name).setLevel(logging.WARNING)  # hide messages about created tables
    from mlflow.tracking import MlflowClient

    for name in ("mlflow", "alembic"):
        logging.getLogger(name).setLevel(logging.WARNING)  # set after the import, which sets its own level
    make_store(uri, MlflowClient)
    return MlflowClient(put_back(uri, os.environ))


def _is_rejection(error: Exception) -> bool:
    """Return whether MLflow rejected the request as invalid, so that sending it again would not help."""
    return getattr(error, "error_code", None) in _REJECTED


def _text(error: Exception) -> str:
    """Return an error's text without credentials, which libraries quote with the address."""
    secret = os.environ.get(PASSWORD)
    text = mask(f"{type(error).__name__}: {error}")
    return text.replace(secret, MASK) if secret else text


def logged_to(id_file: Path) -> str | None:
    """Return the address of the MLflow store that `id_file` records for the run; None if it records no MLflow run."""
    return read_record(id_file, _ID_NEEDS).get("uri")


def add_artifact(id_file: Path, artifact: Path) -> None:
    """Upload a file to the MLflow run of `id_file`, even if that run is closed."""
    known = read_record(id_file, _ID_NEEDS)
    if not known:
        return
    reason = unreachable(known["uri"])
    if reason is not None:
        log.warning("MLflow at %s does not reply (%s); %s was not uploaded", known["uri"], reason, artifact.name)
        return
    _connect(known["uri"]).log_artifact(known["run_id"], str(artifact))


def close_open_run(id_file: Path, status: str) -> None:
    """Close the MLflow run of `id_file` as `FAILED` or `KILLED`, when the process that logged to it could not."""
    known = read_record(id_file, _ID_NEEDS)
    if known.get("status") == "RUNNING":
        reason = unreachable(known["uri"])
        if reason is not None:
            log.warning("MLflow at %s does not reply (%s); its run stays open", known["uri"], reason)
            return
        _connect(known["uri"]).set_terminated(known["run_id"], status)
        write_record(id_file, known | {"status": status})
