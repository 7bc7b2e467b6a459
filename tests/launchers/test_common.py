"""Run folders, worker environments, the log, and the choice of the first error."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import re
import signal
import time
from pathlib import Path

import pytest

from megarl.artifacts.lock import ATTEMPT
from megarl.config.model import ParallelConfig
from megarl.config.rollout import RolloutConfig
from megarl.config.run import ClusterConfig, RunConfig, TrackingConfig
from megarl.config.sglang import SGLangConfig
from megarl.dag.placement import Placement, TeamPlan
from megarl.launchers import common, supervise
from megarl.launchers.common import Job, layout_environment, make_run_dir, process_environment, run_workers
from megarl.launchers.output import OutputLog
from megarl.runtime.health import RankFailure, write_error
from megarl.system.errors import ConfigError
from megarl.system.processes import Stopped


def config(tmp_path: Path | None = None, **cluster: object) -> RunConfig:
    tracking = TrackingConfig(dir=str(tmp_path or "runs"))
    return RunConfig(name="my run", tracking=tracking, cluster=ClusterConfig(**cluster))


def test_every_run_gets_a_folder_of_its_own(tmp_path: Path) -> None:
    first, second = make_run_dir(config(tmp_path)), make_run_dir(config(tmp_path))
    assert first != second
    assert first.parent == second.parent == tmp_path / "my-run"


@pytest.mark.parametrize(("job", "ending"), [("train", ""), ("sft", ""), ("eval", "-eval"), ("generate", "-generate")])
def test_folders_without_a_model_show_their_command(tmp_path: Path, job: str, ending: str) -> None:
    first, second = (make_run_dir(config(tmp_path), job=job).name for _ in range(2))
    assert re.fullmatch(rf"\d{{8}}-\d{{6}}{ending}", first)
    assert first < second


def test_a_named_run_folder_is_continued(tmp_path: Path) -> None:
    (tmp_path / "there").mkdir()
    (tmp_path / "there" / "metrics.jsonl").write_text("{}")
    assert make_run_dir(config(tmp_path), tmp_path / "there") == tmp_path / "there"
    assert (tmp_path / "there" / "metrics.jsonl").exists()


@pytest.mark.parametrize("name", ["a_file", "a_file/below"])
def test_a_file_is_no_run_folder(tmp_path: Path, name: str) -> None:
    (tmp_path / "a_file").touch()
    with pytest.raises(ConfigError, match=r"--run-dir: this is a file(?s:.*)a_file'"):
        make_run_dir(config(tmp_path), tmp_path / name)


def test_a_full_disk_is_found_before_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(common.tempfile, "TemporaryFile", lambda dir: Path("/dev/full").open("wb"))  # noqa: SIM115
    with pytest.raises(
        ConfigError, match=r"^tracking.dir: (?s:.*)No space left on device(?s:.*)free at least 1 MB there"
    ):
        make_run_dir(config(tmp_path))
    with pytest.raises(ConfigError, match=r"^RECIPE: (?s:.*)name another folder with --run-dir, on another disk"):
        make_run_dir(config(tmp_path), job="eval", inside=tmp_path)


def test_cores_are_shared_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr(common, "available_cores", lambda: 8)
    assert process_environment(config(), workers_here=3)["OMP_NUM_THREADS"] == "2"
    assert process_environment(config(), workers_here=16)["OMP_NUM_THREADS"] == "1"


@pytest.mark.parametrize(
    ("threads", "workers", "gpu", "warns"),
    [("2", 4, False, False), ("2", 5, False, True), ("3,2", 3, False, True), ("", 9, False, True), ("2", 5, True, 0)],
)
def test_more_threads_than_cores_are_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, threads: str, workers: int, gpu: bool, warns: bool
) -> None:
    monkeypatch.setattr(common, "available_cores", lambda: 8)
    monkeypatch.setattr(common, "has_nvidia_device", lambda: gpu)
    log = OutputLog(tmp_path / "log.txt")
    common.warn_of_few_cores(Job("m:f", config(), tmp_path, log), {"OMP_NUM_THREADS": threads}, workers)
    assert ("share 8 cores" in (tmp_path / "log.txt").read_text()) == warns


def test_the_recipe_wins_over_the_users_environment_and_that_over_defaults(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "7")
    monkeypatch.setenv("MALLOC_TOP_PAD_", "1")
    assert process_environment(config(), 2)["OMP_NUM_THREADS"] == "7"
    assert process_environment(config(threads=3), 2)["OMP_NUM_THREADS"] == "3"
    monkeypatch.setattr(common, "has_nvidia_device", lambda: False)
    assert process_environment(config(), 2)["MALLOC_TOP_PAD_"] == "1"


def test_freed_memory_is_kept_on_the_cpu_only(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in common.KEEP_FREED_MEMORY:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(common, "has_nvidia_device", lambda: False)
    assert common.KEEP_FREED_MEMORY.items() <= process_environment(config(), 1).items()
    assert common.KEEP_FREED_MEMORY.keys().isdisjoint(process_environment(config(keep_freed_memory=False), 1))
    monkeypatch.setattr(common, "has_nvidia_device", lambda: True)
    assert common.KEEP_FREED_MEMORY.keys().isdisjoint(process_environment(config(), 1))


def test_the_loopback_device_is_for_one_machine_only(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        monkeypatch.delenv(name, raising=False)
        assert process_environment(config(), 1)[name] == "lo"
        assert name not in process_environment(config(nproc=2, nnodes=2), 1)


def test_nccl_keeps_its_choice_where_servers_may_be_on_other_machines(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NCCL_SOCKET_IFNAME", raising=False)
    sglang = SGLangConfig(urls=["http://gpu3:30000"])
    with_urls = RunConfig(name="x", rollout=RolloutConfig(engine="sglang", sglang=sglang))
    assert "NCCL_SOCKET_IFNAME" not in process_environment(with_urls, 1)


@pytest.mark.parametrize("told", ["2", "-1", "first"])
def test_a_machine_that_is_none_of_the_run_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, told: str
) -> None:
    monkeypatch.setenv("NODE_RANK", told)
    with pytest.raises(
        ConfigError, match=r"NODE_RANK: this is not the number of a machine(?s:.*)0 to 1, with cluster\.nnodes = 2"
    ):
        run_workers("torchrun", "m:f", config(nproc=2, nnodes=2), tmp_path)
    assert common.machine_number("torchrun", 1) == common.machine_number("ray", 2) == 0, "there is one launcher"


def test_every_attempt_has_a_name_of_its_own_that_its_workers_are_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = []

    def start(job: Job) -> Running:
        seen.append(
            (common.own_environment(job)[ATTEMPT], json.loads((tmp_path / ".lock.json").read_text())["attempt"])
        )
        return Running({0: -9} if len(seen) == 1 else {0: 0})

    monkeypatch.setattr("megarl.launchers.local.start", start)
    assert run_workers("local", "m:f", config(max_restarts=1), tmp_path) == 0
    (first, of_folder), (second, later) = seen
    assert (first, second) == (of_folder, later)
    assert first != second


def test_a_launcher_whose_folder_was_taken_leaves_it_as_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """It was stopped for so long that another machine's command took it, and its workers end when they write."""

    def start(job: Job) -> Running:
        other = json.loads((tmp_path / ".lock.json").read_text()) | {"attempt": "another", "host": "node7", "pid": 3}
        (tmp_path / ".lock.json").write_text(json.dumps(other))
        (tmp_path / "token").write_text("of the other one")
        (tmp_path / "run.json").write_text('{"status": "running"}')
        return Running({0: 1})

    monkeypatch.setattr("megarl.launchers.local.start", start)
    assert run_workers("local", "m:f", config(max_restarts=3), tmp_path) == 1
    assert "the run is not restarted: another command is using its folder" in capsys.readouterr().err
    assert (tmp_path / "token").read_text() == "of the other one"
    assert json.loads((tmp_path / "run.json").read_text()) == {"status": "running"}
    assert json.loads((tmp_path / ".lock.json").read_text())["attempt"] == "another"


def test_an_unknown_launcher_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="local, torchrun, ray"):
        run_workers("slrum", "m:f", config(), tmp_path)


def test_the_local_launcher_refuses_several_machines(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"cluster\.nnodes"):
        run_workers("local", "m:f", config(nproc=2, nnodes=2), tmp_path)


def test_torchrun_on_several_machines_says_what_it_needs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MASTER_ADDR", raising=False)
    with pytest.raises(ConfigError, match="MASTER_ADDR"):
        run_workers("torchrun", "m:f", config(nproc=2, nnodes=2), tmp_path)


@pytest.mark.parametrize("address", ["127.0.0.1", "localhost", "::1"])
def test_torchrun_on_several_machines_does_not_meet_on_loopback(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, address: str
) -> None:
    for name, value in {"MASTER_ADDR": address, "MASTER_PORT": "1", "NODE_RANK": "0"}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ConfigError, match="MASTER_ADDR: other machines cannot reach the loopback device"):
        run_workers("torchrun", "m:f", config(nproc=2, nnodes=2), tmp_path)
    assert not (tmp_path / "token").exists()


@pytest.mark.parametrize("port", ["http", "0", "65536"])
def test_the_port_on_which_machines_meet_is_a_number_of_a_port(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, port: str
) -> None:
    for name, value in {"MASTER_ADDR": "node0", "MASTER_PORT": port, "NODE_RANK": "0"}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ConfigError, match=rf"MASTER_PORT: .*\n.*found: +'?{port}'?\n.*allowed: 1 to 65535"):
        run_workers("torchrun", "m:f", config(nproc=2, nnodes=2), tmp_path)


def test_the_log_holds_whole_lines_and_the_last_drawing_of_a_bar(tmp_path: Path) -> None:
    log = OutputLog(tmp_path / "log.txt")
    log.write(1, b"half a")
    log.write(2, b"other\n")
    log.write(1, b" line\n  1%\r\x1b[2K\x1b[32m 50%\x1b[0m\r100%\n")
    log.record("launcher", "two\nlines")
    log.write(2, b"no end")
    log.close()
    assert (tmp_path / "log.txt").read_text().splitlines() == [
        "[rank 2] other",
        "[rank 1] half a line",
        "[rank 1] 100%",
        "[launcher] two",
        "[launcher] lines",
        "[rank 2] no end",
    ]


def test_a_line_of_unfinished_escapes_costs_no_time(tmp_path: Path) -> None:
    log, start = OutputLog(tmp_path / "log.txt"), time.process_time()
    log.write(1, b"\x1b]" * 30_000 + b"\x1b]0;title\x07text\x1b]8;;url\x1b\\ more\n")
    assert time.process_time() - start < 2.0  # 0.01 s; the square of the length takes seconds
    log.close()
    assert (tmp_path / "log.txt").read_text().endswith("text more\n")


class Ended:
    """Workers that have all ended."""

    def cause(self, rank: int) -> None:
        return None


class Running:
    """Workers that end as they are told."""

    def __init__(self, ended: dict[int, int] | Stopped) -> None:
        self.ended = ended

    def ranks(self) -> list[int]:
        return [0]

    def poll(self) -> dict[int, int]:
        if isinstance(self.ended, Stopped):
            raise self.ended
        return self.ended

    def cause(self, rank: int) -> None:
        return None

    def stop(self) -> None: ...


class Waiting(Running):
    """Workers whose wait makes another exception of what a handler raises, as Ray's compiled ones do."""

    def poll(self) -> dict[int, int]:
        with contextlib.suppress(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGUSR1)  # nohup would have SIGHUP ignored
            time.sleep(60)
        raise KeyboardInterrupt


@pytest.mark.parametrize(
    ("workers", "code", "status"),
    [
        (Running({0: -9}), 1, "failed"),
        (Running(Stopped(15)), 143, "stopped"),
        (Waiting({}), 138, "stopped"),
        (Running({0: 0}), 0, "running"),
    ],
)
def test_the_launcher_says_how_a_run_ended_that_could_not_say_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, workers: Running, code: int, status: str
) -> None:
    (tmp_path / "run.json").write_text('{"status": "running", "config": {"tracking": {"report": false}}}')
    monkeypatch.setattr("megarl.launchers.local.start", lambda job: workers)
    assert run_workers("local", "m:f", config(), tmp_path) == code
    assert json.loads((tmp_path / "run.json").read_text())["status"] == status


@pytest.mark.parametrize(("ended", "name"), [({0: 2}, "before"), ({0: 0}, "my run")])
def test_a_start_that_was_refused_leaves_the_configuration_of_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ended: dict[int, int], name: str
) -> None:
    (tmp_path / "config.yaml").write_text("name: before\n")
    monkeypatch.setattr("megarl.launchers.local.start", lambda job: Running(ended))
    run_workers("local", "m:f", config(), tmp_path)
    assert (tmp_path / "config.yaml").read_text().splitlines()[0] == f"name: {name}"
    assert not (tmp_path / "config.next.yaml").exists()


@pytest.mark.parametrize("passing", ["reference.next", "start.next"])
def test_weights_of_a_start_that_another_team_refused_do_not_stay(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, passing: str
) -> None:
    """The worker that has made them waited for the other team, and was killed."""
    (tmp_path / passing).mkdir()
    (tmp_path / passing / "config.json").touch()
    monkeypatch.setattr("megarl.launchers.local.start", lambda job: Running({0: 2}))
    run_workers("local", "m:f", config(), tmp_path)
    assert not (tmp_path / passing).exists()


def first(tmp_path: Path, ended: dict[int, int], *failures: RankFailure, oom: bool = False) -> RankFailure:
    for failure in failures:
        write_error(tmp_path, failure)
    job = Job("m:f", config(), tmp_path, OutputLog(tmp_path / "log.txt"))
    return supervise.first_failure(Ended(), job, ended, oom)  # type: ignore[arg-type]


def failed(rank: int, message: str, at: float) -> RankFailure:
    return RankFailure(rank, "train", 1, "RuntimeError", message, "", at, 1)


def test_the_earliest_error_of_its_own_comes_first(tmp_path: Path) -> None:
    lost = failed(0, "Connection closed by peer", 1.0)
    assert first(tmp_path, {0: 1, 1: 1, 2: 1}, lost, failed(1, "late", 3.0), failed(2, "early", 2.0)).rank == 2


def test_a_killed_rank_comes_before_what_its_peers_saw(tmp_path: Path) -> None:
    found = first(tmp_path, {0: 1, 1: -9}, failed(0, "something odd", 1.0))
    assert (found.rank, found.message) == (1, "was killed by signal 9 (SIGKILL)")


def test_a_rank_that_does_not_end_after_its_error_is_reported_with_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(supervise, "LINGER_S", 0.0)
    monkeypatch.setattr("megarl.launchers.local.start", lambda job: write_error(tmp_path, hung) or Running({}))
    hung = failed(0, "the loss is NaN", 1.0)
    assert run_workers("local", "m:f", config(), tmp_path) == 1
    assert "rank 0 failed in phase train at step 1: RuntimeError: the loss is NaN" in capsys.readouterr().err


def test_a_communication_library_that_aborts_comes_after_the_error_that_made_it(tmp_path: Path) -> None:
    assert first(tmp_path, {0: -6, 1: 1}, failed(1, "the loss is NaN", 1.0)).rank == 1


def test_an_abort_comes_before_connections_that_it_closed(tmp_path: Path) -> None:
    found = first(tmp_path, {0: 1, 1: -6}, failed(0, "Connection closed by peer", 1.0))
    assert (found.rank, found.message) == (1, "was killed by signal 6 (SIGABRT)")


class Dying:
    """Two workers: the first loses its peer, and word of the other's end comes `after_s` later, or never."""

    def __init__(self, after_s: float) -> None:
        self._end = time.monotonic() + after_s

    def ranks(self) -> list[int]:
        return [0, 1]

    def poll(self) -> dict[int, int]:
        return {0: 1} | ({1: -9} if time.monotonic() > self._end else {})

    def cause(self, rank: int) -> None:
        return None

    def stop(self) -> None: ...


@pytest.mark.parametrize(
    ("after_s", "lost_s", "told"),
    [
        (0.3, 60.0, "rank 1 was killed by signal 9"),
        (60, 1.0, "rank 0 failed in phase train at step 1: RuntimeError: Connection"),
    ],
)
def test_word_of_a_death_may_come_after_what_the_peers_saw(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    after_s: float,
    lost_s: float,
    told: str,
) -> None:
    monkeypatch.setattr(supervise, "SETTLE_S", 0.0)
    monkeypatch.setattr(supervise, "LOST_S", lost_s)
    lost = failed(0, "Connection closed by peer", 1.0)
    monkeypatch.setattr("megarl.launchers.local.start", lambda job: write_error(tmp_path, lost) or Dying(after_s))
    assert run_workers("local", "m:f", config(nproc=2), tmp_path) == 1
    assert f"megarl: {told}" in capsys.readouterr().err


def test_lost_connections_alone_are_still_reported(tmp_path: Path) -> None:
    assert first(tmp_path, {0: 1}, failed(0, "Connection closed by peer", 1.0)).rank == 0


def test_the_kernels_out_of_memory_kill_is_named(tmp_path: Path) -> None:
    found = first(tmp_path, {1: -9}, oom=True)
    assert "out of memory" in found.message
    assert found.out_of_memory


def test_tensor_parallel_workers_have_one_connection_to_their_device(monkeypatch) -> None:
    """Megatron starts a collective before the product it overlaps with, and relies on that order."""
    name = "CUDA_DEVICE_MAX_CONNECTIONS"
    monkeypatch.delenv(name, raising=False)
    assert layout_environment(ParallelConfig(pp=2)) == {}
    assert layout_environment(ParallelConfig(tp=2)) == {name: "1"}
    monkeypatch.setenv(name, "8")
    assert layout_environment(ParallelConfig(tp=2)) == {name: "8"}


def test_torchrun_refuses_several_teams(tmp_path: Path) -> None:
    layout = ParallelConfig()
    plans = (TeamPlan("actor", (), 1, 0, layout, ()), TeamPlan("reference", (), 1, 1, layout, ()))
    with pytest.raises(ConfigError, match=r"--launcher: torchrun starts only one team(?s:.*)allowed: local, ray"):
        run_workers("torchrun", "m:f", config(nproc=2), tmp_path, Placement(plans))


def test_workers_of_several_teams_are_named_with_their_team(tmp_path: Path) -> None:
    layout = ParallelConfig()
    plans = tuple(TeamPlan(name, (), 20, first, layout, ()) for name, first in (("actor", 0), ("critic", 20)))
    job = Job("m:f", config(nproc=40), tmp_path, OutputLog(tmp_path / "log.txt"), Placement(plans))
    assert job.names([1, 21]) == "worker 1 (actor, rank 1), worker 21 (critic, rank 1)"
    assert job.names(range(40)).endswith("worker 15 (actor, rank 15) and 24 more")
    alone = dataclasses.replace(job, placement=Placement(plans[:1]))
    assert (alone.name(1), alone.names([0, 2])) == ("rank 1", "ranks 0, 2")


def test_trainers_that_share_gpus_with_servers_have_no_expandable_segments(monkeypatch, tmp_path):
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True,max_split_size_mb:64")
    for colocated, expected in ((False, None), (True, "max_split_size_mb:64")):
        rollout = {"engine": "sglang", "sglang": {"colocated": colocated}}
        made = RunConfig.model_validate({"name": "x", "rollout": rollout})
        assert process_environment(made, 1).get("PYTORCH_CUDA_ALLOC_CONF") == expected
        file = tmp_path / f"{colocated}.txt"
        common.warn_of_removed_settings(Job("m:f", made, tmp_path, OutputLog(file)))
        assert ("PYTORCH_CUDA_ALLOC_CONF: workers start without" in file.read_text()) == colocated
