"""Which deaths start a team again, and what its launcher does then; without processes."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from megarl.artifacts.records import write_record
from megarl.config.run import ClusterConfig, RunConfig
from megarl.dag.placement import TeamPlan
from megarl.launchers.common import Job
from megarl.launchers.output import OutputLog
from megarl.launchers.ray import RayWorkers
from megarl.launchers.restarts import Restarts
from megarl.launchers.supervise import supervise
from megarl.runtime.health import Heartbeat, RankFailure, Watch, read_beat, read_errors, write_error
from megarl.tracking.close import read_restarts
from tests.launchers.drive import teams

WHY = "worker 2 (reference, rank 0) died on x"
KILLED = RankFailure(2, "step/ref_logp", 5, "", "died", "", 0.0, 1)


class Told:
    """Workers of an actor's team 0, 1, a reference's 2, 3 and a critic's 4."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, str, int]] = []

    def end_team(self, team: TeamPlan) -> None:
        self.calls.append(("end", team.name, 0))

    def restart_team(self, team: TeamPlan, number: int) -> int | None:
        self.calls.append(("restart", team.name, number))
        return 4


def restarts(run_dir: Path, *, limit: int = 3) -> tuple[Restarts, Told]:
    config = RunConfig(name="x", cluster=ClusterConfig(nproc=5), placement={"restarts": limit})
    job = Job("m:f", config, run_dir, OutputLog(run_dir / "log.txt"), teams(2, 2, 1))
    workers = Told()
    return Restarts(workers, job, Watch(run_dir, range(5), 60, 60)), workers  # type: ignore[arg-type]


def test_a_killed_worker_brings_its_team_back_and_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    Heartbeat(tmp_path, 2)
    again, workers = restarts(tmp_path)
    write_error(tmp_path, RankFailure(3, "step", 5, "RuntimeError", "Connection closed by peer", "", 1.0, 1))
    assert again.after_death(KILLED, WHY, {2: -9, 3: 1})
    assert workers.calls == [("end", "reference", 0), ("restart", "reference", 1)]
    assert read_errors(tmp_path) == {}
    assert (tmp_path / "errors" / "restart_1_rank_3.json").is_file()
    assert read_beat(tmp_path, 2) is None, "it has not reported in yet"
    first, second = capsys.readouterr().err.splitlines()
    assert first == f"megarl: {WHY}: team 'reference' starts again (1 of 3)"
    assert second.startswith("megarl: team 'reference' goes on after step 4, ")
    (noted,) = read_restarts(tmp_path)
    assert (noted["why"], noted["start"]) == (WHY, "team 'reference' goes on after step 4")


@pytest.mark.parametrize(
    ("failure", "ended"),
    [
        (replace(KILLED, type="RuntimeError", message="loss is NaN"), {2: 1}),
        (replace(KILLED, type="ConfigError", message="out of memory", user_error=True), {2: 2}),
        (replace(KILLED, rank=0), {0: -9}),
        (replace(KILLED, rank=4), {4: -9}),
        (KILLED, {2: -9, 1: 1}),
    ],
    ids=["exception", "user", "actor", "critic", "actor too"],
)
def test_what_would_come_again_or_cannot_be_made_again_ends_the_run(
    tmp_path: Path, failure: RankFailure, ended: dict[int, int]
) -> None:
    again, workers = restarts(tmp_path)
    assert not again.after_death(failure, WHY, ended)
    assert workers.calls == []


def test_want_of_memory_and_hanging_are_deaths(tmp_path: Path) -> None:
    again, workers = restarts(tmp_path)
    assert again.after_death(replace(KILLED, type="OutOfMemoryError", message="CUDA out of memory"), WHY, {2: 1})
    assert again.after_hang([2, 3], "ranks 2, 3 made no progress")
    assert not again.after_hang([1, 3], "ranks 1, 3 made no progress")
    assert not again.after_hang([], "rank 2 did not report in")
    assert [number for what, _, number in workers.calls if what == "restart"] == [1, 2]


def test_after_as_many_restarts_as_it_may_the_run_ends_and_says_so(tmp_path: Path) -> None:
    again, _ = restarts(tmp_path, limit=2)
    assert again.spent(2) == []
    assert [again.after_death(KILLED, WHY, {2: -9}) for _ in range(3)] == [True, True, False]
    assert again.spent() == []
    assert again.spent(3) == ["  its team 'reference' has started again 2 times before (placement.restarts=2)"]
    assert again.spent(0) == []


def test_none_starts_again_without_a_budget(tmp_path: Path) -> None:
    again, _ = restarts(tmp_path, limit=0)
    assert not again.after_death(KILLED, WHY, {2: -9})
    assert again.spent(2) == []


def test_a_worker_gets_the_place_of_the_one_before_it_or_one_on_its_machine() -> None:
    workers = RayWorkers.__new__(RayWorkers)
    workers._places = [("a", ["0"]), ("a", ["1"]), ("b", ["0"]), ("b", ["1"])]
    workers._actors = ["old", "b1", "a2", "b0"]
    workers._reassign_places(range(1, 4), [("b", ["1"]), ("a", ["2"]), ("b", ["0"])])
    assert workers._actors == ["old", "a2", "b0", "b1"]
    assert workers._places == [("a", ["0"]), ("a", ["2"]), ("b", ["0"]), ("b", ["1"])]


@pytest.mark.parametrize("status", ["stopped", "running"])
def test_teams_do_not_outlive_an_actor_that_has_saved_before_the_limit_of_the_job(tmp_path: Path, status: str) -> None:
    looks = [{}, {0: 0}, {0: 0, 1: 0}, {0: 0, 1: 0, 2: 1}]
    write_record(tmp_path / "run.json", {"status": status})
    job = Job("m:f", RunConfig(name="x"), tmp_path, OutputLog(tmp_path / "log.txt"), teams(2, 2, 1))
    workers = SimpleNamespace(poll=lambda: looks.pop(0) if len(looks) > 1 else looks[0], ranks=lambda: list(range(5)))
    workers.cause = lambda rank: None
    end = supervise(workers, job)  # type: ignore[arg-type]
    assert end.exit_code == (0 if status == "stopped" else 1)
