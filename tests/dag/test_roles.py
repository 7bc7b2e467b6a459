"""A stage names the roles that it works with: they are given by name; what cannot be given is refused when built."""

from __future__ import annotations

from typing import Any

import pytest

from megarl.dag.executor import Executor, NodeError
from megarl.dag.pipeline import Pipeline
from megarl.dag.stage import Kind, Role, stage
from megarl.data.batch import Batch
from megarl.system.errors import UserError

SEEN: dict[str, Any] = {}


@stage(reads=[], writes=[], role=Role.ACTOR)
def score(c, batch, scale, *, actor, reference, critic=None):
    SEEN.update(scale=scale, actor=actor, reference=reference, critic=critic)
    return batch


@stage(reads=[], writes=[], kind=Kind.MODEL_TRAIN, role=Role.REFERENCE)
def train_reference(c, batch, *, reference):
    return batch


def built(func, **config):
    return Pipeline("p").add(func, "node", config=config).build()


def test_roles_are_given_by_name_and_others_only_if_the_run_has_them():
    graph = built(score, scale=2)
    Executor(graph, {"actor": "a", "reference": "r", "teacher": "t"}).run("context", Batch({}, {"uid": ["x"]}))
    assert SEEN == {"scale": 2, "actor": "a", "reference": "r", "critic": None}
    Executor(graph, {"actor": "a", "reference": "r", "critic": "c"}).run("context", Batch({}, {"uid": ["x"]}))
    assert SEEN["critic"] == "c"


def test_a_role_that_the_run_has_not_is_an_error_of_the_node():
    with pytest.raises(NodeError, match=r"node 'node' .*score\) failed: KeyError: 'reference'"):
        Executor(built(score, scale=2), {"actor": "a"}).run("context", Batch({}, {"uid": ["x"]}))


def test_a_graph_has_the_roles_that_its_stages_name():
    assert built(score, scale=1).roles == {Role.ACTOR, Role.REFERENCE}


def test_a_model_is_trained_after_the_nodes_before_it_that_name_it():
    before = Pipeline("p").add(score, config={"scale": 1}).add(train_reference).build()
    assert before.parents("train_reference") == ["score"]
    after = Pipeline("p").add(train_reference).add(score, config={"scale": 1}).build()
    assert after.parents("score") == ["train_reference"]


def test_an_argument_that_is_no_role_is_refused():
    @stage(reads=[], writes=[], role=Role.CRITIC)
    def typo(c, batch, *, critik):
        return batch

    with pytest.raises(UserError, match="'critik', which is neither a role nor a key") as caught:
        built(typo)
    assert "teacher" in str(caught.value.allowed)
    assert caught.value.fix == "did you mean 'critic'?"
    built(typo, critik=1)


@pytest.mark.parametrize(("role", "fix"), [(Role.CRITIC, "Role.ACTOR"), (Role.REWARD, "Role.ACTOR")])
def test_a_stage_that_trains_takes_the_model_of_its_role(role, fix):
    @stage(reads=[], writes=[], kind=Kind.MODEL_TRAIN, role=role)
    def trains(c, batch, *, actor):
        return batch

    with pytest.raises(UserError, match=f"role {role.name}[)], but does not take the role's model") as caught:
        built(trains)
    assert caught.value.found == "actor"
    assert fix in caught.value.fix


def test_a_stage_that_trains_takes_a_model():
    @stage(reads=[], writes=[], kind=Kind.MODEL_TRAIN, role=Role.ACTOR)
    def trains(c, batch):
        return batch

    with pytest.raises(UserError, match="does not take the role's model") as caught:
        built(trains)
    assert caught.value.found == "no role"


def test_a_stage_with_a_role_says_whose_work_it_is():
    @stage(reads=[], writes=[])
    def silent(c, batch, *, critic):
        return batch

    with pytest.raises(UserError, match="uses the critic, but does not declare its role") as caught:
        built(silent)
    assert "CRITIC" in str(caught.value.allowed)
    assert caught.value.fix == "declare @stage(..., role=Role.CRITIC)"
