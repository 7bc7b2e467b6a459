"""A team beside the actor's has its part in the run's checkpoints, and finds it again."""

from __future__ import annotations

import random
import threading
from pathlib import Path
from types import SimpleNamespace

import numpy
import pytest
import torch
import torch.distributed as dist

from megarl.config.rollout import AsyncConfig
from megarl.config.run import RunConfig, TrainerConfig
from megarl.config.task import Task
from megarl.dag.messages import CheckpointTag
from megarl.dag.placement import Placement, TeamPlan
from megarl.dag.stage import Role
from megarl.runtime.checkpoint_part import CheckpointPart, teams_of
from megarl.runtime.checkpoints import Checkpoints
from megarl.runtime.rank_state import TeamContext
from megarl.system.comm import WorkerGroup
from megarl.system.offload_schedule import OffloadSchedule
from megarl.training import checkpoint, multi_team_commit
from megarl.training.host_memory import HostArena
from megarl.training.shards import CheckpointError, Snapshot
from tests.dist import run_distributed
from tests.mail import FolderMail

PARALLEL = RunConfig(name="run").actor.parallel
PLANS = (
    TeamPlan("actor", (Role.ACTOR, Role.ROLLOUT), 1, 0, PARALLEL, ()),
    TeamPlan("critic", (Role.CRITIC,), 1, 1, PARALLEL, ()),
    TeamPlan("reference", (Role.REFERENCE,), 1, 2, PARALLEL, ()),
)
APART = (
    TeamPlan("actor", (Role.ACTOR,), 1, 0, PARALLEL, ()),
    TeamPlan("draw", (Role.ROLLOUT,), 1, 1, PARALLEL, ()),
)


def team(name: str, mail: FolderMail | None, plans: tuple[TeamPlan, ...] = PLANS) -> TeamContext:
    plan = next(plan for plan in plans if plan.name == name)
    return TeamContext(plan, Placement(plans), mail)


def test_teams_that_train_or_draw_save_and_the_actors_knows_which(tmp_path):
    def teams(name: str, plans: tuple[TeamPlan, ...] = PLANS):
        config = SimpleNamespace(cluster=SimpleNamespace(timeout_s=9.0))
        mail = FolderMail(tmp_path) if len(plans) > 1 else None
        return teams_of(SimpleNamespace(config=config, mail=mail, team=team(name, mail, plans)))

    lead, beside = teams("actor"), teams("critic")
    assert (lead.name, lead.first, lead.others, lead.deadline_s) == ("actor", 0, ("critic",), 9.0)
    assert (beside.name, beside.first, beside.others) == ("critic", 1, ())
    assert teams("reference") is None
    assert teams("actor", (PLANS[0], PLANS[2])) is None
    assert teams("actor", PLANS[:1]) is None
    assert teams("actor", APART).others == ("draw",)
    assert teams("draw", APART).name == "draw"


@pytest.fixture
def worker(tmp_path, monkeypatch):
    """Makes a worker of a team, with an engine without tensors."""
    monkeypatch.setattr(multi_team_commit, "snapshot", lambda engines, label: Snapshot([], label, HostArena()))
    trainer = TrainerConfig(steps=5, save_every=2)
    cluster = SimpleNamespace(timeout_s=30.0)
    layout = SimpleNamespace(rank=0, world=WorkerGroup.alone(), dp_size=1, describe=lambda: {"world_size": 1})

    def make(name: str, plans: tuple[TeamPlan, ...] = PLANS) -> SimpleNamespace:
        engine = SimpleNamespace(layout=layout, step=7, hf_config=SimpleNamespace(vocab_size=9))
        loader = SimpleNamespace(state_dict=dict, check_state=lambda state: None)
        return SimpleNamespace(
            config=SimpleNamespace(
                trainer=trainer, cluster=cluster, async_=AsyncConfig(), task=Task(), model_dump=lambda mode: {}
            ),
            run_dir=tmp_path / "run",
            trained={} if name == "draw" else {name: engine},
            layout=layout,
            hf_config=None,
            loading=loader,
            offload=OffloadSchedule(),
            frozen={},
            oversampling=None,
            context=SimpleNamespace(
                kl_controller=loader, baselines=loader, surplus=None, scores=None, replay=None, layout=layout
            ),
            mail=FolderMail(tmp_path / "mail"),
            team=team(name, FolderMail(tmp_path / "mail"), plans),
        )

    return make


def test_both_teams_save_what_is_due_what_is_best_and_the_end(worker, monkeypatch):
    lead, beside, idle = worker("actor"), worker("critic"), worker("reference")
    checkpoints, part = Checkpoints(lead), CheckpointPart(beside)
    CheckpointPart(idle).write_part(1, last=True)  # nobody waits for it, and it waits for nobody
    root = lead.run_dir / "checkpoints"
    accuracies = {2: 0.5, 3: 0.7, 4: 0.1}

    def walk() -> None:
        for step in range(1, 6):
            part.write_part(step, last=step == 5)

    other = threading.Thread(target=walk, daemon=True)
    other.start()
    saved = []
    for step in range(1, 6):
        accuracy = accuracies.get(step)
        numbers = {} if accuracy is None else {"val/acc": accuracy}
        checkpoints.after_step(step, numbers, accuracy, last=step == 5)
        saved.append(step) if (root.parent.parent / "mail" / f"checkpoint_part-critic-{step}").exists() else None
    other.join(30)
    assert saved == [2, 3, 4, 5]
    assert checkpoint.steps_in(root) == [3, 4, 5], "the newest two and the best"
    meta = checkpoint.verify(root / "step_5", lead.layout.world)
    assert meta["optimizer_steps"] == {"actor": 7, "critic": 7}
    assert [team["workers"] for team in meta["teams"].values()] == [[0, 1], [1, 1]]

    loaded = []
    monkeypatch.setattr(checkpoint, "check_model", lambda *_: None)
    monkeypatch.setattr(checkpoint, "load_engines", lambda engines, *_: loaded.extend(engines))
    (root / "step_5" / "rng_0.safetensors").write_bytes(b"")  # the actor's team reads it, and will say so
    part.load(root / "step_5")
    idle.trained = {}
    CheckpointPart(idle).load(root / "step_5")
    assert loaded == ["critic"]
    (root / "step_5" / "rng_1.safetensors").write_bytes(b"")
    with pytest.raises(CheckpointError, match=r"rng_1.safetensors has 0 bytes"):
        part.load(root / "step_5")


def test_the_team_that_draws_goes_on_with_its_random_states(worker):
    lead, beside = worker("actor", APART), worker("draw", APART)
    checkpoints, part = Checkpoints(lead), CheckpointPart(beside)
    other = threading.Thread(target=part.write_part, args=(2,), kwargs={"last": True}, daemon=True)
    other.start()
    checkpoints.after_step(2, {}, None, last=True)
    other.join(30)
    step = lead.run_dir / "checkpoints" / "step_2"
    after = by_chance()
    part.load(step)
    assert by_chance() == after
    (step / "rank_0.safetensors").write_bytes(b"")  # of another team, which reads it
    part.load(step)
    assert by_chance() == after
    (step / "rng_1.safetensors").write_bytes(b"")
    with pytest.raises(CheckpointError, match=r"rng_1.safetensors has 0 bytes"):
        part.load(step)


def by_chance() -> list[float]:
    return [torch.rand(()).item(), numpy.random.rand(), random.random()]


def test_the_start_of_rl_is_saved_by_the_actors_team_alone(worker):
    lead = worker("actor")
    Checkpoints(lead).save_start()  # no other team answers
    assert "teams" not in checkpoint.read_meta(lead.run_dir / "checkpoints" / "step_0")


def _waits_longer_than_a_collective(folder: str) -> bool:
    """Rank 0 posts the mail of step 1 when the deadline of the group is over, and both ranks wait for it."""
    group = WorkerGroup("the world", dist.group.WORLD, 10.0).subgroup([0, 1], "a team")
    mail = FolderMail(Path(folder))
    layout = SimpleNamespace(rank=group.rank, world=group)
    config = SimpleNamespace(cluster=SimpleNamespace(timeout_s=10.0))
    part = CheckpointPart(SimpleNamespace(config=config, layout=layout, mail=mail, team=team("critic", mail)))
    if group.rank == 0:
        threading.Timer(11.0, mail.post, ("checkpoint/1", CheckpointTag(1, None).encode())).start()
    part.write_part(1, last=False)
    return group.all_gather_json(True) == [True, True]


@pytest.mark.procs
def test_a_team_waits_for_another_one_longer_than_for_its_own_ranks(tmp_path):
    assert run_distributed(_waits_longer_than_a_collective, 2, 60, str(tmp_path)) == [True, True]
