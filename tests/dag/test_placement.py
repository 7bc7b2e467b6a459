"""Which team walks which nodes, and that each gets what it reads, once, and nothing else."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megarl.config.load import load_config
from megarl.config.run import RunConfig
from megarl.dag.graph import TaskGraph
from megarl.dag.node import Node
from megarl.dag.pipeline import Pipeline
from megarl.dag.placement import MODEL_ROLES, Placement, place, roles_of, settled, together
from megarl.dag.stage import Contract, Kind, Role, stage
from megarl.recipes.build import build_task_graph
from megarl.recipes.components import COMPONENTS
from megarl.system.errors import ConfigError

RECIPES = {
    "grpo": ("grpo_quickstart", "algorithm.kl.use=loss"),
    "ppo": ("ppo_quickstart", "algorithm.kl.use=reward"),
    "dapo": ("dapo_quickstart", "algorithm.kl.use=loss"),
    "distilled": ("grpo_quickstart", "algorithm.distillation.coef=1", "teacher.path=org/teacher", "actor.ppo_epochs=2"),
    "judged": ("grpo_quickstart", "reward=!replace {name: reward_model}", "reward_model.path=org/judge"),
}
TOGETHER = {"dapo": {Role.ROLLOUT: Role.ACTOR}}  # dynamic sampling asks for more


def load(name: str, teams: dict[str, list[str]], *more: str) -> tuple[TaskGraph, RunConfig]:
    recipe, *overrides = RECIPES[name]
    given = ", ".join(f"{team}: {{roles: [{', '.join(roles)}], devices: 1}}" for team, roles in teams.items())
    overrides += [f"placement.teams={{{given}}}", f"cluster.nproc={max(1, len(teams))}", *more]
    config = load_config(recipe, overrides, components=COMPONENTS)
    return build_task_graph(config), config


def needs(graph: TaskGraph, placement: Placement) -> Iterator[tuple[str, str, str]]:
    """(writer, field, team that reads it and did not write it), by walking the graph as one team does."""
    writers: dict[str, str] = {}
    for id in graph.order():
        declared, team = graph[id].declared, placement.of_node(id)
        read = writers if declared.resamples else [name for name in declared.uses if name in writers]
        for name in read:
            if placement.of_node(writers[name]) != team:
                yield writers[name], name, team.name
        writers |= dict.fromkeys((*declared.writes, *declared.may_write), id)
        if declared.resamples:  # it carries all fields, also those of the prompts
            writers |= dict.fromkeys((*graph.entry, *writers), id)
        for name in declared.consumes:
            writers.pop(name, None)


@given(
    st.sampled_from(list(RECIPES)), st.lists(st.integers(0, 3), min_size=len(MODEL_ROLES), max_size=len(MODEL_ROLES))
)
@settings(max_examples=15, deadline=None)
def test_every_team_is_handed_what_it_reads_of_others_once(name, choice):
    graph, _ = load(name, {})
    wanted = dict(zip(MODEL_ROLES, choice, strict=True))
    for role, other in TOGETHER.get(name, {}).items():
        wanted[role] = wanted[other]
    teams: dict[str, list[str]] = {}
    for role in roles_of(graph):
        teams.setdefault(f"team{wanted[role]}", []).append(role.value)
    graph, config = load(name, teams)
    placement = place(graph, config)
    handed = [(one.node, field, taker) for one in placement.handovers for field in one.fields for taker in one.takers]
    assert sorted(handed) == sorted(set(needs(graph, placement)))
    assert all(placement.of_node(one.node).name == one.giver for one in placement.handovers)
    assert len({one.key for one in placement.handovers}) == len(placement.handovers)
    walked = [id for team in placement.teams for id in team.nodes]
    assert sorted(walked) == sorted(graph.order())
    assert Role.ACTOR in placement.teams[0].roles
    workers = [placement.of_worker(number).name for number in range(config.cluster.nproc)]
    assert workers == [team.name for team in placement.teams]


def test_nodes_are_walked_where_their_models_are_and_rewards_where_samples_are_drawn():
    roles = {role: [role] for role in ("actor", "critic", "reference", "rollout")}
    graph, config = load("ppo", roles)
    assert {team.name: set(team.nodes) for team in place(graph, config).teams} == {
        "actor": {"old_logp", "rollout_gap", "kl_in_reward", "advantage", "actor_train"},
        "critic": {"value", "critic_train"},
        "reference": {"ref_logp"},
        "rollout": {"rollout", "reward_submit", "reward"},
    }


def test_roles_that_the_graph_does_not_have_are_left_out():
    graph, config = load("grpo", {"train": ["actor", "rollout", "critic"], "frozen": ["reference"]})
    placement = place(graph, config)
    assert placement["train"].roles == (Role.ACTOR, Role.ROLLOUT)
    assert placement.of_role(Role.CRITIC) is None


def test_without_teams_all_roles_are_together():
    graph, config = load("ppo", {})
    placement = place(graph, config)
    assert not placement.separate
    assert placement.handovers == ()
    assert placement.teams[0].nodes == tuple(graph.order())
    assert together(config).teams[0].parallel == placement.teams[0].parallel == config.actor.parallel


def test_dynamic_sampling_stays_with_what_draws():
    graph, config = load("dapo", {"train": ["actor"], "draw": ["rollout"], "frozen": ["reference"]})
    with pytest.raises(
        ConfigError, match=r"requests more samples from 'rollout'(?s:.*)put rollout and actor into one team"
    ):
        place(graph, config)


def test_a_node_that_reads_nothing_of_its_samples_learns_of_them_by_nothing():
    def draws(c, samples):
        return samples

    def blind(c, samples):
        return samples

    p = Pipeline("p").add(stage(reads=["uid"], writes=["x"], role=Role.ROLLOUT, resamples=True)(draws))
    p.add(stage(reads=[], writes=["y"], kind=Kind.MODEL_INFERENCE, role=Role.REFERENCE)(blind))
    _, config = load("grpo", {"train": ["actor", "rollout"], "frozen": ["reference"]})
    with pytest.raises(ConfigError, match="'blind' uses the samples of 'draws' but reads none of their fields"):
        place(p.build(), config)
    _, together_ = load("grpo", {"train": ["actor", "rollout", "reference"]})
    assert place(p.build(), together_).handovers == ()


def test_a_team_has_one_layout():
    graph, config = load("ppo", {"train": ["actor", "critic", "rollout"], "frozen": ["reference"]})
    critic = config.critic.model_copy(update={"parallel": config.actor.parallel.model_copy(update={"pp": 2})})
    with pytest.raises(ConfigError, match=r"critic\.parallel: (?s:.*)are in the team 'train'"):
        place(graph, config.model_copy(update={"critic": critic}))


def test_workers_that_ask_servers_hold_no_model_to_split():
    graph, config = load("grpo", {"train": ["actor", "reference"], "draw": ["rollout"]})
    actor = config.actor.model_copy(update={"parallel": config.actor.parallel.model_copy(update={"tp": 2})})
    for engine, tp in (("embedded", 2), ("sglang", 1)):
        rollout = config.rollout.model_copy(update={"engine": engine})
        placement = place(graph, config.model_copy(update={"actor": actor, "rollout": rollout}))
        assert {team.name: team.parallel.tp for team in placement.teams} == {"train": 2, "draw": tp}


def test_what_asks_for_more_samples_walks_all_that_is_before_it():
    def stage(context, batch): ...

    def ask(context, batch, more, *, actor): ...

    p = Pipeline("case").add(stage, "draw", contract=Contract(role=Role.ROLLOUT, writes=("x",), resamples=True))
    p.add(stage, "look", contract=Contract(role=Role.REFERENCE, reads=("x",), writes=("y",)))
    more = Contract(role=Role.DYNAMIC_SAMPLING, reads=("x", "y"), resamples=True, refills=True)
    graph = p.add(ask, "more", contract=more).build()
    _, config = load("grpo", {"train": ["actor", "rollout"], "frozen": ["reference"]})
    with pytest.raises(
        ConfigError, match=r"requests more samples from 'look'(?s:.*)put reference and actor into one team"
    ):
        place(graph, config)


@pytest.mark.parametrize(
    ("teams", "cuts"),
    [
        ({}, {"all": (4, 6, 8)}),
        (
            {"train": ["actor", "rollout"], "value": ["critic"], "frozen": ["reference"]},
            {"train": (4, 8), "value": (6,)},
        ),
        ({"train": ["actor"], "value": ["critic", "rollout", "reference"]}, {"train": (4, 8), "value": (6,)}),
    ],
)
def test_a_team_knows_where_the_mini_batches_of_what_it_trains_begin(teams, cuts):
    sizes = ("data.batch_size=14", "actor.mini_batch_size=4", "critic.mini_batch_size=6")
    graph, config = load("ppo", teams, *sizes)  # what does not divide is in the last mini-batch
    found = {team.name: team.cuts for team in place(graph, config).teams}
    assert found == dict.fromkeys(found, ()) | cuts


@stage(reads=["response_ids", "advantages"], writes=[], kind=Kind.MODEL_TRAIN, role=Role("judge"))
def judges(c, samples, *, judge):
    return samples


@pytest.mark.parametrize(
    "teams",
    [
        "placement.teams={draw: {roles: [rollout], devices: 1}, train: {roles: [actor], devices: 1}}",
        "placement.auto=even",
    ],
)
def test_a_further_model_is_in_the_actor_s_team_and_listed_in_no_recipe(teams):
    own = "models={judge: {train: true}}"
    config = load_config("grpo_quickstart", [teams, own, "algorithm.kl.use=loss"], components=COMPONENTS)
    if config.placement.teams:
        config = config.model_copy(update={"algorithm": RunConfig(name="x").algorithm})
    graph = build_task_graph(config)
    graph = TaskGraph("judged", "", [*(graph[id] for id in graph.order()), Node("judges", judges)])
    placement = place(graph, config)
    assert placement.separate
    assert Role("judge") in placement.home(Role.ACTOR).roles
    assert placement.of_node("judges") is placement.home(Role.ACTOR)
    assert "judge" not in str(settled(config, placement).placement)


def test_a_further_model_may_have_a_team_of_its_own():
    teams = "placement.teams={all: {roles: [actor, rollout], devices: 1}, own: {roles: [proposer], devices: 2}}"
    config = load_config("grpo_self_play_quickstart", [teams, "cluster.nproc=3", "models.proposer.parallel.tp=2"])
    placement = place(build_task_graph(config), config)
    assert (placement["own"].nodes, placement["own"].parallel.tp) == (("proposer_actor_train",), 2)
    assert not placement["own"].may_restart, "it has trained weights"
    assert {"policy", "response_ids"} <= {*placement.taken("own")[0].fields}


def test_a_role_that_is_no_model_of_the_recipe_is_refused():
    teams = "placement.teams={all: {roles: [actor, rollout], devices: 1}, own: {roles: [propser], devices: 1}}"
    config = load_config("grpo_self_play_quickstart", [teams, "cluster.nproc=2"])
    with pytest.raises(ConfigError, match="there is no role propser") as error:
        place(build_task_graph(config), config)
    assert (error.value.where, error.value.fix) == ("placement.teams.own.roles", "did you mean proposer?")
