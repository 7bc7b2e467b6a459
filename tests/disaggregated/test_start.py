"""What the team of the actor tells the others of where the run begins."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from megarl.config.run import RunConfig
from megarl.dag.messages import RunStart
from megarl.dag.placement import Placement, TeamPlan
from megarl.dag.stage import Role
from megarl.disaggregated.loop import all_ready, follow_start
from megarl.runtime import frozen_models
from megarl.runtime.frozen_models import keep_run_start
from megarl.runtime.rank_state import TeamContext
from megarl.system.comm import WorkerGroup
from megarl.system.offload_schedule import OffloadSchedule
from tests.mail import FolderMail

PARALLEL = RunConfig(name="run").actor.parallel
TEAMS = {"train": (Role.ACTOR, Role.ROLLOUT), "value": (Role.CRITIC,), "frozen": (Role.REFERENCE,)}


def begin(c, resumed_at: int | None, source: Path | None) -> RunStart:
    """The actor's team finds where the run begins, and announces it."""
    start = keep_run_start(c, resumed_at, source)
    start.post(c.mail)
    return start


@pytest.fixture
def worker(tmp_path, monkeypatch):
    """Makes the first worker of a team."""
    mail = FolderMail(tmp_path / "mail", timeout=0.1)

    def export(c, folder: Path) -> None:
        folder.mkdir()
        (folder / "config.json").touch()

    monkeypatch.setattr(frozen_models, "_export_actor", export)
    (tmp_path / "run").mkdir()

    def make(name: str, teams=TEAMS, **settings) -> SimpleNamespace:
        plans = [TeamPlan(team, roles, 1, first, PARALLEL, ()) for first, (team, roles) in enumerate(teams.items())]
        placement = Placement(tuple(plans))
        return SimpleNamespace(
            config=RunConfig(name="run", **settings),
            run_dir=tmp_path / "run",
            layout=SimpleNamespace(rank=0, world=WorkerGroup.alone()),
            team=TeamContext(placement[name], placement, mail),
            mail=mail,
            context=SimpleNamespace(step=0),
            offload=OffloadSchedule(),
            frozen={},
        )

    return make


def _of_an_older_version(checkpoint: Path) -> Path:
    """A checkpoint that notes nothing of frozen models."""
    checkpoint.mkdir(parents=True)
    (checkpoint / "state.json").write_text("{}")
    return checkpoint


def test_a_fresh_model_is_written_once_and_both_begin_with_it(worker, tmp_path):
    kept = str(tmp_path / "run" / "reference.next")
    start = begin(worker("train"), None, None)
    assert start == RunStart(None, None, kept, kept)
    assert [path.name for path in (tmp_path / "run").iterdir()] == ["reference.next"]
    assert follow_start(worker("value")) == start


def test_where_nothing_has_changed_both_begin_with_the_models_own_files(worker, tmp_path):
    start = begin(worker("train", model={"path": str(tmp_path)}), None, None)
    assert (start.reference, start.initial) == (str(tmp_path), str(tmp_path))
    assert not list((tmp_path / "run").glob("*/config.json"))


def test_a_critic_with_weights_of_its_own_begins_with_none_of_the_actors(worker):
    settings = {"critic": {"path": "of-its-own"}, "reference": {"path": "elsewhere"}}
    start = begin(worker("train", **settings), None, None)
    assert (start.reference, start.initial) == ("elsewhere", None)


def test_a_start_that_passes_to_a_critic_only_does_not_stay(worker, tmp_path):
    teams = {"train": TEAMS["train"], "value": TEAMS["value"]}
    passing = tmp_path / "run" / "start.next"
    assert begin(worker("train", teams), None, None) == RunStart(None, None, None, str(passing))
    frozen_models.install_reference(tmp_path / "run")
    assert list((tmp_path / "run").iterdir()) == []


@pytest.mark.parametrize(("step", "begun"), [(0, False), (7, True)])
def test_a_resumed_run_takes_the_reference_that_it_has_kept_and_the_critic_of_its_checkpoint(
    worker, tmp_path, step, begun
):
    run_dir = tmp_path / "run"
    (run_dir / "reference").mkdir()
    (run_dir / "reference" / "config.json").touch()
    source = _of_an_older_version(run_dir / "checkpoints" / f"step_{step}")
    start = begin(worker("train"), step, source)
    assert start.begun == begun
    kept = str(run_dir / ("reference" if begun else "reference.next"))
    assert (start.reference, start.initial) == (kept, None if begun else kept)
    c = worker("frozen")
    follow_start(c)
    assert c.context.step == step


def test_a_run_that_goes_on_from_another_one_copies_its_reference(worker, tmp_path):
    other = tmp_path / "other"
    (other / "reference").mkdir(parents=True)
    (other / "reference" / "config.json").write_text("{}")
    start = begin(worker("train"), 7, _of_an_older_version(other / "checkpoints" / "step_7"))
    assert start.reference == str(other / "reference")
    assert (tmp_path / "run" / "reference.next" / "config.json").read_text() == "{}"


def test_the_start_is_accepted_when_all_teams_are_ready(worker):
    all_ready(worker("value"))
    frozen = worker("frozen")
    frozen.frozen["reference"] = {"key": "", "path": "", "files": {}}
    with pytest.raises(AssertionError, match="nobody posts ready/frozen"):
        all_ready(worker("train"))
    all_ready(frozen)
    c = worker("train")
    all_ready(c)
    assert c.frozen == frozen.frozen  # for the checkpoints, which this team writes


def test_a_team_that_begins_again_goes_on_after_the_last_step_that_was_over_with_what_the_run_has_taken_up(
    worker, tmp_path
):
    start = begin(worker("train"), None, None)
    run_dir = tmp_path / "run"
    assert frozen_models.now_at(run_dir, start.reference) == start.reference
    frozen_models.install_reference(run_dir)
    c = worker("frozen")
    c.team = replace(c.team, restarts=1, finished=3)
    assert follow_start(c) == start
    assert c.context.step == 3
    assert frozen_models.now_at(run_dir, start.reference) == str(run_dir / "reference")
    assert frozen_models.now_at(run_dir, "hub/model") == "hub/model"


def test_a_team_that_begins_again_before_the_first_step_goes_on_where_the_run_resumed(worker, tmp_path):
    c = worker("train")
    RunStart(7, str(tmp_path), None, None).post(c.mail)
    c = worker("frozen")
    c.team = replace(c.team, restarts=1)
    follow_start(c)
    assert c.context.step == 7
