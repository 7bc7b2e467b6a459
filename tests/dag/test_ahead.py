"""Which teams can draw a step while the one before it is trained, and which cannot."""

from __future__ import annotations

import pytest

from megarl.components import COMPONENTS
from megarl.config.load import load_config
from megarl.dag.ahead import refuse_ahead
from megarl.dag.pipeline import Pipeline
from megarl.dag.placement import Placement, place
from megarl.dag.stage import Kind, Role, stage
from megarl.errors import ConfigError
from megarl.recipes.build import build_task_graph

APART = {"train": ["actor", "critic", "reference", "teacher"], "draw": ["rollout"]}


def placed(recipe: str, teams: dict[str, list[str]], *overrides: str) -> Placement:
    given = ", ".join(f"{name}: {{roles: [{', '.join(roles)}], devices: 1}}" for name, roles in teams.items())
    more = (f"placement.teams={{{given}}}", f"cluster.nproc={max(1, len(teams))}", *overrides)
    config = load_config(recipe, ["async.max_staleness=1", *more], components=COMPONENTS)
    return place(build_task_graph(config), config)


@pytest.mark.parametrize("recipe", ["grpo_quickstart", "ppo_quickstart"])
def test_a_rollout_in_a_team_of_its_own_can(recipe):
    assert [team.name for team in placed(recipe, APART).teams] == ["train", "draw"]


def test_what_scores_the_samples_frozen_may_be_with_it():
    teams = {"train": ["actor"], "draw": ["rollout", "reference"]}
    assert placed("grpo_quickstart", teams, "algorithm.kl.use=loss").teams[1].roles == (Role.REFERENCE, Role.ROLLOUT)


@pytest.mark.parametrize(
    ("recipe", "teams", "overrides", "key", "why"),
    [
        ("grpo_quickstart", {}, (), "async.max_staleness", "takes turns with the actor"),
        ("grpo_quickstart", APART, ("async.max_staleness=2",), "async.max_staleness", "copies of older weights"),
        ("grpo_quickstart", APART, ("rollout.stale_steps=1",), "rollout.stale_steps", "older than they have to be"),
        ("dapo_quickstart", {}, (), "async.max_staleness", "dynamic sampling asks for more samples"),
        (
            "ppo_quickstart",
            {"train": ["actor", "reference"], "draw": ["rollout", "critic"]},
            (),
            "async.max_staleness",
            "returns of advantage in train",
        ),
    ],
)
def test_what_cannot_is_refused_with_the_reason(recipe, teams, overrides, key, why):
    with pytest.raises(ConfigError) as error:
        placed(recipe, teams, *overrides)
    assert error.value.where == key
    assert why in str(error.value)


@stage(reads=["prompt_ids"], writes=["response_ids"], kind=Kind.MODEL_INFERENCE, role=Role.ROLLOUT, resamples=True)
def first(c, samples):
    return samples


@stage(reads=["response_ids"], writes=["more_ids"], kind=Kind.MODEL_INFERENCE, role=Role.ROLLOUT, resamples=True)
def second(c, samples):
    return samples


@stage(reads=["response_ids"], writes=[], role=Role.REFERENCE)
def looks_at_first(c, samples):
    return samples


@stage(reads=["more_ids"], writes=[], role=Role.ACTOR)
def trains(c, samples):
    return samples


def test_samples_of_two_kinds_are_refused():
    config = load_config(
        "grpo_quickstart",
        [
            "async.max_staleness=1",
            "cluster.nproc=3",
            "placement.teams={train: {roles: [actor], devices: 1}, frozen: {roles: [reference], devices: 1}, "
            "draw: {roles: [rollout], devices: 1}}",
        ],
        components=COMPONENTS,
    )
    graph = Pipeline("two", "samples of samples", config).add(first).add(looks_at_first).add(second).add(trains).build()
    with pytest.raises(ConfigError, match="samples of several nodes"):
        place(graph, config)


def test_without_staleness_nothing_is_refused():
    config = load_config("grpo_quickstart", [], components=COMPONENTS)
    refuse_ahead(config, place(build_task_graph(config), config))
