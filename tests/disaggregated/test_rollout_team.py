"""The rollout role in a team of its own: weights one way, the loader's place and validation the other."""

from __future__ import annotations

import json
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from megarl.dag.messages import LoaderAtStart, LoaderPlace
from megarl.dag.staleness import InOrder
from megarl.data.batch import Batch
from megarl.data.loader import PromptLoader
from megarl.disaggregated import loop, rollout_team
from megarl.runtime.checkpoint_part import CheckpointPart
from megarl.system.errors import DataError
from tests.dist import world


class Letters:
    """Mail of one process; what has not been posted is an error, and so is a name that is taken."""

    def __init__(self) -> None:
        self.posted: dict[str, str] = {}

    def post(self, name: str, text: str) -> None:
        assert name not in self.posted
        self.posted[name] = text

    def read(self, name: str) -> str:
        return self.posted[name]

    read_together = read


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
