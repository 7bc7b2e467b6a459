import functools
import io
import json
import logging
import re
import time

import pytest
from rich.console import Console

from megarl.artifacts.jsonl import read_jsonl
from megarl.config.run import TrackingConfig
from megarl.system import tracing
from megarl.system.errors import ConfigError
from megarl.system.tracing import PhaseEvent
from megarl.tracking import tracker as module
from megarl.tracking.close import close_run
from megarl.tracking.console import ConsoleView, summary
from megarl.tracking.names import number
from megarl.tracking.trace import TraceWriter
from megarl.tracking.tracker import Tracker


@pytest.fixture
def screen():
    return Console(file=io.StringIO(), width=140, soft_wrap=True, highlight=False)


def tracker(tmp_path, screen, **more):
    cfg = TrackingConfig(**{"dir": str(tmp_path), "mlflow": more.pop("mlflow", False)} | more.pop("cfg", {}))
    resolved = more.pop("resolved", {"trainer": {"steps": 3}})
    return Tracker(tmp_path / "run", cfg, "my run", resolved, console=screen, total_steps=3, **more)


def steps(tmp_path, file="metrics.jsonl", stage="train"):
    return [line["step"] for line in read_jsonl(tmp_path / "run" / file) if line["stage"] == stage]


def test_a_run_leaves_all_its_files(tmp_path, screen):
    t, trace = tracker(tmp_path, screen), TraceWriter(tmp_path / "run", 0)
    t.log(0, {"val/acc": 0.25})
    for step in (1, 2, 3):
        t.log(step, {"critic/score/mean": step / 4, "actor/lr": 1e-4, "timing_s/step": 1.5})
        t.samples(step, [{"prompt": "1+1=", "response": "2", "score": 1.0}])
        trace.write([PhaseEvent("step", 0, 10, step)])
    trace.close()
    t.finish()
    for file in ("metrics.jsonl", "samples.jsonl", "run.json", "trace.json", "report.html"):
        assert (tmp_path / "run" / file).stat().st_size > 0
    info = json.loads((tmp_path / "run" / "run.json").read_text())
    assert info["status"] == "finished"
    assert info["machine"]["cores"] >= 1
    text = screen.file.getvalue()
    assert "step 1/3  33%  score" in text
    assert "my run: train finished" in text
    assert "0.75 (step 3)" in text


def test_a_run_whose_traces_are_merged_for_long_is_not_taken_for_a_hang(tmp_path, screen, monkeypatch):
    beats, seen = [], []

    def merge(folder):
        before, deadline = len(beats), time.monotonic() + 60
        while len(beats) < before + 3 and time.monotonic() < deadline:
            time.sleep(0.01)
        seen.append(len(beats) - before)

    monkeypatch.setattr(tracing, "_on_change", [beats.append])
    monkeypatch.setattr(module, "merge_trace", merge)
    monkeypatch.setattr(module, "keep_beating", functools.partial(tracing.keep_beating, every_s=0.01))
    tracker(tmp_path, screen, cfg={"report": False}).finish()
    assert seen[0] >= 3


def test_resume_cuts_later_lines_of_this_stage_only(tmp_path, screen):
    for stage, part, last in (("sft", "first", 9), ("train", "second", 5)):
        t = tracker(tmp_path, screen, stage=stage, part=part)
        for step in range(1, last + 1):
            t.log(step, {"x": step})
            t.samples(step, [{"prompt": ""}])
            t.groups(step, [{"group": "a"}])
    with open(tmp_path / "run" / "metrics.jsonl", "ab") as file:
        file.write(b'{"step": 6, "sta')
    tracker(tmp_path, screen, resume_step=3).log(4, {"x": 4})
    assert steps(tmp_path) == [1, 2, 3, 4]
    assert steps(tmp_path, "samples.jsonl") == [1, 2, 3]
    assert steps(tmp_path, "training_samples.jsonl") == [1, 2, 3]
    assert steps(tmp_path, stage="sft") == list(range(1, 10))


def test_a_fresh_start_moves_old_lines_away(tmp_path, screen):
    for value in (1, 2, 3):
        tracker(tmp_path, screen).log(1, {"x": value})
    assert [line["x"] for line in read_jsonl(tmp_path / "run" / "metrics.jsonl")] == [3]
    assert [read_jsonl(tmp_path / "run" / f"metrics.old-{n}.jsonl")[0]["x"] for n in (1, 2)] == [1, 2]


@pytest.mark.parametrize("part", ["first", "whole"])
def test_a_fresh_start_moves_lines_of_all_stages_away(tmp_path, screen, part):
    tracker(tmp_path, screen, stage="sft", part="first").log(1, {"x": 1})
    tracker(tmp_path, screen, part="second").log(1, {"x": 2})
    stage = "sft" if part == "first" else "train"
    tracker(tmp_path, screen, stage=stage, part=part).log(1, {"x": 3})
    assert [line["x"] for line in read_jsonl(tmp_path / "run" / "metrics.jsonl")] == [3]
    assert [line["x"] for line in read_jsonl(tmp_path / "run" / "metrics.old-1.jsonl")] == [1, 2]


@pytest.mark.usefixtures("store")
def test_mlflow_gets_steps_that_a_killed_process_did_not_send(tmp_path, screen):
    killed = tracker(tmp_path, screen)  # nothing of it reaches MLflow
    killed.log(1, {"x": 0.5, "bad": float("nan")})
    killed.log(2, {"x": 0.75})
    resumed = tracker(tmp_path, screen, mlflow=True, resume_step=2)
    resumed.log(3, {"x": 1.0})
    resumed.finish()
    from mlflow.tracking import MlflowClient

    client = MlflowClient(f"sqlite:///{tmp_path / 'mlflow.db'}")
    (run,) = client.search_runs([client.get_experiment_by_name("megarl").experiment_id])
    found = [(point.step, point.value) for point in client.get_metric_history(run.info.run_id, "x")]
    assert found == [(1, 0.5), (2, 0.75), (3, 1.0)]


def test_mlflow_gets_params_metrics_artifacts_and_continues_the_same_run(tmp_path, screen):
    first = tracker(tmp_path, screen, mlflow=True)
    first.log(1, {"val/best@8": 0.5, "bad": float("nan")})
    first.log(2, {"val/best@8": 0.75})
    first.finish("failed")
    # from another folder, where a relative `tracking.dir` is another folder, too
    second = tracker(tmp_path, screen, mlflow=True, resume_step=1, cfg={"dir": str(tmp_path / "elsewhere")})
    for step, value in ((2, 0.75), (3, 1.0)):
        second.log(step, {"val/best@8": value, "late": value})
    second.finish()
    from mlflow.tracking import MlflowClient

    client = MlflowClient(f"sqlite:///{tmp_path / 'mlflow.db'}")
    (run,) = client.search_runs([client.get_experiment_by_name("megarl").experiment_id])
    assert run.info.status == "FINISHED"
    assert run.info.run_name == "my run"
    assert run.data.params == {"trainer.steps": "3"}
    assert [(m.step, m.value) for m in client.get_metric_history(run.info.run_id, "val/best_at_8")] == [
        (1, 0.5),
        (2, 0.75),
        (3, 1.0),
    ]
    assert [m.step for m in client.get_metric_history(run.info.run_id, "late")] == [2, 3]
    assert "bad" not in run.data.metrics
    assert {f.path for f in client.list_artifacts(run.info.run_id)} >= {"report.html", "metrics.jsonl", "run.json"}


@pytest.mark.usefixtures("store")
def test_a_run_whose_process_was_killed_is_closed_by_its_launcher(tmp_path, screen):
    from mlflow.tracking import MlflowClient

    t = tracker(tmp_path, screen, mlflow=True, resolved={"tracking": {"report": True}})
    t.log(1, {"x": 1.0})
    t._mlflow._calls.put(None)  # the process ends here
    t._mlflow._thread.join()
    close_run(tmp_path / "run", "stopped", budget_s=120.0)
    assert json.loads((tmp_path / "run" / "run.json").read_text())["status"] == "stopped"
    assert (tmp_path / "run" / "report.html").exists()
    known = json.loads((tmp_path / "run" / "mlflow.train.json").read_text())
    assert MlflowClient(known["uri"]).get_run(known["run_id"]).info.status == "KILLED"
    close_run(tmp_path / "run", "failed", budget_s=120.0)
    assert json.loads((tmp_path / "run" / "run.json").read_text())["status"] == "stopped"


def test_mlflow_that_cannot_start_stops_the_run(tmp_path, screen):
    (tmp_path / "file").write_text("")
    t = tracker(tmp_path, screen, mlflow=True, cfg={"mlflow_uri": f"sqlite:///{tmp_path}/file/x.db"})

    def log_until_it_is_noticed():
        for step in range(3000):
            t.log(step, {"x": 1.0})
            time.sleep(0.1)

    with pytest.raises(ConfigError, match=r"tracking\.mlflow_uri"):
        log_until_it_is_noticed()
    assert len(steps(tmp_path)) >= 1


@pytest.mark.usefixtures("store")
def test_mlflow_that_fails_later_warns_once_and_counts(tmp_path, screen, caplog):
    t = tracker(tmp_path, screen, mlflow=True)

    def fail(client, run_id):
        raise OSError("disk full")

    t._mlflow._calls.put(fail)
    t._mlflow._calls.put(fail)
    with caplog.at_level(logging.WARNING):
        t.log(1, {"x": 1.0})
        t.finish()
    assert sum("training continues: OSError: disk full" in r.message for r in caplog.records) == 1
    assert any("2 calls failed" in r.message for r in caplog.records)


@pytest.mark.parametrize("name", ["step", "stage", "time"])
def test_metrics_cannot_take_the_columns_of_the_file(tmp_path, screen, name):
    with pytest.raises(ConfigError, match=rf"the metric name '{name}' is reserved"):
        tracker(tmp_path, screen).log(1, {"x": 1.0, name: 2.0})


@pytest.mark.parametrize(
    ("value", "text"),
    [(0.53124, "0.5312"), (-0.00015, "-1.5e-04"), (1234.5, "1234"), (12345, "12.3k"), (2.5e7, "25M"), (0, "0")],
)
def test_numbers_are_short(value, text):
    assert number(value) == text


def test_log_lines_have_no_escape_codes_and_are_not_wrapped(screen):
    view = ConsoleView(1000, screen)
    view.step(7, {"critic/score/mean": 0.5, "perf/throughput": 12345.0, "unknown/metric": 1.0, "timing_s/step": 2.0})
    line, _, meaning = screen.file.getvalue().partition("\n")
    assert meaning == "  tok/s: throughput\n"
    assert "\x1b" not in line + meaning
    assert line.split() == ["step", "7/1000", "0%", "score", "0.5", "12.3k", "tok/s", "2", "s"]


def test_progress_in_a_log_is_rare_lines(screen, monkeypatch):
    monkeypatch.setattr("megarl.tracking.console._LOG_EVERY_S", 0.0)
    with ConsoleView(None, screen).progress("validation", 4) as advance:
        advance(1)
        advance(3)
    first, last = screen.file.getvalue().splitlines()
    assert re.fullmatch(r"validation: 1/4 \(25%\), \d+ s", first)
    assert re.fullmatch(r"validation: 4/4 \(100%\), \d+ s", last)


def test_progress_on_a_terminal_is_taken_down():
    terminal = Console(file=io.StringIO(), force_terminal=True, width=80)
    view = ConsoleView(3, terminal)
    with view.progress("validation", 4) as advance:
        advance(4)
        assert [task.description for task in view._bars.tasks] == ["training, validation 4/4"]
    assert [task.description for task in view._bars.tasks] == ["training"]
    view.step(1, {"val/acc": 1.0})
    view.final("done", [{"step": 1, "val/acc": 1.0}])
    view.close()


def test_summary_takes_first_best_and_last():
    lines = [{"step": s, "val/acc": v} for s, v in [(2, 0.4), (5, 0.9), (9, 0.8)]] + [{"step": 9, "val/acc": None}]
    ((shown, row),) = summary(lines)
    assert shown.name == "val/acc"
    assert row == {"first": 0.4, "last": 0.8, "best": 0.9, "best_step": 5}


def test_of_equal_values_the_last_is_the_best():
    ((_, row),) = summary([{"step": step, "val/acc": 0.0} for step in (2, 5, 9)])
    assert (row["best"], row["best_step"]) == (0.0, 9)


def test_what_was_measured_before_training_stands_apart():
    before = {"step": 0, "val/acc": 0.95, "timing_s/step": 60.0}
    lines = [before, {"step": 1, "timing_s/step": 2.0}, {"step": 2, "val/acc": 0.5, "timing_s/step": 1.0}]
    found = {shown.name: row for shown, row in summary(lines)}
    assert found["val/acc"] == {"before": 0.95, "first": 0.5, "last": 0.5, "best": 0.95, "best_step": 0}
    assert found["timing_s/step"] == {"before": 60.0, "first": 2.0, "last": 1.0}
    assert summary([before])[0][1] == {"first": 0.95, "last": 0.95, "best": 0.95, "best_step": 0}  # an evaluation


def test_one_step_is_one_column(screen):
    ConsoleView(None, screen).final("my run: eval finished", [{"step": 0, "val/acc": 0.95}, {"step": 0, "x": 1.0}])
    table = screen.file.getvalue()
    assert re.search(r"metric +┃ +value +┃\n", table)
    assert table.count("0.95") == 1
    assert "best" not in table


def test_the_end_of_a_first_phase_is_not_the_end_of_the_run(tmp_path, screen):
    first = tracker(tmp_path, screen, stage="sft", part="first")
    first.log(1, {"sft/loss": 1.0})
    first.finish()
    text = screen.file.getvalue()
    assert "my run: first phase (sft) is done" in text
    assert "the run continues" in text
    assert "finished" not in text
    assert "report:" not in text
    record = json.loads((tmp_path / "run" / "run.json").read_text())
    assert record["status"] == "running"
    second = tracker(tmp_path, screen, part="second")
    second.log(1, {"critic/score/mean": 1.0})
    second.finish()
    ended = json.loads((tmp_path / "run" / "run.json").read_text())
    assert (ended["status"], ended["started"]) == ("finished", record["started"])
    assert "my run: train finished" in screen.file.getvalue()


@pytest.mark.parametrize(("status", "shown"), [("failed", False), ("stopped", True), ("finished", True)])
def test_a_failed_run_that_may_be_started_again_has_no_table_yet(tmp_path, screen, status, shown):
    run = tracker(tmp_path, screen, restarts=True)
    run.log(1, {"val/acc": 0.5})
    run.finish(status)
    text = screen.file.getvalue()
    assert [f"my run: train {status}" in text, "report: " in text] == [shown, shown]
    assert (tmp_path / "run" / "report.html").is_file()


@pytest.mark.parametrize(("resume_step", "kept"), [(1, True), (None, False)])
def test_a_resumed_run_began_when_it_first_began(tmp_path, screen, resume_step, kept):
    tracker(tmp_path, screen).finish("failed")
    started = json.loads((tmp_path / "run" / "run.json").read_text())["started"]
    tracker(tmp_path, screen, resume_step=resume_step)
    assert (json.loads((tmp_path / "run" / "run.json").read_text())["started"] == started) == kept


def test_the_table_names_the_team_that_bounds_the_steps(screen):
    lines = [{"step": 0, "val/acc": 0.5}]
    for step, draw in ((1, 1.0), (2, 1.0), (3, 0.0), (4, 1.0)):
        lines.append({"step": step, "val/acc": 0.5, "perf/bottleneck/draw": draw, "perf/bottleneck/train": 1 - draw})
    ConsoleView(4, screen).final("done", lines)
    assert "draw, in 75% of the steps" in screen.file.getvalue()
