"""MLflow beside the training loop: importing it takes seconds and a remote server may be slow, so a thread does both.

A store that cannot be opened stops the run (at the first `metrics` call that notices); a call that fails later is
reported once as it happens and counted at the end, because metrics.jsonl has every number anyway.
"""

from __future__ import annotations

import json
import logging
import math
import os
import queue
import re
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

from megarl.credentials import MASK, PASSWORD, mask, put_back
from megarl.errors import ConfigError
from megarl.processes import write_atomically

log = logging.getLogger(__name__)
EXPERIMENT = "megarl"
STATUS = {"finished": "FINISHED", "failed": "FAILED", "stopped": "KILLED", "killed": "KILLED"}
_PARAM_CHARS = 500  # the smallest limit among MLflow's stores
_PARAMS_PER_CALL = 100
_FINISH_TIMEOUT_S = 120.0
_FORBIDDEN = re.compile(r"[^\w\-./ ]")


class MlflowLog:
    """One MLflow run. Its id and status are kept in a file of the run folder: a resumed run continues it, and the
    launcher closes it when this process could not.

    Args:
        uri: tracking URI.
        artifacts: where artifacts of a new experiment go, for stores on this machine; None: the server decides.
        name: run name.
        params: logged once, when the MLflow run is created.
        id_file: where the id of the MLflow run is kept.
        resume: continue the run of `id_file`.
    """

    def __init__(
        self, uri: str, artifacts: str | None, name: str, params: dict[str, Any], id_file: Path, *, resume: bool
    ) -> None:
        self._uri, self._artifacts, self._name, self._params = uri, artifacts, name, params
        self._id_file, self._resume = id_file, resume
        self._calls: queue.SimpleQueue[Callable[[Any, str], None] | None] = queue.SimpleQueue()
        self._steps: dict[str, frozenset[int]] = {}
        self._start_error: Exception | None = None
        self.failures = 0
        self._thread = threading.Thread(target=self._serve, name="megarl-mlflow", daemon=True)
        self._thread.start()

    def metrics(self, step: int, values: dict[str, float]) -> None:
        """Queue the finite numbers of one step; `@` in a name becomes `_at_`, as MLflow forbids it.

        Raises:
            ConfigError: the store could not be opened.
        """
        self._check()
        now = int(time.time() * 1000)

        def call(client: Any, run_id: str) -> None:
            from mlflow.entities import Metric

            finite = {metric_name(key): float(value) for key, value in values.items() if math.isfinite(value)}
            new = [key for key in finite if step not in self._earlier(client, run_id, key)]
            client.log_batch(run_id, metrics=[Metric(key, finite[key], now, step) for key in new])

        self._calls.put(call)

    def finish(self, status: str, artifacts: Iterable[Path]) -> None:
        """Upload files, close the run (`FINISHED`, `FAILED` or `KILLED`), wait for the queue, report failed calls."""
        paths = [path for path in artifacts if path.is_file()]

        def call(client: Any, run_id: str) -> None:
            for path in paths:
                client.log_artifact(run_id, str(path))

        self._calls.put(call)
        self._calls.put(lambda client, run_id: self._close(client, run_id, status))
        self._calls.put(None)
        self._thread.join(_FINISH_TIMEOUT_S)
        if self._thread.is_alive():
            log.warning("MLflow at %s did not answer for %g s; its run is incomplete", self._uri, _FINISH_TIMEOUT_S)
        if self.failures:
            log.warning("MLflow at %s: %d calls failed; metrics.jsonl is complete", self._uri, self.failures)
        if status == "FINISHED":  # otherwise another error is on its way to the user, who needs that one
            self._check()

    def _close(self, client: Any, run_id: str, status: str) -> None:
        client.set_terminated(run_id, status)
        self._keep(run_id, status)

    def _keep(self, run_id: str, status: str) -> None:
        known = {"uri": self._uri, "experiment": EXPERIMENT, "run_id": run_id, "status": status}
        write_atomically(self._id_file, json.dumps(known))

    def _earlier(self, client: Any, run_id: str, key: str) -> frozenset[int]:
        """Steps of a metric that were there before this process: a resumed run repeats some, MLflow deletes none."""
        if not self._resume:
            return frozenset()
        if key not in self._steps:
            self._steps[key] = frozenset(point.step for point in client.get_metric_history(run_id, key))
        return self._steps[key]

    def _check(self) -> None:
        if self._start_error is not None:
            error = self._start_error
            raise ConfigError(
                f"MLflow could not be started: {_text(error)}",
                where="tracking.mlflow_uri",
                found=self._uri,
                fix="correct the URI, or set tracking.mlflow: false",
            ) from error

    def _serve(self) -> None:
        try:
            client, run_id = self._open()
        except Exception as error:
            self._start_error = error
            return
        while (call := self._calls.get()) is not None:
            try:
                call(client, run_id)
            except Exception as error:
                self.failures += 1
                if self.failures == 1:
                    log.warning("MLflow call failed, training goes on: %s", _text(error))

    def _open(self) -> tuple[Any, str]:
        client = _connect(self._uri)
        run_id = (self._continued(client) if self._resume else None) or self._create(client)
        self._keep(run_id, "RUNNING")
        return client, run_id

    def _continued(self, client: Any) -> str | None:
        """Id of the MLflow run this folder logged to, set to running again; None when there is none in this store."""
        if not self._id_file.is_file():
            return None
        known = json.loads(self._id_file.read_text())
        if known["uri"] != self._uri:
            return None
        client.update_run(known["run_id"], status="RUNNING")
        return str(known["run_id"])

    def _create(self, client: Any) -> str:
        experiment = client.get_experiment_by_name(EXPERIMENT)
        if experiment is None:
            experiment_id = client.create_experiment(EXPERIMENT, artifact_location=self._artifacts)
        else:
            experiment_id = experiment.experiment_id
        run_id = str(client.create_run(experiment_id, run_name=self._name).info.run_id)
        from mlflow.entities import Param

        params = [Param(_name(key), str(value)[:_PARAM_CHARS]) for key, value in flatten(self._params)]
        for start in range(0, len(params), _PARAMS_PER_CALL):
            client.log_batch(run_id, params=params[start : start + _PARAMS_PER_CALL])
        return run_id


def _connect(uri: str) -> Any:
    """A client of the store at `uri`; the import alone takes seconds."""
    os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")  # MLflow reports usage over the network otherwise
    for name in ("mlflow", "alembic"):
        logging.getLogger(name).setLevel(logging.WARNING)  # table creation chatter
    from mlflow.tracking import MlflowClient

    for name in ("mlflow", "alembic"):
        logging.getLogger(name).setLevel(logging.WARNING)  # importing it sets its own level
    return MlflowClient(put_back(uri, os.environ))


def _text(error: Exception) -> str:
    """An error without credentials: libraries quote the address that they were given."""
    secret = os.environ.get(PASSWORD)
    text = mask(f"{type(error).__name__}: {error}")
    return text.replace(secret, MASK) if secret else text


def close_open_run(id_file: Path, status: str) -> None:
    """Close the MLflow run of `id_file` (`FAILED` or `KILLED`) when the process that logged to it could not."""
    known = json.loads(id_file.read_text())
    if known["status"] == "RUNNING":
        _connect(known["uri"]).set_terminated(known["run_id"], status)
        write_atomically(id_file, json.dumps(known | {"status": status}))


def flatten(tree: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """(dotted key, leaf) pairs of nested dicts; an empty dict and a list are leaves.

    >>> list(flatten({"a": {"b": 1, "c": [2]}}))
    [('a.b', 1), ('a.c', [2])]
    """
    for key, value in tree.items():
        if isinstance(value, dict) and value:
            yield from flatten(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def metric_name(name: str) -> str:
    """`name` with what MLflow allows only: `val/best@8` becomes `val/best_at_8`."""
    return _name(name.replace("@", "_at_"))


def _name(name: str) -> str:
    return _FORBIDDEN.sub("_", name)
