"""Which team a worker is in."""

from __future__ import annotations

import pytest

from megarl.config.run import ClusterConfig, RunConfig
from megarl.dag.placement import MODEL_ROLES, place
from megarl.dag.stage import Role
from megarl.disaggregated.loop import join_run
from megarl.recipes.build import build_task_graph
from megarl.runtime.rank_state import TeamContext
from megarl.system.errors import ConfigError
from megarl.system.processes import TEAM


def config(**teams: list[str]) -> RunConfig:
    placed = {name: {"roles": roles, "devices": 1} for name, roles in teams.items()}
    settings = {"algorithm": {"kl": {"use": "loss"}}, "placement": {"teams": placed}}
    return RunConfig(name="run", cluster=ClusterConfig(nproc=max(1, len(teams))), **settings)


def test_without_placement_the_only_team_holds_what_the_graph_works_with_and_leads():
    placement = place(build_task_graph(config()), config())
    team = TeamContext(placement.teams[0], placement)
    assert [role for role in MODEL_ROLES if team.holds(role)] == [Role.ACTOR, Role.REFERENCE, Role.ROLLOUT]
    assert (team.leads, team.others, team.buffer) == (True, [], None)


def test_work_without_a_graph_has_one_team_whatever_the_placement():
    team = TeamContext.of_all(config(train=["actor", "rollout"], frozen=["reference"]))
    assert team.leads
    assert team.holds(Role.ROLLOUT)
    assert not team.holds(Role.REFERENCE)
    assert team.others == []


def test_a_launcher_that_knows_no_teams_is_refused(monkeypatch):
    monkeypatch.delenv(TEAM, raising=False)
    settings = config(train=["actor", "rollout"], frozen=["reference"])
    with pytest.raises(ConfigError, match=r"placement: (?s:.*)the launcher started only one(?s:.*)train 1, frozen 1"):
        join_run(settings, build_task_graph(settings))
