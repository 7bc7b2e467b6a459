"""What Ctrl-C loses: nothing where the run can save, and no time where there is nothing to save."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from megarl.artifacts.batch import SAVE
from megarl.config.run import RunConfig
from megarl.launchers import interrupt
from megarl.launchers.common import Job, Stopped
from megarl.launchers.output import OutputLog
from megarl.runtime.health import Beat


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
    """interrupted(entry, phase, step, look) -> what is said by a run with a checkpoint of step 2."""
    monkeypatch.setattr(interrupt, "_POLL_S", 0.0)
    (tmp_path / "checkpoints" / "step_2").mkdir(parents=True)
    (tmp_path / "checkpoints" / "step_2" / "meta.json").touch()

    def run(entry: str, phase: str, step: int, look: Callable[[], dict[int, int]] = dict) -> str:
        monkeypatch.setattr(interrupt, "read_beat", lambda run_dir, rank: Beat(1, step, 1, 0.0, phase, "host"))
        log = OutputLog(tmp_path / "log.txt")
        interrupt.save_first(Run(look), Job(f"megarl.recipes.entry:{entry}", RunConfig(name="case"), tmp_path, log))
        return (tmp_path / "log.txt").read_text()

    return run


def test_the_run_is_asked_to_save_and_waited_for(interrupted, tmp_path: Path) -> None:
    looks = []

    def saves_at_the_third_look() -> dict[int, int]:
        looks.append((tmp_path / SAVE).exists())
        if len(looks) == 3:
            (tmp_path / SAVE).unlink()
        return {}

    assert "learnt in 2 steps is lost" in interrupted("train", "step/rollout", 5, saves_at_the_third_look)
    assert looks == [True] * 3


@pytest.mark.parametrize("ends", ["a worker ends", "a second Ctrl-C"])
def test_it_is_not_waited_for_when_it_will_not_come(interrupted, tmp_path: Path, ends: str) -> None:
    def look() -> dict[int, int]:
        if ends == "a worker ends":
            return {0: 1}
        raise Stopped(2)

    interrupted("train", "step/rollout", 5, look)
    assert not (tmp_path / SAVE).exists()


@pytest.mark.parametrize(
    ("entry", "phase", "step"),
    [
        ("train", "step/rollout", 3),  # step 2 is saved
        ("train", "load_model", 0),
        ("train", "sft/train", 300),  # a cold start has no checkpoints
        ("train", "export", 9),
        ("evaluate", "step", 9),
    ],
)
def test_where_nothing_would_be_saved_the_run_ends_at_once(interrupted, entry: str, phase: str, step: int) -> None:
    assert interrupted(entry, phase, step) == ""


def test_fine_tuning_saves_too(interrupted, tmp_path: Path) -> None:
    def save() -> dict[int, int]:
        (tmp_path / SAVE).unlink()
        return {}

    assert "1 step is lost" in interrupted("sft", "sft/train", 4, save)
