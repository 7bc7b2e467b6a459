"""Room on the disk of the run folder."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from megarl.artifacts.facts import ModelFacts
from megarl.checks import disk
from megarl.checks.checklist import Checklist
from megarl.dag.stage import Role

FACTS = ModelFacts("test", "qwen3", 12, 64, 12, 4, 16, 96, 1000, 512, False)
BF16 = FACTS.parameters * 14  # two bytes, and masters and two moments of four


@pytest.fixture
def judged(config_of, tmp_path, monkeypatch):
    """judged(free, ..., job, run_dir) -> the check of a disk with so many free bytes."""

    def judge(free: float, *overrides: str, job: str = "train", critic: bool = False, run_dir=None):
        monkeypatch.setattr(disk.shutil, "disk_usage", lambda folder: SimpleNamespace(free=free))
        checks, sizes = Checklist(), {Role.ACTOR: FACTS, Role.CRITIC: FACTS}
        roles = {Role.ACTOR, Role.CRITIC} if critic else {Role.ACTOR}
        disk.check_disk(config_of("model.dtype=bf16", *overrides), sizes, roles, job, run_dir, checks)
        [check] = checks.items
        return check

    return judge


@pytest.mark.parametrize(
    ("overrides", "critic", "checkpoints", "models"),
    [
        (["trainer.steps=10"], False, 1, 1),
        (["trainer.steps=10", "trainer.save_every=1"], False, 4, 2),  # two, the best, and one that is written
        (["trainer.steps=10", "trainer.save_every=5"], False, 2, 2),
        (["trainer.steps=10", "trainer.save_every=1", "trainer.best_metric=null"], False, 3, 1),
        (["trainer.steps=10", "trainer.export_hf=false"], False, 1, 0),
        (["trainer.steps=10", "trainer.resume_every=2"], False, 2, 1),  # the last one, and one to go on from
        (["trainer.steps=10", "trainer.save_every=5", "trainer.resume_every=1"], False, 3, 2),
        (["trainer.steps=10", "trainer.save_every=1", "trainer.resume_every=2"], False, 4, 2),  # kept anyway
        (["trainer.steps=10", "algorithm.pipeline=ppo"], True, 2, 1),
    ],
)
def test_what_a_run_keeps_is_held_against_what_is_free(judged, overrides, critic, checkpoints, models):
    needed = checkpoints * BF16 + models * FACTS.parameters * 2
    assert judged(needed, *overrides, critic=critic).status == "ok"
    check = judged(needed - 1, *overrides, critic=critic)
    assert (check.status, check.key) == ("warn", "tracking.dir")
    assert "trainer.keep_last" in check.fix


def test_checkpoints_that_are_there_are_not_counted_twice(judged, tmp_path):
    for step in (1, 2, 3):
        (tmp_path / "run" / "checkpoints" / f"step_{step}").mkdir(parents=True)
        (tmp_path / "run" / "checkpoints" / f"step_{step}" / "meta.json").touch()
    free, often = 2 * BF16, ["trainer.steps=10", "trainer.save_every=1"]
    assert judged(free, *often).status == "warn"
    assert judged(free, *often, run_dir=tmp_path / "run").status == "ok"
    assert judged(0, *often, run_dir=tmp_path / "run").key == "--run-dir"


def test_checkpoints_that_are_only_to_go_on_from_are_shown(judged):
    assert ", one of them only to resume from" in judged(1e12, "trainer.steps=10", "trainer.resume_every=2").message


def test_commands_that_keep_no_model_need_no_room(config_of):
    checks = Checklist()
    disk.check_disk(config_of(), {Role.ACTOR: FACTS}, None, "eval", None, checks)
    assert checks.items == []
