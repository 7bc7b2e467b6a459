"""What reaches a real MLflow store, and a run whose MLflow server is down, gone, or back again."""

import http.server
import logging
import shutil
import socket
import sqlite3
import threading
import time
import warnings
from functools import partial
from pathlib import Path

import pytest

from megarl.commands.job import warn_of_mlflow
from megarl.config.load import load_config
from megarl.system import tracing
from megarl.system.errors import ConfigError
from megarl.tracking import mlflow_log, mlflow_store
from megarl.tracking.close import close_run
from megarl.tracking.loggers import LoggedRun
from megarl.tracking.mlflow_log import MlflowLog
from megarl.tracking.mlflow_store import check_default_store, check_store, default_store, make_store, unreachable
from megarl.tracking.names import safe_name

PATIENCE_S = 120.0  # MLflow's own client tries again for minutes


@pytest.fixture
def uri(store):
    return f"sqlite:///{store}"


def opened(tmp_path, uri, params=None):
    run = LoggedRun("id", "run", "train", tmp_path, "megarl", params or {}, {}, resumed=False)
    return MlflowLog(uri, str(tmp_path / "artifacts"), run, tmp_path / "id.json")


def only_run(uri):
    from mlflow.tracking import MlflowClient

    client = MlflowClient(uri)
    (run,) = client.search_runs([client.get_experiment_by_name("megarl").experiment_id])
    return client, run


def stored(uri):
    """Metric -> steps of the only run."""
    client, run = only_run(uri)
    return {key: [m.step for m in client.get_metric_history(run.info.run_id, key)] for key in run.data.metrics}


def closed_port():
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        return f"http://127.0.0.1:{listening.getsockname()[1]}"


def wait_until(condition):
    deadline = time.monotonic() + 200
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


# -- folders -----------------------------------------------------------------------------------------------------


def record_in(folder, uri, steps, *, resumed):
    folder.mkdir(exist_ok=True)
    run = LoggedRun("id", "run", "train", folder, "megarl", {}, {"run_dir": str(folder)}, resumed=resumed)
    log = MlflowLog(uri, str(folder.parent / "artifacts"), run, folder / "mlflow.train.json")
    for step in steps:
        log.metrics(step, {"a": float(step)})
    log.finish("FINISHED", [])


def steps_by_folder(uri):
    from mlflow.tracking import MlflowClient

    client = MlflowClient(uri)
    runs = client.search_runs([client.get_experiment_by_name("megarl").experiment_id])
    return {
        run.data.tags["run_dir"].rpartition("/")[2]: [m.step for m in client.get_metric_history(run.info.run_id, "a")]
        for run in runs
    }


def test_a_copy_of_a_run_folder_that_goes_on_leaves_the_mlflow_run_to_the_first(tmp_path, uri):
    first, copied, moved = tmp_path / "first", tmp_path / "copied", tmp_path / "moved"
    record_in(first, uri, [1, 2], resumed=False)
    shutil.copytree(first, copied)
    record_in(copied, uri, [3], resumed=True)
    record_in(copied, uri, [4], resumed=True)
    first.rename(moved)
    record_in(moved, uri, [3], resumed=True)
    assert steps_by_folder(uri) == {"moved": [1, 2, 3], "copied": [3, 4]}


# -- names -------------------------------------------------------------------------------------------------------


def test_every_metric_of_a_step_arrives_whatever_its_name(tmp_path, uri):
    log = opened(tmp_path, uri, params={"a//b": 1, "c@d": 2, "..": 3})
    many = {f"part/{i}": float(i) for i in range(1100)}  # more than MLflow takes in one call
    log.metrics(1, {"val//test/acc": 0.5, "val/test/acc": 0.25, "val/../acc": 0.1, "": 1.0, "val/acc": 0.5, **many})
    log.finish("FINISHED", [])
    assert log.failures == 0
    found = only_run(uri)[1].data.metrics
    assert len(found) == 1105
    assert {"val/test/acc", safe_name("val/../acc"), "_", "val/acc"} <= found.keys()


def test_a_rejected_metric_is_named_and_costs_no_other(tmp_path, uri, monkeypatch, caplog):
    monkeypatch.setattr(mlflow_log.SafeNames, "of", lambda self, name: name)
    log = opened(tmp_path, uri)
    for step in (1, 2):
        log.metrics(step, {"val//test/acc": 0.5, "val/acc": 0.5, "actor/lr": 1e-4})
    log.finish("FINISHED", [])
    assert stored(uri) == {"val/acc": [1, 2], "actor/lr": [1, 2]}
    named = [r.getMessage() for r in caplog.records if "rejects the metric" in r.getMessage()]
    assert len(named) == 1
    assert "'val//test/acc'" in named[0]
    assert log.failures == 0


def test_a_run_that_somebody_deleted_is_one_failure_and_bans_no_metric(tmp_path, uri, caplog):
    log = opened(tmp_path, uri)
    log._calls.put(lambda client, run_id: client.delete_run(run_id))
    log.metrics(1, {"a": 1.0, "b": 2.0})
    log._calls.put(lambda client, run_id: client.restore_run(run_id))
    log.metrics(2, {"a": 1.0, "b": 2.0})
    log.finish("FINISHED", [])
    assert stored(uri) == {"a": [2], "b": [2]}
    assert log.failures == 1
    assert not any("rejects the metric" in r.getMessage() for r in caplog.records)


def test_what_is_sent_for_long_at_the_end_is_not_taken_for_a_hang(tmp_path, uri, monkeypatch):
    beats, log = [], opened(tmp_path, uri)

    def send(client, run_id):
        before, deadline = len(beats), time.monotonic() + 60
        while len(beats) < before + 3:
            assert time.monotonic() < deadline
            time.sleep(0.01)

    monkeypatch.setattr(tracing, "_on_change", [beats.append])
    monkeypatch.setattr(mlflow_log, "_ASK_S", 0.01)
    log._calls.put(send)
    log.finish("FINISHED", [])
    assert log.failures == 0


# -- servers -----------------------------------------------------------------------------------------------------


def test_a_server_that_is_down_is_said_at_once_and_the_run_goes_on(tmp_path, caplog):
    uri, start = closed_port(), time.monotonic()
    log = opened(tmp_path, uri)
    wait_until(lambda: caplog.records)
    assert time.monotonic() - start < PATIENCE_S
    assert f"tracking.mlflow_uri: MLflow does not reply at {uri}" in caplog.text
    assert "Connection refused" in caplog.text
    for step in range(3):
        log.metrics(step, {"x": 1.0})
    start = time.monotonic()
    log.finish("FINISHED", [])
    assert time.monotonic() - start < PATIENCE_S
    assert log.failures == 5  # three steps, the files, the end of the MLflow run
    assert "5 calls failed; metrics.jsonl is complete" in caplog.text


def test_the_command_says_it_before_workers_start(tmp_path):
    recipe = tmp_path / "r.yaml"
    recipe.write_text(f"tracking: {{mlflow_uri: '{closed_port()}'}}\n")
    with pytest.warns(UserWarning, match=r"tracking.mlflow_uri: MLflow does not reply at .*Connection refused"):
        warn_of_mlflow(load_config(recipe, []))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warn_of_mlflow(load_config(recipe, ["tracking.mlflow=false"]))
        warn_of_mlflow(load_config(recipe, ["tracking.mlflow_uri=null"]))


def test_what_waited_arrives_when_the_server_comes_back(tmp_path, uri, monkeypatch, caplog):
    down = threading.Event()
    down.set()
    monkeypatch.setattr(mlflow_log, "unreachable", lambda uri: "closed for a while" if down.is_set() else None)
    monkeypatch.setattr(mlflow_log, "_RETRY_S", 0.05)
    log = opened(tmp_path, uri)
    log.metrics(1, {"x": 1.0})
    wait_until(lambda: "closed for a while" in caplog.text)
    down.clear()
    log.metrics(2, {"x": 2.0})
    log.finish("FINISHED", [])
    assert stored(uri) == {"x": [1, 2]}
    assert log.failures == 0
    assert "replies again" in caplog.text


def test_a_server_that_comes_back_with_an_error_ends_no_run(tmp_path, uri, monkeypatch, caplog):
    down, connect, errors = threading.Event(), mlflow_log._connect, [RuntimeError("HTTP 500")]
    down.set()

    def flaky(uri):
        if errors:
            raise errors.pop()
        return connect(uri)

    monkeypatch.setattr(mlflow_log, "unreachable", lambda uri: "closed for a while" if down.is_set() else None)
    monkeypatch.setattr(mlflow_log, "_connect", flaky)
    monkeypatch.setattr(mlflow_log, "_RETRY_S", 0.05)
    log = opened(tmp_path, uri)
    log.metrics(1, {"x": 1.0})
    wait_until(lambda: "closed for a while" in caplog.text)
    down.clear()
    wait_until(lambda: not errors and "returns an error" in caplog.text)
    log.metrics(2, {"x": 2.0})
    wait_until(lambda: "replies again" in caplog.text)
    log.finish("FINISHED", [])
    assert stored(uri) == {"x": [1, 2]}
    assert log.failures == 0


def test_a_server_that_goes_away_for_good_does_not_hold_up_the_end(tmp_path, uri, monkeypatch, caplog):
    gone = threading.Event()
    monkeypatch.setattr(mlflow_log, "unreachable", lambda uri: "gone" if gone.is_set() else None)
    log = opened(tmp_path, uri)
    log.metrics(1, {"x": 1.0})
    wait_until(lambda: log._calls.qsize() == 0 and log._opened is not None)

    def fail(client, run_id):
        gone.set()
        raise ConnectionError("reset")

    log._calls.put(fail)
    start = time.monotonic()
    log.finish("FINISHED", [])
    assert time.monotonic() - start < PATIENCE_S
    assert log.failures == 3
    assert "MLflow does not reply" in caplog.text


def test_a_call_that_hangs_when_the_server_is_gone_is_left(tmp_path, uri, monkeypatch, caplog):
    hanging, gone = threading.Event(), threading.Event()
    monkeypatch.setattr(mlflow_log, "unreachable", lambda uri: "gone" if gone.is_set() else None)
    monkeypatch.setattr(mlflow_log, "_ASK_S", 0.1)

    def hang(client, run_id):  # as MLflow's client does, which tries again for minutes
        gone.set()
        hanging.wait(600)

    log = opened(tmp_path, uri)
    log._calls.put(hang)
    wait_until(gone.is_set)
    start = time.monotonic()
    log.finish("FINISHED", [])
    assert time.monotonic() - start < PATIENCE_S
    assert "does not reply (gone); its run is incomplete: run the command again" in caplog.text
    hanging.set()


def test_the_launcher_does_not_wait_for_a_server_that_is_down(tmp_path, caplog):
    (tmp_path / "mlflow.train.json").write_text(f'{{"uri": "{closed_port()}", "run_id": "1", "status": "RUNNING"}}')
    start = time.monotonic()
    with caplog.at_level(logging.WARNING):
        close_run(tmp_path, "failed", budget_s=600.0)
    assert time.monotonic() - start < PATIENCE_S
    assert "its run stays open" in caplog.text


class Answer(http.server.BaseHTTPRequestHandler):
    status = 200

    def do_GET(self):
        self.send_response(self.status)
        self.end_headers()

    def log_message(self, *args):
        pass


@pytest.mark.parametrize(
    ("status", "reason"), [(200, None), (401, None), (404, None), (500, None), (503, "HTTP status 503")]
)
def test_any_answer_but_that_of_a_gateway_is_an_answer(status, reason):
    handler = type("Handler", (Answer,), {"status": status})
    with http.server.HTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.handle_request)
        thread.start()
        assert unreachable(f"http://***@127.0.0.1:{server.server_port}/prefix") == reason
        thread.join()


def test_a_server_that_accepts_and_says_nothing_does_not_answer(monkeypatch):
    monkeypatch.setattr(mlflow_store, "_ANSWER_S", 0.2)
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        listening.listen()
        assert "timed out" in str(unreachable(f"http://127.0.0.1:{listening.getsockname()[1]}"))


@pytest.mark.parametrize("uri", ["sqlite:///x.db", "/a/folder", "databricks", "http://host:port"])
def test_what_is_no_server_is_left_to_mlflow(uri):
    assert unreachable(uri) is None


@pytest.mark.parametrize(
    ("uri", "words"),
    [
        ("nosuch://x", "has no store for 'nosuch'"),
        ("sqlite:////proc/x.db", "folder /proc is read-only"),
        ("sqlite:////not/there/x.db", "folder not found: /not/there"),
        ("sqlite:////", "is a folder"),
    ],
)
def test_a_store_that_cannot_be_opened_is_refused_before_the_start(uri, words):
    with pytest.raises(ConfigError, match=words):
        check_store(uri)


def test_stores_that_mlflow_knows_are_left_to_it(tmp_path):
    for uri in (
        f"sqlite:///{tmp_path}/x.db",
        "http://host:5000",
        "postgresql+psycopg2://u@h/db",
        "mlruns",
        "databricks",
    ):
        check_store(uri)
    assert list(tmp_path.iterdir()) == []


# -- what was deleted, odd folders, locks --------------------------------------------------------------------------


@pytest.mark.parametrize("deleted", ["run", "experiment", "both"])
def test_what_somebody_deleted_is_restored_when_the_run_goes_on(tmp_path, uri, deleted):
    from mlflow.tracking import MlflowClient

    record_in(tmp_path / "first", uri, [1], resumed=False)
    client = MlflowClient(uri)
    experiment = client.get_experiment_by_name("megarl").experiment_id
    (run,) = client.search_runs([experiment])
    if deleted != "experiment":
        client.delete_run(run.info.run_id)
    if deleted != "run":
        client.delete_experiment(experiment)
    record_in(tmp_path / "first", uri, [2], resumed=True)
    assert steps_by_folder(uri) == {"first": [1, 2]}


def test_a_new_run_restores_its_deleted_experiment(tmp_path, uri):
    from mlflow.tracking import MlflowClient

    record_in(tmp_path / "first", uri, [1], resumed=False)
    client = MlflowClient(uri)
    client.delete_experiment(client.get_experiment_by_name("megarl").experiment_id)
    record_in(tmp_path / "second", uri, [1], resumed=False)
    assert steps_by_folder(uri)["second"] == [1]


def test_a_run_that_is_gone_for_good_is_made_again(tmp_path, uri):
    record_in(tmp_path / "first", uri, [1], resumed=False)
    with sqlite3.connect(uri.removeprefix("sqlite:///")) as database:
        for table in ("metrics", "latest_metrics", "params", "tags", "runs"):
            database.execute(f"DELETE FROM {table}")
    record_in(tmp_path / "first", uri, [2], resumed=True)
    assert steps_by_folder(uri) == {"first": [2]}


@pytest.mark.parametrize("name", ["100%41 done?", "a b", "c#d"])
def test_the_default_store_is_in_its_folder_whatever_the_name(tmp_path, empty_store, name):
    folder = tmp_path / name
    folder.mkdir()
    shutil.copy(empty_store, folder / "mlflow.db")
    address, artifacts = default_store(folder)
    run = LoggedRun("id", "run", "train", folder, "megarl", {}, {}, resumed=False)
    log = MlflowLog(address, artifacts, run, folder / "id.json")
    (folder / "note.txt").write_text("x")
    log.metrics(1, {"a": 1.0})
    log.finish("FINISHED", [folder / "note.txt"])
    assert log.failures == 0
    assert stored(address) == {"a": [1]}
    with sqlite3.connect(folder / "mlflow.db") as database:
        assert database.execute("SELECT count(*) FROM runs").fetchall() == [(1,)]
    assert list((folder / "mlartifacts").rglob("note.txt"))


def test_a_store_is_made_whole_or_not_at_all(tmp_path):
    file, opened = tmp_path / "mlflow.db", []

    def make_tables(address, *, interrupted=False):
        opened.append(address)
        Path(address.removeprefix("sqlite:///")).write_text("some tables" if interrupted else "all tables")
        if interrupted:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        make_store(f"sqlite:///{file}", partial(make_tables, interrupted=True))
    assert list(tmp_path.iterdir()) == []
    for _ in range(2):
        make_store(f"sqlite:///{file}", make_tables)
    assert ([entry.name for entry in tmp_path.iterdir()], file.read_text(), len(opened)) == (
        ["mlflow.db"],
        "all tables",
        2,
    )
    make_store("https://host", make_tables)
    assert len(opened) == 2


def test_a_folder_whose_name_is_not_utf_8_is_refused_before_the_start(tmp_path):
    with pytest.raises(ConfigError, match="not UTF-8, which MLflow requires"):
        check_default_store(tmp_path / "n\udcff")


def test_a_store_that_another_process_has_locked_is_named_before_the_start(tmp_path, uri, monkeypatch):
    monkeypatch.setattr(mlflow_store, "_ANSWER_S", 0.0)
    check_default_store(tmp_path)
    check_store(uri)
    holder = sqlite3.connect(tmp_path / "mlflow.db", isolation_level=None)
    holder.execute("BEGIN EXCLUSIVE")
    for check in (lambda: check_default_store(tmp_path), lambda: check_store(uri)):
        with pytest.raises(ConfigError, match="database is locked"):
            check()
    holder.close()
    (tmp_path / "mlflow.db").write_text("no database, but text of more than a hundred bytes" * 4)
    with pytest.raises(ConfigError, match="not a database"):
        check_default_store(tmp_path)
