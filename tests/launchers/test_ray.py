"""The Ray launcher, on a cluster that runs already and on none."""

from __future__ import annotations

import functools
import json
import os
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from megarl.config.run import RunConfig
from megarl.disaggregated.buffer import size as buffer_size
from megarl.disaggregated.buffer.size import LEAST
from megarl.launchers import ray as ray_launcher
from megarl.launchers import ray_folder, ray_health
from megarl.launchers.common import run_workers
from megarl.launchers.ray_health import ClusterRay, within
from megarl.system.errors import ConfigError, WorkerError
from megarl.system.processes import free_port
from tests.forked import Forked, become
from tests.launchers import test_launchers as every
from tests.ray_forks.clusters import cluster
from tests.ray_forks.launcher import FORKER, accept
from tests.runtime import harness
from tests.runtime.harness import of_training

KILLS = pytest.mark.campaign("kills")
pytestmark = [pytest.mark.procs, pytest.mark.wide]  # Ray ends itself where its own processes start slowly


@pytest.fixture(scope="module", autouse=True)
def ray_cluster() -> Iterator[None]:
    """One Ray of two nodes for the whole module, found by RAY_ADDRESS; one per test would double the time."""
    with cluster({"num_cpus": 1, "_system_config": ray_launcher.OWN_RAY}, {"num_cpus": 1}):
        yield


def test_ranks_meet_and_the_run_folder_tells_what_happened(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    every.test_ranks_meet_and_the_run_folder_tells_what_happened("ray", False, tmp_path, monkeypatch)


@pytest.mark.parametrize(
    "same",
    [
        # A killed rank: below, with a new start. An exception: of a team, below.
        pytest.param(every.test_an_exception_is_shown_with_rank_phase_and_step, marks=KILLS),
        pytest.param(every.test_a_killed_rank_is_the_first_error_although_its_peer_fails_too, marks=KILLS),
        pytest.param(
            functools.partial(
                every.test_a_rank_that_ends_with_0_before_its_work_is_done_has_failed, entry="rank_1_leaves"
            ),
            marks=KILLS,
        ),
        every.test_a_rank_without_progress_is_reported_with_every_phase_and_stack,
        every.test_a_mistake_of_the_user_ends_with_2_and_no_traceback,
    ],
)
def test_a_failure_is_told_as_by_every_launcher(same: Callable[[str, Path], None], tmp_path: Path) -> None:
    same("ray", tmp_path)


@KILLS  # as a run whose Ray loses a part, and as a team whose process dies, below
def test_a_run_that_lost_a_rank_is_started_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    every.test_a_run_that_lost_a_rank_is_started_again("ray", tmp_path, monkeypatch)


@KILLS  # as a run whose Ray loses a part, below
def test_teams_in_a_ray_of_their_own_are_started_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RESTARTS", "1")
    result = every.launch("local", "rank_1_is_killed_once", tmp_path, "1+1")

    assert result.code == 0, result.err
    assert "starts again (1 of 1; " in result.err
    assert "worker 1 (reference, rank 0) on " in result.err
    assert "[worker 1 (reference, rank 0)] worker 1 lives" in result.log.splitlines()


@pytest.mark.parametrize("number", [signal.SIGKILL, pytest.param(signal.SIGTERM, marks=KILLS)])
def test_workers_go_with_their_launcher(number: int, tmp_path: Path) -> None:
    every.test_workers_go_with_their_launcher("ray", number, tmp_path)


@pytest.mark.campaign("teams")  # as of teams, below, and of two nodes of a batch job, test_slurm_real.py
def test_a_run_has_the_metrics_of_one_of_the_local_launcher(tmp_path: Path) -> None:
    recipe = harness.write_recipe(tmp_path)
    local = harness.run(recipe, tmp_path / "local")
    assert harness.run(recipe, tmp_path / "ray", launcher="ray") == local


def test_teams_on_two_nodes_have_the_metrics_of_those_without_ray(tmp_path: Path) -> None:
    recipe = harness.write_recipe(tmp_path)
    more = ["sft.steps=0", "trainer.steps=2", "trainer.export_hf=false", "cluster.nproc=2"]
    for name, roles in (("train", ["actor", "rollout"]), ("frozen", ["reference"])):
        more.append(f"placement.teams.{name}={{roles: {roles}, devices: 1}}")

    here = of_training(harness.train(recipe, tmp_path / "here", *more))
    assert here[2]["actor/kl_loss"] > 0
    there = harness.run(recipe, tmp_path / "there", *more, "cluster.nnodes=2", launcher="ray")
    assert of_training(there) == here


def test_a_signal_to_all_processes_of_a_job_with_its_own_ray_leaves_time_to_save(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("RAY_ADDRESS")
    every.test_a_signal_to_all_processes_of_a_job_leaves_time_to_save("ray", signal.SIGTERM, tmp_path)


@pytest.mark.parametrize("scheme", ["", "ray://"])
def test_a_ray_cluster_that_is_gone_is_named_at_once(
    scheme: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RAY_ADDRESS", f"{scheme}127.0.0.1:{free_port()}")
    with pytest.raises(ConfigError, match="RAY_ADDRESS: no Ray cluster replies at this address"):
        run_workers("ray", "m:f", RunConfig(name="x"), tmp_path)


@pytest.mark.parametrize(
    ("free", "size", "warns"),
    [(None, 9 << 30, False), (9 << 30, 9 << 30, False), (4 << 30, 4 << 30, True), (1 << 20, LEAST, True)],
)
@pytest.mark.parametrize("spill", [False, True])
def test_a_ray_of_our_own_asks_for_no_more_shared_memory_than_there_is(
    spill: bool,
    free: int | None,
    size: int,
    warns: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Without spilling a run that needs more is refused."""

    class NoRay(Exception):
        pass

    def init(**settings: object) -> None:
        assert settings["object_store_memory"] == size
        assert settings["_system_config"] == ray_launcher.OWN_RAY | ({} if spill else ray_launcher.NO_SPILLING)
        raise NoRay("as far as this test goes")

    monkeypatch.delenv("RAY_ADDRESS")
    for module in (ray_launcher, buffer_size):
        monkeypatch.setattr(module, "object_store_bytes", lambda config, placement: 9 << 30)
    monkeypatch.setattr(ray_launcher, "shared_memory_free", lambda: free)
    monkeypatch.setattr(ray_launcher, "_restrict_clients", lambda: None)
    monkeypatch.setattr("ray.init", init)
    config = RunConfig.model_validate({"name": "x", "placement": {"spill": spill}})
    if warns and not spill:
        with pytest.raises(ConfigError, match=r"data\.batch_size: (?s:.*)9\.7 GB(?s:.*)placement\.spill=true"):
            run_workers("ray", "m:f", config, tmp_path)
        return
    run_workers("ray", "m:f", config, tmp_path)
    said = capsys.readouterr().err
    assert "as far as this test goes" in said
    assert ("may need 9.7 GB of shared memory, but /dev/shm has" in said) == warns


@pytest.mark.parametrize(
    ("spill", "error"),
    [
        (False, "OutOfDiskError"),
        pytest.param(True, "None", marks=pytest.mark.campaign("memory")),
    ],  # True: Ray's default
)
def test_a_full_store_of_a_ray_of_our_own_takes_files_only_if_it_may(
    spill: bool, error: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("RAY_ADDRESS")
    out, err = files = [tmp_path / stream for stream in ("out", "err")]
    for file in files:
        file.touch()
    Forked(_fill_store, (spill, every.environment(), *map(str, files))).wait(every.DEADLINE_S)
    said, errors = out.read_text(), err.read_text()
    assert said == f"ended with {error}\n", errors  # nothing else: steps are read from there
    assert "starting Ray" in errors


def _fill_store(spill: bool, environment: dict[str, str], output: str, errors: str) -> None:
    """Put more into the object store of a Ray than it holds, and print how that ends."""
    become(environment, output, errors)
    accept()
    settings = {"placement": {"spill": spill}, "tracking": {"console": "json"}}
    ray_launcher._connect(None, RunConfig.model_validate({"name": "x", **settings}), 100 << 20, 200)
    import numpy as np
    import ray

    error, held = None, []
    try:
        held = [ray.put(np.zeros(30 << 20, np.uint8)) for _ in range(5)]
    except ray.exceptions.RayError as caught:
        error = type(caught).__name__
    print("ended with", error)
    del held
    ray.shutdown()
    sys.exit()


def test_processes_that_ray_starts_too_late_are_told_of_in_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    import ray

    def late(self: object) -> None:
        raise ray.exceptions.GetTimeoutError("Get timed out: some object(s) not ready.")

    monkeypatch.setattr(ray_launcher, "_connect", lambda *arguments, **settings: None)
    monkeypatch.setattr(ray_launcher.RayWorkers, "_reserve", lambda self: None)
    monkeypatch.setattr(ray_launcher.RayWorkers, "_number", late)
    assert run_workers("ray", "m:f", RunConfig(name="x"), tmp_path) == 1
    said = capsys.readouterr().err
    assert "megarl: processes that Ray started did not reply within cluster.start_timeout_s = " in said
    assert "Traceback" not in said


def test_what_waits_inside_ray_ends_at_the_deadline() -> None:
    with pytest.raises(WorkerError, match="Ray at x is late"):
        within(0.1, lambda: time.sleep(30), "Ray at x is late")
    with pytest.raises(ZeroDivisionError):
        within(60, lambda: 1 // 0, "Ray at x is late")


@pytest.mark.parametrize(
    ("entry", "part"),
    [
        ("ray_loses_its_control_store", "control store (gcs_server"),
        pytest.param("ray_loses_its_node_manager", "node manager (raylet", marks=KILLS),
    ],
)
def test_a_part_of_ray_that_dies_is_named_and_the_run_starts_again_in_a_new_ray(
    entry: str, part: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RESTARTS", "1")
    monkeypatch.delenv("RAY_ADDRESS")
    if entry == "ray_loses_its_node_manager":  # a worker whose node manager is gone is found by its environment
        monkeypatch.delenv(FORKER, raising=False)
    result = every.launch("ray", entry, tmp_path, "1")
    assert result.code == 0, result.err
    assert result.err.count(f"megarl: Ray's {part}, process ") == 1, result.err
    assert "was killed by signal 9 (SIGKILL), and no worker can continue without it\n  fix: " in result.err
    assert "starts again (1 of 1; there is no checkpoint yet: from the beginning)" in result.err
    assert "[rank 0] worker 0 lives" in result.log.splitlines()
    assert not (tmp_path / "token").exists()
    ended = time.monotonic() + every.DEADLINE_S
    while (left := [one for one in psutil.process_iter() if names_run(one, tmp_path)]) and time.monotonic() < ended:
        time.sleep(0.1)
    assert not left


def names_run(process: psutil.Process, run_dir: Path) -> bool:
    try:
        return str(run_dir) in " ".join(process.cmdline()) or process.cwd() == str(run_dir)
    except psutil.Error:
        return False


def test_a_cluster_whose_control_store_is_gone_for_a_while_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr(ray_health.time, "monotonic", lambda: now[0])
    with socket.create_server(("127.0.0.1", 0)) as listener:
        address = "{}:{}".format(*listener.getsockname())
        cluster = ClusterRay(address)
        now[0] = 20
        assert cluster.lost() is None
    for now[0] in (26, 40, 49):  # it may start again
        assert cluster.lost() is None
    now[0] = 55
    assert f"Ray's control store at {address} has not answered for 35 s" in (cluster.lost() or "")
    with socket.create_server(("127.0.0.1", int(address.rpartition(":")[2]))):
        now[0] = 61
        assert cluster.lost() is None


def test_the_local_launcher_runs_several_teams_in_a_ray_of_its_own(tmp_path: Path) -> None:
    result = every.launch("local", "meet_in_teams", tmp_path, "2+1")  # three workers, also on two cores

    assert result.code == 0, result.err
    seen = [json.loads((tmp_path / f"seen_{worker}.json").read_text()) for worker in range(3)]
    assert [(s["MEGARL_TEAM"], s["MEGARL_WORKER"]) for s in seen] == [
        ("actor", "0"),
        ("actor", "1"),
        ("reference", "2"),
    ]
    assert [(s["RANK"], s["LOCAL_RANK"]) for s in seen] == [("0", "0"), ("1", "1"), ("0", "0")]
    assert [(s["WORLD_SIZE"], s["LOCAL_WORLD_SIZE"], s["size"]) for s in seen] == [("2", "2", 2)] * 2 + [("1", "1", 1)]
    assert [s["sum"] for s in seen] == [1, 1, 2]
    assert [s["heard"] for s in seen] == [["0", "1", "2"]] * 3
    assert [s["MASTER_ADDR"] for s in seen] == ["127.0.0.1"] * 3
    assert seen[0]["MASTER_PORT"] == seen[1]["MASTER_PORT"] != seen[2]["MASTER_PORT"]
    assert os.environ["RAY_ADDRESS"] not in {s["ray"] for s in seen}
    assert {address for s in seen for address in s["listens"]} == {"127.0.0.1"}
    assert {s["ray folder"]["mode"] for s in seen} == {"0o40700"}
    assert len(f"{seen[0]['ray folder']['session']}/sockets/plasma_store") <= len(ray_folder._SOCKET)
    assert "hello from 0" in result.out
    assert "hello from 1" not in result.out
    assert "[worker 1 (actor, rank 1)] hello from 1" in result.log
    assert "[worker 2 (reference, rank 0)] hello from 2" in result.log


def test_an_exception_in_one_team_ends_all_and_is_told_once(tmp_path: Path) -> None:
    result = every.launch("ray", "reference_raises", tmp_path, "2+1")

    assert result.code == 1
    how = "megarl: worker 2 (reference, rank 0) failed in phase score at step 4: RuntimeError: loss is NaN"
    assert [line for line in result.err.splitlines() if line.startswith("megarl:")] == [how]
    assert "  worker 1 (actor, rank 1): in phase train at step 4" in result.err


def test_a_team_whose_process_dies_starts_again_as_often_as_it_may(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TEAM_RESTARTS", "1")
    result = every.launch("ray", "reference_is_killed", tmp_path, "2+1")

    assert result.code == 1
    said = [line for line in result.err.splitlines() if line.startswith("megarl:")]
    how = "died (killed by a signal, by the out-of-memory killer, or crashed)"
    assert len(said) == 3
    assert said[0].startswith("megarl: worker 2 (reference, rank 0) on ")
    assert said[0].endswith(f" {how} in phase score at step 4: team 'reference' starts again (1 of 1)")
    assert said[1].startswith("megarl: team 'reference' goes on with the first step, ")
    assert said[2] == f"megarl: worker 2 (reference, rank 0) {how} in phase score at step 4"
    assert "  its team 'reference' has started again 1 time before (placement.restarts=1)" in result.err
    assert "  worker 1 (actor, rank 1): in phase train at step 4" in result.err
    assert all(line in result.log for line in said)
