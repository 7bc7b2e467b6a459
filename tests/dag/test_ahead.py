"""Which teams can draw samples while others are trained on, and which cannot."""

from __future__ import annotations

import pytest

from megarl.config.load import load_config
from megarl.dag.ahead import refuse_ahead
from megarl.dag.pipeline import Pipeline
from megarl.dag.placement import Placement, place
from megarl.dag.stage import Kind, Role, stage
from megarl.dag.staleness import policy_of
from megarl.recipes.build import build_task_graph
from megarl.recipes.components import COMPONENTS
from megarl.runtime.stages.rollout import rollout
from megarl.system.errors import ConfigError

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
        (
            "grpo_quickstart",
            APART,
            ("rollout.stale_steps=1",),
            "rollout.stale_steps",
            "is for experiments in which the rollout",
        ),
        ("dapo_quickstart", {}, (), "async.max_staleness", "dynamic sampling requests more samples"),
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
    graph = build_task_graph(config)
    refuse_ahead(config, place(graph, config), graph)


# -- groups that come one by one -------------------------------------------------------------------------------------

READY = "async.order=as_ready"


@pytest.mark.parametrize("recipe", ["grpo_quickstart", "ppo_quickstart", "dapo_quickstart"])
@pytest.mark.parametrize("more", [(), ("async.partial=true",), ("async.max_staleness=7",)])
def test_a_rollout_in_a_team_of_its_own_can_hand_over_what_is_ready(recipe, more):
    assert [team.name for team in placed(recipe, APART, READY, *more).teams] == ["train", "draw"]


@pytest.mark.parametrize("order", ["as_ready", "megarl.dag.staleness:AsReady"])
def test_of_dapo_all_that_scores_is_where_samples_are_drawn(order):
    found = placed("dapo_quickstart", APART, f"async.order={order}")
    assert found["draw"].nodes == ("rollout", "reward_submit", "reward", "overlong")
    assert found.of_node("dynamic_sampling").name == "train"


@pytest.mark.parametrize("recipe", ["grpo_quickstart", "dapo_quickstart"])
@pytest.mark.parametrize("order", ["as_ready", "in_order"])
def test_a_filter_is_asked_where_groups_are_drawn_if_they_come_one_by_one(recipe, order):
    more = ("algorithm.filter.high=0.9", "rollout_correction.preset=decoupled_token_is", "algorithm.kl.use=reward")
    lag = ("async.max_staleness=0",) if order == "in_order" and recipe == "dapo_quickstart" else ()
    teams = {"train": [*APART["train"], "rollout"]} if lag else APART
    found = placed(recipe, teams, f"async.order={order}", *more, *lag)
    assert found.of_node("filter").name == ("draw" if order == "as_ready" else "train")
    if order == "as_ready":
        assert found["draw"].nodes[-1] == "filter"
        assert "filter>train" in [one.key for one in found.handovers if "response_mask" in one.fields]


@pytest.mark.parametrize("recipe", ["grpo_quickstart", "dapo_quickstart"])
def test_a_filter_of_what_is_computed_later_cannot_choose_groups_one_by_one(tmp_path, recipe):
    file = tmp_path / f"late_{recipe}.py"
    file.write_text(
        "from megarl.algorithms.group_filter import FILTERS\n"
        "@FILTERS.register(reads=('old_logp', 'finish_reason'))\n"
        "def sure(score, uid, *, old_logp, finish_reason): ...\n"
    )
    with pytest.raises(ConfigError) as error:
        placed(recipe, APART, READY, f"algorithm.filter.name={file}:sure")
    assert error.value.where == "algorithm.filter.name"
    for word in ("sure, which reads old_logp'", "async.order=in_order", "shaping.own_filter"):
        assert word in str(error.value)


def test_its_replicas_need_not_divide_the_groups_of_a_step():
    teams = "placement.teams.draw.devices=3", "cluster.nproc=4", "data.batch_size=32"
    assert placed("grpo_quickstart", APART, READY, *teams)["draw"].replicas == 3


@pytest.mark.parametrize(
    ("recipe", "teams", "overrides", "key", "words"),
    [
        (
            "grpo_quickstart",
            APART,
            ("async.partial=true",),
            "async.partial",
            ["so none are partial", "async.order=as_ready"],
        ),
        (
            "grpo_quickstart",
            APART,
            ("async.max_staleness=31",),
            "async.max_staleness",
            ["max_staleness is too large", "0 to 30"],
        ),
        (
            "grpo_quickstart",
            APART,
            ("async.max_staleness=0", READY),
            "async.max_staleness",
            ["with older weights", "async.max_staleness=1, or async.order=in_order"],
        ),
        ("grpo_quickstart", {}, (READY,), "async.max_staleness", ["takes turns", "async.order=in_order"]),
        (
            "grpo_quickstart",
            APART,
            (READY, "rollout.stale_steps=1"),
            "rollout.stale_steps",
            ["is for experiments in which the rollout"],
        ),
        ("dapo_quickstart", {}, (READY,), "async.max_staleness", ["takes turns"]),
        (
            "grpo_quickstart",
            APART,
            (READY, "async.partial=true", "rollout.sampling.min_new_tokens=2"),
            "rollout.sampling.min_new_tokens",
            ["counts tokens from 0", "async.partial=false"],
        ),
        (
            "ppo_quickstart",
            {"train": ["actor", "reference"], "draw": ["rollout", "critic"]},
            (READY,),
            "async.max_staleness",
            ["returns of advantage in train, read by critic_train"],
        ),
        (
            "grpo_quickstart",
            {"train": ["actor"], "draw": ["rollout", "reference"]},
            (READY, "algorithm.kl.use=loss"),
            "async.order",
            ["'ref_logp' uses the reference", "put the reference into a team other than draw"],
        ),
        (
            "grpo_quickstart",
            APART,
            (READY, "algorithm.advantage.name=remax"),
            "async.order",
            ["'greedy_rollout'", "while the engine is busy"],
        ),
    ],
)
def test_what_cannot_come_one_by_one_is_refused_with_reason_and_way_out(recipe, teams, overrides, key, words):
    with pytest.raises(ConfigError) as error:
        placed(recipe, teams, *overrides)
    assert error.value.where == key
    for word in words:
        assert word in str(error.value)


def test_samples_that_may_be_short_are_drawn_to_their_end_without_partial():
    assert placed("grpo_quickstart", APART, READY, "rollout.sampling.min_new_tokens=2").separate


@stage(reads=["response_ids"], writes=[], role=Role.REWARD, resamples=True)
def chooses(c, samples):
    return samples


@pytest.mark.parametrize(
    ("stages", "words"),
    [
        ((first, second, trains), ["the first node of the team draw must be the stage rollout", "node 'first'"]),
        ((rollout, chooses, looks_at_first), ["node 'chooses' in the team draw replaces samples"]),
    ],
)
def test_only_the_stage_of_this_project_draws_and_makes_samples(stages, words):
    given = "{train: {roles: [actor, reference], devices: 1}, draw: {roles: [rollout], devices: 1}}"
    settings = ["async.max_staleness=1", READY, "cluster.nproc=2", f"placement.teams={given}"]
    config = load_config("grpo_quickstart", settings, components=COMPONENTS)
    pipeline = Pipeline("mine", "samples of samples", config)
    for one in stages:
        pipeline.add(one)
    with pytest.raises(ConfigError) as error:
        place(pipeline.build(), config)
    assert error.value.where == "async.order"
    for word in words:
        assert word in str(error.value)


def test_the_plan_says_what_runs_ahead_and_how_far():
    def said(*overrides):
        return policy_of(load_config("grpo_quickstart", overrides, components=COMPONENTS)).describe()

    assert said() == "in_order, not stale: a step is generated after the one before it is trained"
    assert "1 step stale" in said("async.max_staleness=1")
    ready = said("async.max_staleness=2", READY, "data.batch_size=24")
    assert "as_ready, at most 2 steps stale" in ready
    assert "(1 + 2) * 24 = 72 groups" in ready
    assert "samples end with the weights they began with" in ready
    assert "new weights interrupt samples" in said("async.max_staleness=2", READY, "async.partial=true")
