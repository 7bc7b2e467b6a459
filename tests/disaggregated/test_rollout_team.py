"""The rollout role in a team of its own: weights one way, the loader's place and validation the other."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megarl.config.run import RunConfig
from megarl.dag.messages import LoaderAtStart, LoaderPlace
from megarl.dag.staleness import InOrder
from megarl.data.batch import Batch
from megarl.data.loader import PromptLoader
from megarl.disaggregated import loop, rollout_team
from megarl.runtime.checkpoint_part import CheckpointPart
from megarl.system.errors import DataError, WorkerError
from megarl.system.rendezvous import write_token
from tests.dist import single_process, world
from tests.rollout import cases


class Letters:
    """Mail of one process; what has not been posted is an error, and so is a name that is taken."""

    def __init__(self) -> None:
        self.posted: dict[str, str] = {}

    def post(self, name: str, text: str) -> None:
        assert name not in self.posted
        self.posted[name] = text

    def read(self, name: str) -> str:
        return self.posted[name]


@pytest.fixture
def teams(tmp_path: Path) -> Iterator[SimpleNamespace]:
    """Both teams in this process: the trainer's chunks and what pushes them, an engine and what holds its weights."""
    write_token(tmp_path)
    config = RunConfig.model_validate({"name": "two teams", "sync": {"timeout_s": 20.0, "bucket_mb": 5}})
    layout, mail = single_process(), Letters()
    trained, held = cases.build(seed=3), cases.build(seed=4)
    engine = cases.engine(held)
    holder = SimpleNamespace(
        config=config,
        run_dir=tmp_path,
        layout=layout,
        mail=mail,
        team=SimpleNamespace(buffer=mail),
        rollout=SimpleNamespace(engine=engine),
    )
    pushed = rollout_team.open_engine(holder)
    trains = SimpleNamespace(
        config=config,
        run_dir=tmp_path,
        layout=layout,
        mail=mail,
        actor=SimpleNamespace(chunks=trained),
        hf_config=trained[0].hf_config,
    )
    trains.sync = sync = rollout_team.connect_engines(trains)
    yield SimpleNamespace(mail=mail, trained=trained, engine=engine, pushed=pushed, trains=trains)
    sync.close()
    pushed.close()


def draw(engine: Any) -> list[Any]:
    return engine.generate(cases.make_requests(3, 2), cases.sampled(max_new_tokens=6), [2])


def test_the_engine_draws_what_the_trainers_own_would(teams):
    own = cases.engine(teams.trained)
    for version in (0, 1):
        with torch.no_grad():
            for parameter in teams.trained[0].parameters():
                parameter.mul_(1.125)
        rollout_team.push_weights(teams.trains, version)
        rollout_team.follow_weights(teams.pushed, version, teams.mail, "train")
        own.weight_version = version
        with teams.pushed.held():
            assert draw(teams.engine) == draw(own)


def test_no_other_version_is_drawn_with(teams):
    for version in (1, 2):
        rollout_team.push_weights(teams.trains, version)
    with pytest.raises(WorkerError, match=r"no weights of version 1 .* holding 2@"):
        rollout_team.follow_weights(teams.pushed, 1, teams.mail, "train")


def test_an_engine_that_takes_no_weights_ends_the_run(teams, monkeypatch):
    def broken(name: str, tensor: torch.Tensor) -> None:
        raise RuntimeError("no memory left")

    monkeypatch.setattr(teams.pushed._inbox._writer, "write", broken)
    with pytest.raises(WorkerError, match=r"did not take version 1 .*\nengine 0 at tcp.*no memory left"):
        rollout_team.push_weights(teams.trains, 1)
    assert "weights/1" not in teams.mail.posted


def test_a_run_without_a_token_has_no_key(tmp_path):
    c = SimpleNamespace(
        config=RunConfig(name="two teams"),
        run_dir=tmp_path,
        layout=single_process(),
        rollout=SimpleNamespace(engine=cases.engine(cases.build())),
    )
    with pytest.raises(WorkerError, match="the run has no token in"):
        rollout_team.open_engine(c)


class Numbers:
    """Samples that are their own place."""

    fingerprint = "numbers"

    def __init__(self, count: int) -> None:
        self._count = count

    def __len__(self) -> int:
        return self._count

    def batch(self, indices: Sequence[int], epoch: int = 0) -> Batch:
        return Batch({}, {"number": [(epoch, index) for index in indices]}, size=len(indices))


def loader_state(position: int, fingerprint: str = "abc") -> dict[str, Any]:
    return {"epoch": 0, "position": position, "seed": 0, "shuffle": True, "samples": 9, "fingerprint": fingerprint}


def post_places(mail: Letters, start: int, places: dict[int, int]) -> None:
    LoaderAtStart(loader_state(start)).post(mail)
    for step, position in places.items():
        LoaderPlace(step, loader_state(position)).post(mail)


def test_the_loaders_place_is_that_after_the_step(tmp_path):
    mail, context = Letters(), SimpleNamespace(step=0)
    post_places(mail, 0, {1: 4, 2: 8})
    loader = rollout_team.RemoteLoader(context, mail, "draw")
    found = []
    for step in (0, 1, 2):
        context.step = step
        found.append(loader.state_dict()["position"])
    assert found == [0, 4, 8]


def test_the_loaders_place_is_that_after_the_step_that_is_drawn_ahead(tmp_path):
    mail, context = Letters(), SimpleNamespace(step=0)
    post_places(mail, 0, {2: 8, 3: 12})
    loader = rollout_team.RemoteLoader(context, mail, "draw", InOrder(1, groups=4, steps=3))
    found = []
    for step in (0, 1, 2, 3):
        context.step = step
        found.append(loader.state_dict()["position"])
    assert found == [0, 8, 12, 12]


def test_a_resumed_loader_begins_where_the_checkpoint_was_written(tmp_path):
    mail, context = Letters(), SimpleNamespace(step=0)
    post_places(mail, 0, {8: 3})
    loader = rollout_team.RemoteLoader(context, mail, "draw")
    context.step = 7
    loader.load_state_dict(loader_state(5))
    assert loader.state_dict() == loader_state(5)
    context.step = 8
    assert loader.state_dict() == loader_state(3)


@pytest.mark.parametrize("resumed_at", [0, 2], ids=["of a cold start", "of a step"])
def test_a_resumed_run_draws_the_prompts_that_come_next(tmp_path, resumed_at):
    """In the team that generates, which has no engine of its own in the checkpoint."""
    data = Numbers(9)
    written = PromptLoader(data, 4, seed=7)
    for _ in range(resumed_at):
        next(written)
    (tmp_path / "state.json").write_text(json.dumps({"loader": written.state_dict()}))
    team = SimpleNamespace(generates_apart=True, leads=False, buffer=None)
    c = SimpleNamespace(team=team, layout=SimpleNamespace(world=world()), loader=PromptLoader(data, 4), trained={})
    loop.resume(c, CheckpointPart(c), tmp_path, begun=resumed_at > 0)
    assert next(c.loader)["number"] == next(written)["number"]


def test_a_checkpoint_of_other_data_is_refused_where_the_loader_is_not(tmp_path):
    mail = Letters()
    post_places(mail, 0, {})
    loader = rollout_team.RemoteLoader(SimpleNamespace(step=0), mail, "draw")
    with pytest.raises(DataError, match=r"data\.train_files"):
        loader.check_state(loader_state(0, fingerprint="other"))
