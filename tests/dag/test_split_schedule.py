"""Where graphs are cut, and who gets how many devices."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megarl.dag.pipeline import Pipeline
from megarl.dag.schedule import Device, apportion, place, teams_of
from megarl.dag.split import split
from megarl.dag.stage import Contract, Role


def same(worker, batch):
    return batch


def build(**deps):
    p = Pipeline("p")
    for id, before in deps.items():
        p.add(same, id, deps=before.split())
    return p.build()


def ppo():
    roles = {
        "rollout": ("", Role.ROLLOUT),
        "reward": ("rollout", Role.REWARD),
        "value": ("rollout", Role.CRITIC),
        "old_logp": ("rollout", Role.ACTOR),
        "ref_logp": ("rollout", Role.REFERENCE),
        "advantage": ("reward value old_logp ref_logp", Role.ADVANTAGE),
        "actor_train": ("advantage", Role.ACTOR),
        "critic_train": ("actor_train", Role.CRITIC),
    }
    p = Pipeline("ppo")
    for id, (deps, role) in roles.items():
        p.add(same, id, deps=deps.split(), contract=Contract(role=role))
    return p.build()


def test_chain_is_one_segment():
    assert [s.nodes for s in split(build(a="", b="a", c="b"))] == [("a", "b", "c")]


def test_cut_at_a_fork_to_distinct_exits():
    segments = split(build(a="", b="a", c="b", d="b", e="d"))
    assert [s.nodes for s in segments] == [("a", "b"), ("c",), ("d", "e")]


def test_cut_where_parallel_paths_meet_again():
    g = build(a="", b="a", c="b", d="a", e="c d", f="e")
    segments = split(g)
    assert [s.nodes for s in segments] == [("a",), ("b", "c"), ("d",), ("e", "f")]
    assert segments[3].after == ("b", "d")


def test_shortcut_is_no_fork():
    assert [s.nodes for s in split(build(a="", b="a", c="a b"))] == [("a", "b", "c")]


@given(st.integers(1, 8).flatmap(lambda n: st.lists(st.sets(st.integers(0, n - 1)), min_size=n, max_size=n)))
def test_segments_partition_any_graph(deps):
    g = build(**{f"n{i}": " ".join(f"n{j}" for j in before if j < i) for i, before in enumerate(deps)})
    segments = split(g)
    assert sorted(id for s in segments for id in s.nodes) == sorted(g.nodes)
    for s in segments:
        assert all(b in g.children(a) for a, b in itertools.pairwise(s.nodes))


@given(st.integers(0, 40), st.lists(st.floats(0.1, 100), min_size=1, max_size=6))
def test_apportion_gives_everything_away_and_at_least_one_each(extra, weights):
    devices = len(weights) + extra
    shares = apportion(devices, weights)
    assert sum(shares) == devices
    assert min(shares) >= 1
    order = sorted(range(len(weights)), key=lambda i: weights[i])
    assert all(shares[a] <= shares[b] for a, b in itertools.pairwise(order) if weights[a] < weights[b])


def test_too_few_devices_says_how_many_are_missing():
    with pytest.raises(ValueError, match="3 teams need a device each, 1 given: 2 missing"):
        apportion(1, [1, 1, 1])


def test_nodes_of_one_model_share_devices_and_light_nodes_follow_their_data():
    teams = teams_of(ppo())
    assert ["rollout", "reward"] in teams
    assert ["value", "critic_train"] in teams
    assert ["ref_logp"] in teams
    actor = next(team for team in teams if "actor_train" in team)
    assert "old_logp" in actor


def test_together_joins_an_actor_and_the_rollout_on_its_weights():
    teams = teams_of(ppo(), together=[("rollout", "actor_train")])
    assert any({"rollout", "old_logp", "actor_train"} <= set(team) for team in teams)


def test_colocated_roles_have_all_devices():
    (team,) = place(ppo(), [Device(r) for r in range(4)])
    assert team.ranks == (0, 1, 2, 3)


def test_param_aware_gives_large_models_more():
    sizes = {"rollout": 30.0, "old_logp": 30.0, "actor_train": 30.0, "value": 10.0, "ref_logp": 10.0}
    teams = place(ppo(), [Device(r) for r in range(8)], colocate=False, strategy="param_aware", parameters=sizes)
    share = {id: len(team.ranks) for team in teams for id in team.nodes}
    assert share["actor_train"] == share["rollout"] == 3
    assert share["value"] == share["ref_logp"] == 1
    assert sorted(r for team in teams for r in team.ranks) == list(range(8))


def test_param_aware_without_a_size_is_an_error():
    with pytest.raises(ValueError, match="needs the parameters of one of these nodes"):
        place(ppo(), [Device(r) for r in range(8)], colocate=False, strategy="param_aware")


def test_a_team_stays_inside_a_machine_when_it_fits():
    devices = [Device(r, machine=r // 4) for r in range(16)]
    teams = place(ppo(), devices, colocate=False)
    for team in teams:
        assert len({r // 4 for r in team.ranks}) == 1


def test_models_that_never_overlap_in_a_chain_share_devices():
    p = Pipeline("chain").add(same, "draw", contract=Contract(role=Role.ROLLOUT))
    g = p.add(same, "score", deps=["draw"], contract=Contract(role=Role.REFERENCE)).build()
    assert teams_of(g) == [["draw", "score"]]
