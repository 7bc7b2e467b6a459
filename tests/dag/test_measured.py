"""Workers are shared out by what an earlier run has measured."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from megarl.dag.placement import place, settled
from megarl.recipes.build import build_task_graph
from megarl.system.errors import ConfigError
from tests.dag.test_shares import shares_of, small

MEASURED = "placement.auto=measured"
#: Seconds of a step: 8 of the actor with the rollout, 4 of the critic, 2 of the reference.
SECONDS = {"rollout": 5, "old_logp": 1, "actor_train": 2, "value": 1, "critic_train": 3, "ref_logp": 2}


def write_run(folder: Path, seconds: dict[str, float], teams: dict[str, Any] | None = None, workers: int = 3) -> str:
    """The record of a run of five equal steps; nodes that `seconds` does not name took no time."""
    folder.mkdir(exist_ok=True)
    every = {f"timing_s/{id}": seconds.get(id, 0) for id in build_task_graph(small()).order()}
    lines = [{"step": step, "stage": "train", **every} for step in range(1, 6)]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    config = {"cluster": {"nproc": workers}, "placement": {"teams": teams or {}}}
    (folder / "run.json").write_text(json.dumps({"config": config}))
    return f"placement.measured={folder}"


def test_shares_follow_the_seconds_of_one_team(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", SECONDS)
    assert shares_of(MEASURED, run, "cluster.nproc=14") == {"actor": 8, "critic": 4, "reference": 2}
    assert shares_of(MEASURED, run, "cluster.nproc=3") == {"actor": 1, "critic": 1, "reference": 1}


def test_seconds_count_as_often_as_there_were_workers(tmp_path: Path) -> None:
    """The critic took 4 s on 2 workers and the reference 2 s on 4: as much work."""
    teams = {
        "train": {"roles": ["actor", "rollout"], "devices": 1},
        "value": {"roles": ["critic"], "devices": 2},
        "frozen": {"roles": ["reference"], "devices": 4},
    }
    run = write_run(tmp_path / "run", SECONDS, teams, 7)
    assert shares_of(MEASURED, run, "cluster.nproc=12") == {"actor": 4, "critic": 4, "reference": 4}


def test_what_servers_do_on_devices_of_their_own_takes_no_workers(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", SECONDS)
    served = ("rollout.engine=sglang", "cluster.nproc=9")
    assert shares_of(MEASURED, run, *served) == {"actor": 3, "critic": 4, "reference": 2}
    shared = shares_of(MEASURED, run, "cluster.nproc=14", served[0], "rollout.sglang.colocated=true")
    assert shared == {"actor": 8, "critic": 4, "reference": 2}


def test_a_team_that_took_no_time_has_a_worker(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", {"rollout": 1})
    assert shares_of(MEASURED, run, "cluster.nproc=4") == {"actor": 2, "critic": 1, "reference": 1}


def test_a_run_that_cannot_be_gone_by_is_refused(tmp_path: Path) -> None:
    with pytest.raises(
        ConfigError,
        match=r"placement\.measured: (?s:.*)but none is set(?s:.*)placement\.auto=even",
    ):
        shares_of(MEASURED, "cluster.nproc=9")
    with pytest.raises(ConfigError, match=r"placement\.measured: (?s:.*)gone/metrics\.jsonl(?s:.*)run\.json"):
        shares_of(MEASURED, f"placement.measured={tmp_path}/gone", "cluster.nproc=9")
    run = write_run(tmp_path / "run", SECONDS)
    file = tmp_path / "run" / "metrics.jsonl"
    file.write_text(re.sub(r', "timing_s/(value|ref_logp)": \d', "", file.read_text()))
    with pytest.raises(
        ConfigError, match=r"placement\.measured: the earlier run has no measurements of the nodes (value, ref|ref_log)"
    ):
        shares_of(MEASURED, run, "cluster.nproc=9")


def test_a_run_goes_by_the_teams_that_were_made_at_its_start(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", SECONDS)
    config = small(MEASURED, run, "cluster.nproc=14")
    graph = build_task_graph(config)
    placement = place(graph, config)

    given = settled(config, placement)

    assert {name: team.devices for name, team in given.placement.teams.items()} == {
        "actor": 8,
        "critic": 4,
        "reference": 2,
    }
    assert (given.placement.auto, given.placement.measured) == (None, None)
    assert place(graph, given) == placement
    assert settled(given, placement) is given
