"""When a run is started again by itself, how often, and from where; without processes."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from megarl.config.run import ClusterConfig, RunConfig, TrainerConfig
from megarl.launchers import attempts, supervise
from megarl.launchers.common import Job, run_workers
from megarl.runtime.health import Heartbeat, RankFailure, read_beat, read_errors, write_error
from megarl.system.errors import ConfigError, UnavailableError, WorkerError
from megarl.system.processes import Stopped
from megarl.tracking.close import read_restarts

Attempt = Callable[[Path], dict[int, int] | Stopped]


class Script:
    """A launcher whose attempts go as they are told; what they were started with."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *script: Attempt) -> None:
        self._script = list(script)
        self.resumed: list[str] = []
        for launcher in ("local", "torchrun"):
            monkeypatch.setattr(f"megarl.launchers.{launcher}.start", self.start)
        monkeypatch.setattr(supervise, "SETTLE_S", 0.0)
        monkeypatch.setattr(supervise, "LOST_S", 0.0)

    def start(self, job: Job) -> Ranks:
        self.resumed.append(job.config.trainer.resume)
        return Ranks(self._script.pop(0)(job.run_dir))


class Ranks:
    """One rank that ends as it is told."""

    def __init__(self, ended: dict[int, int] | Stopped) -> None:
        self.ended = ended

    def ranks(self) -> list[int]:
        return [0]

    def poll(self) -> dict[int, int]:
        if isinstance(self.ended, Stopped):
            raise self.ended
        return self.ended

    def cause(self, rank: int) -> None:
        return None

    def stop(self) -> None: ...


def finishes(run_dir: Path) -> dict[int, int]:
    return {0: 0}


def dies(run_dir: Path) -> dict[int, int]:
    return {0: -9}


def dies_after(step: int) -> Attempt:
    """With the checkpoint of `step`."""

    def attempt(run_dir: Path) -> dict[int, int]:
        save(run_dir, step)
        return {0: -9}

    return attempt


def save(run_dir: Path, step: int) -> None:
    (run_dir / "checkpoints" / f"step_{step}").mkdir(parents=True, exist_ok=True)
    (run_dir / "checkpoints" / f"step_{step}" / "meta.json").touch()


def raises(message: str = "a defect", step: int = 4, **more: bool) -> Attempt:
    def attempt(run_dir: Path) -> dict[int, int]:
        write_error(run_dir, RankFailure(0, "train", step, "RuntimeError", message, "", 1.0, 1, **more))
        return {0: 1}

    return attempt


def run(run_dir: Path, restarts: int, resume: str = "auto", start_timeout_s: float = 60.0, machines: int = 1) -> int:
    cluster = ClusterConfig(max_restarts=restarts, start_timeout_s=start_timeout_s, nnodes=machines, nproc=machines)
    config = RunConfig(name="x", cluster=cluster, trainer=TrainerConfig(resume=resume))
    return run_workers("local" if machines == 1 else "torchrun", "m:f", config, run_dir)


def test_a_rank_that_died_costs_a_restart(tmp_path, monkeypatch, capsys):
    def loses_its_peer(run_dir: Path) -> dict[int, int]:
        save(run_dir, 2)
        return raises("Connection closed by peer")(run_dir)

    Script(monkeypatch, loses_its_peer, finishes)
    assert run(tmp_path, 1) == 0
    why = "rank 0 failed in phase train at step 4: RuntimeError: Connection closed by peer"
    line = f"megarl: x starts again (1 of 1; from the checkpoint of step 2): {why}"
    assert line in capsys.readouterr().err.splitlines()
    assert f"[launcher] {line}" in (tmp_path / "log.txt").read_text().splitlines()
    assert "closed by peer" in (tmp_path / "errors" / "attempt_1" / "rank_0.json").read_text()
    assert not (tmp_path / "errors" / "rank_0.json").exists()
    assert [(one["restart"], one["why"]) for one in read_restarts(tmp_path)] == [(1, why)]


def test_a_lost_peer_is_told_with_its_meaning_however_long_the_message_is(tmp_path, monkeypatch):
    place = "[/build/third_party/gloo/gloo/transport/tcp/pair.cc:537]"
    lost = f"node 'actor_train' failed: RuntimeError: {place} Read error [127.0.0.1]:60820: Connection reset by peer"
    stack = "\nException raised from readError (most recent call first):\nframe #0: c10::Error"
    Script(monkeypatch, raises(lost + stack, step=4), raises("much text " * 100 + "the cause", step=5), finishes)
    assert run(tmp_path, 2) == 0
    first, second = (one["why"] for one in read_restarts(tmp_path))
    assert first.endswith("RuntimeError: [pair.cc:537] Read error [127.0.0.1]:60820: Connection reset by peer")
    assert second.endswith("much text the cause")
    assert "RuntimeError: much text" in second
    assert len(second) < 500


def test_without_restarts_the_first_failure_is_the_end(tmp_path, monkeypatch, capsys):
    script = Script(monkeypatch, dies)
    assert run(tmp_path, 0) == 1
    assert len(script.resumed) == 1
    assert "starts again" not in capsys.readouterr().err


@pytest.mark.parametrize("error", [raises(user_error=True), raises(repeats=True)])
def test_an_error_that_would_come_again_is_the_end(tmp_path, monkeypatch, capsys, error):
    Script(monkeypatch, error)
    assert run(tmp_path, 3) == 1
    assert "the run is not restarted: the error would occur again" in capsys.readouterr().err


def test_an_error_that_came_again_is_the_end(tmp_path, monkeypatch, capsys):
    script = Script(monkeypatch, raises(), raises())
    assert run(tmp_path, 3) == 1
    assert len(script.resumed) == 2
    assert "not restarted: the same error occurred before, at the same step" in capsys.readouterr().err


def test_other_errors_and_running_out_of_memory_are_tried_again(tmp_path, monkeypatch):
    out = raises("CUDA out of memory")
    Script(monkeypatch, raises(step=4), raises(step=5), out, out, finishes)
    assert run(tmp_path, 4) == 0


def test_the_budget_is_of_restarts_without_a_new_checkpoint(tmp_path, monkeypatch, capsys):
    script = Script(monkeypatch, dies, dies, dies)
    assert run(tmp_path, 2) == 1
    assert len(script.resumed) == 3
    assert "no restart is left: 2 without a new checkpoint (cluster.max_restarts)" in capsys.readouterr().err


def test_the_table_of_a_failed_run_is_shown_when_no_restart_is_left(tmp_path, monkeypatch, capsys):
    def works_and_dies(run_dir: Path) -> dict[int, int]:
        record = {"name": "x", "stage": "train", "status": "failed", "process": "this one"}
        (run_dir / "run.json").write_text(json.dumps(record))
        (run_dir / "metrics.jsonl").write_text('{"step": 1, "stage": "train", "val/acc": 0.25}\n')
        (run_dir / "report.html").touch()
        return dies(run_dir)

    for name in ("goes_on", "ends"):
        (tmp_path / name).mkdir()
    Script(monkeypatch, works_and_dies, finishes)
    assert run(tmp_path / "goes_on", 1) == 0
    assert capsys.readouterr().out == ""
    Script(monkeypatch, works_and_dies, dies)
    assert run(tmp_path / "ends", 1) == 1
    shown = capsys.readouterr().out
    assert shown.count("x: train failed") == 1
    assert "0.25" in shown
    assert "report: " in shown


def test_a_new_checkpoint_gives_all_restarts_back(tmp_path, monkeypatch):
    script = Script(monkeypatch, dies, dies_after(0), dies_after(1), dies_after(1), finishes)
    assert run(tmp_path, 1) == 1
    assert len(script.resumed) == 4


def test_a_signal_to_the_launcher_is_no_failure(tmp_path, monkeypatch):
    script = Script(monkeypatch, dies, lambda run_dir: Stopped(15))
    assert run(tmp_path, 3) == 143
    assert len(script.resumed) == 2


def test_a_run_that_has_begun_goes_on_from_what_it_saved_itself(tmp_path, monkeypatch):
    save(tmp_path, 7)  # of an earlier run in the same folder

    def begins(run_dir: Path) -> dict[int, int]:
        (run_dir / "checkpoints").rename(run_dir / "checkpoints.old-1")
        record = {"status": "running", "process": {"pid": 1}, "config": {"tracking": {"report": False}}}
        (run_dir / "run.json").write_text(json.dumps(record))
        return dies_after(1)(run_dir)

    script = Script(monkeypatch, dies, begins, finishes)
    assert run(tmp_path, 2, "never") == 0
    assert script.resumed == ["never", "never", "auto"]
    assert [one["start"] for one in read_restarts(tmp_path)] == [
        "there is no checkpoint yet: from the beginning",
        "from the checkpoint of step 1",
    ]


def test_devices_that_are_missing_after_a_failure_are_waited_for(tmp_path, monkeypatch, capsys):
    def refused(run_dir: Path) -> dict[int, int]:
        raise UnavailableError("too few devices")

    monkeypatch.setattr(attempts, "RETRY_S", 0.01)
    Script(monkeypatch, dies, refused, refused, finishes)
    assert run(tmp_path, 1) == 0

    Script(monkeypatch, dies, *[refused] * 1000)
    assert run(tmp_path, 1, start_timeout_s=1.0) == 1
    assert "the restart failed for 1 s: too few devices" in capsys.readouterr().err


def test_a_restart_that_would_be_refused_again_is_the_end(tmp_path, monkeypatch, capsys):
    def refused(run_dir: Path) -> dict[int, int]:
        raise ConfigError("a bad key", where="some.key", fix="correct it")

    script = Script(monkeypatch, dies, refused, finishes)
    assert run(tmp_path, 1) == 1
    assert len(script.resumed) == 2
    assert "the restart was refused: some.key: a bad key" in capsys.readouterr().err


def test_a_try_to_start_again_does_not_see_what_the_one_before_left(tmp_path, monkeypatch):
    def starts_in_part(run_dir: Path) -> dict[int, int]:
        Heartbeat(run_dir, 0)
        raises("too early")(run_dir)
        raise WorkerError("the other workers are not there")

    def looks(run_dir: Path) -> dict[int, int]:
        assert (read_beat(run_dir, 0), read_errors(run_dir)) == (None, {})
        return {0: 0}

    monkeypatch.setattr(attempts, "RETRY_S", 0.01)
    Script(monkeypatch, raises("CUDA out of memory"), starts_in_part, looks)
    assert run(tmp_path, 1) == 0
    kept = [(tmp_path / "errors" / f"attempt_{number}" / "rank_0.json").read_text() for number in (1, 2)]
    assert ["out of memory" in kept[0], "too early" in kept[1]] == [True, True]


@pytest.mark.parametrize("fails", [False, True])
def test_another_machine_does_not_take_an_error_of_an_earlier_command_for_one_of_this_run(tmp_path, monkeypatch, fails):
    """Its launcher may look before that of the first machine has removed it."""
    raises()(tmp_path)  # long ago
    monkeypatch.setenv("NODE_RANK", "1")

    def runs(run_dir: Path) -> dict[int, int]:
        if fails:
            raises()(run_dir)  # word for word
        return {}

    Script(monkeypatch, runs)
    polls = iter([{}, {0: 0}])
    monkeypatch.setattr(Ranks, "poll", lambda self: next(polls))
    assert run(tmp_path, 0, machines=2) == (1 if fails else 0)


def test_a_first_start_that_is_refused_is_not_tried_again(tmp_path, monkeypatch):
    def refused(run_dir: Path) -> dict[int, int]:
        raise ConfigError("too few devices")

    Script(monkeypatch, refused)
    with pytest.raises(ConfigError, match="too few devices"):
        run(tmp_path, 3)
