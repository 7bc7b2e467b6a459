"""What a signal loses: nothing where the run can save, and no time where there is nothing to save."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from megarl.artifacts.run_folder import SAVE_REQUEST
from megarl.config.run import ClusterConfig, RunConfig
from megarl.launchers import interrupt
from megarl.launchers.attempts import next_start
from megarl.launchers.common import Job
from megarl.launchers.output import OutputLog
from megarl.runtime.health import Beat
from megarl.system.errors import WorkerError
from megarl.system.processes import Stopped


class Run:
    """Workers of which one does something whenever it is looked at."""

    def __init__(self, look: Callable[[], dict[int, int]]) -> None:
        self._look = look

    def ranks(self) -> list[int]:
        return [0]

    def poll(self) -> dict[int, int]:
        return self._look()

    def cause(self, rank: int) -> None:
        return None

    def stop(self) -> None:
        pass


@pytest.fixture
def interrupted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., str]:
    """interrupted(entry, phase, step, look, number) -> what is said by a run with a checkpoint of step 2."""
    monkeypatch.setattr(interrupt, "_POLL_S", 0.0)
    (tmp_path / "checkpoints" / "step_2").mkdir(parents=True)
    (tmp_path / "checkpoints" / "step_2" / "meta.json").touch()

    def run(
        entry: str, phase: str, step: int, look: Callable[[], dict[int, int]] = dict, number: int = signal.SIGINT
    ) -> str:
        monkeypatch.setattr(interrupt, "read_beat", lambda run_dir, rank: Beat(1, step, 1, 0.0, phase, "host"))
        log = OutputLog(tmp_path / "log.txt")
        config = RunConfig(name="case", cluster=ClusterConfig(grace_s=0.0))
        with contextlib.suppress(Stopped):
            interrupt.save_first(Run(look), Job(f"megarl.recipes.entry:{entry}", config, tmp_path, log), number)
        return (tmp_path / "log.txt").read_text()

    return run


def test_the_run_is_asked_to_save_and_waited_for(interrupted, tmp_path: Path) -> None:
    looks = []

    def saves_at_the_third_look() -> dict[int, int]:
        looks.append((tmp_path / SAVE_REQUEST).exists())
        if len(looks) == 3:
            (tmp_path / SAVE_REQUEST).unlink()
        return {}

    for number in (signal.SIGINT, signal.SIGUSR1):  # who sends these has said no limit
        looks.clear()
        said = interrupted("train", "step/rollout", 5, saves_at_the_third_look, number)
        assert f"{number.name}: finishing and saving the current step first" in said
        assert "then 2 steps of training will be lost" in said
        assert looks == [True] * 3


@pytest.mark.parametrize(
    ("ends", "number", "why"),
    [
        ("a worker ends", signal.SIGINT, "a worker has ended before the step was saved"),
        ("a second signal", signal.SIGINT, ""),
        ("Ray is lost", signal.SIGTERM, "Ray's control store died"),
        ("never", signal.SIGTERM, "the step was not saved within cluster.grace_s = 0 s"),
        ("never", signal.SIGHUP, "the step was not saved within cluster.grace_s = 0 s"),
    ],
)
def test_it_is_not_waited_for_when_it_will_not_come(interrupted, tmp_path: Path, ends: str, number, why: str) -> None:
    def look() -> dict[int, int]:
        if ends == "a second signal":
            raise Stopped(2)
        if ends == "Ray is lost":
            raise WorkerError("Ray's control store died")
        return {0: 1} if ends == "a worker ends" else {}

    said = interrupted("train", "step/rollout", 5, look, number)
    assert not (tmp_path / SAVE_REQUEST).exists()
    lost = "2 steps of training will be lost, and the run continues from the checkpoint of step 2"
    assert (f"megarl: {lost}: {why}" in said) is bool(why)


@pytest.mark.parametrize(
    ("entry", "phase", "step"),
    [
        ("train", "step/rollout", 3),  # step 2 is saved
        ("train", "load_model", 0),
        ("train", "export", 9),
        ("evaluate", "step", 9),
    ],
)
def test_where_nothing_would_be_saved_the_run_ends_at_once(interrupted, entry: str, phase: str, step: int) -> None:
    assert interrupted(entry, phase, step) == ""


@pytest.mark.parametrize("phase", ["await_metrics", "reduce_metrics"])
def test_steps_that_wait_to_be_recorded_are_saved(interrupted, phase: str) -> None:
    assert "3 steps of training will be lost" in interrupted("train", phase, 5, lambda: {0: 1})


def test_fine_tuning_saves_too(interrupted, tmp_path: Path) -> None:
    def save() -> dict[int, int]:
        (tmp_path / SAVE_REQUEST).unlink()
        return {}

    assert "1 step of training will be lost" in interrupted("sft", "sft/train", 4, save)


@pytest.mark.parametrize(("phase", "lost"), [("sft/train", 3), ("idle", 4)])
def test_a_cold_start_saves_too(interrupted, tmp_path: Path, phase: str, lost: int) -> None:
    (tmp_path / "checkpoints" / "step_2").rename(tmp_path / "other")  # there are none before RL
    (tmp_path / "cold_start").mkdir()
    (tmp_path / "other").rename(tmp_path / "cold_start" / "step_2")
    said = interrupted("train", phase, 6, lambda: {0: 1})
    assert f"{lost} steps of training will be lost, and the run continues from the checkpoint of step 2" in said
    assert next_start(tmp_path, "auto", begun=True) == ("from the checkpoint of step 2 of the cold start", "auto")
