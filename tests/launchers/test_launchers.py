"""Every launcher, with real processes: what a run leaves, and how it ends when something goes wrong."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import psutil
import pytest

from megarl.artifacts.run_folder import SAVE_REQUEST
from megarl.config.load import dump_config
from megarl.config.run import ClusterConfig, RunConfig
from megarl.launchers.common import run_workers
from megarl.system.errors import ConfigError
from megarl.system.processes import free_port, has_nvidia_device
from tests.forked import Forked, become, fork_programs, forked_program

HERE = Path(__file__).parent
LAUNCHERS = ["local", "torchrun"]
DEADLINE_S = 300.0  # a run of these tests takes 2 to 10 s; the rest is for a machine that is busy with other things

pytestmark = pytest.mark.procs


@dataclass
class Result:
    code: int
    out: str
    err: str
    log: str
    seconds: float


def command(launcher: str, entry: str, run_dir: Path, *more: str) -> list[str]:
    return [sys.executable, str(HERE / "drive.py"), launcher, entry, str(run_dir), *more]


def environment() -> dict[str, str]:
    return os.environ | {"PYTHONPATH": f"{HERE}{os.pathsep}{HERE.parents[1]}", "OMP_NUM_THREADS": "1"}


def launch(launcher: str, entry: str, run_dir: Path, *more: str, program: bool = False) -> Result:
    """Run the launching process to its end.

    Args:
        program: start it, and what it starts, as users do; otherwise they are forked with their imports done.
    """
    began = time.monotonic()
    if program:
        pipes: Any = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        process: Any = subprocess.Popen(command(launcher, entry, run_dir, *more), env=environment(), **pipes)
    else:
        process = Drive(launcher, entry, str(run_dir), *more)
    try:
        out, err = process.communicate(timeout=DEADLINE_S)
    finally:
        process.kill()
    log = (run_dir / "log.txt").read_text()
    return Result(process.returncode, out, err, log, time.monotonic() - began)


class Drive(Forked):
    """drive.py with these arguments, forked with its imports done, and so is what it starts; it leads a session."""

    def __init__(self, *arguments: str) -> None:
        self._files = [tempfile.NamedTemporaryFile("rb", prefix="megarl-drive-") for _ in range(2)]  # noqa: SIM115
        super().__init__(_drive_main, (arguments, environment(), *(file.name for file in self._files)))

    def communicate(self, timeout: float) -> tuple[str, str]:
        """Wait for the end; what was printed."""
        self.wait(timeout)
        for file in self._files:
            file.seek(0)
        out, err = (file.read().decode() for file in self._files)
        return out, err


def _drive_main(arguments: tuple[str, ...], environment: dict[str, str], output: str, errors: str) -> NoReturn:
    os.setsid()
    become(environment, output, errors)
    sys.path.insert(0, str(HERE))
    fork_programs()
    from tests.launchers import drive

    sys.exit(drive.main(*arguments))


def alive(pids: list[int]) -> list[int]:
    """Those that still run; a zombie has ended."""
    found = []
    for pid in pids:
        try:
            if psutil.Process(pid).status() != psutil.STATUS_ZOMBIE:
                found.append(pid)
        except psutil.NoSuchProcess:
            continue
    return found


@pytest.mark.parametrize(
    ("launcher", "program"),
    [
        ("local", False),  # tests/runtime/test_same_run.py starts the program
        ("torchrun", False),  # a test below starts the program, up to its workers, and looks at their path
        pytest.param("torchrun", True, marks=pytest.mark.campaign("kills")),
    ],
)
def test_ranks_meet_and_the_run_folder_tells_what_happened(
    launcher: str, program: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")  # a cluster of Ray that runs already does not know it
    result = launch(launcher, "write_environment", tmp_path, program=program)

    assert result.code == 0, result.err
    seen = [json.loads((tmp_path / f"seen_{rank}.json").read_text()) for rank in range(2)]
    assert [s["sum"] for s in seen] == [3, 3]
    assert [(s["RANK"], s["LOCAL_RANK"], s["WORLD_SIZE"]) for s in seen] == [(str(r), str(r), "2") for r in range(2)]
    assert {(s["name"], s["threads"], s["OMP_WAIT_POLICY"]) for s in seen} == {("drive", 1, "passive")}
    assert all(s["MALLOC_TRIM_THRESHOLD_"] and s["HF_HUB_OFFLINE"] == "1" for s in seen)
    if launcher != "ray":  # whose own processes belong to the cluster
        assert all(s["PYTHONSAFEPATH"] for s in seen)  # folders of the repository hide nobody's packages
        assert all(s["safe_path"] for s in seen) == program
        listens = [json.loads((tmp_path / f"listens_{rank}.json").read_text()) for rank in range(2)]
        assert len(listens[0]) > 1
        assert {address for of_rank in listens for address in of_rank} == {"127.0.0.1"}
    assert not (tmp_path / "token").exists()
    assert "hello from 0" in result.out
    assert "hello from 1" not in result.out
    assert {f"[rank {r}] hello from {r}" for r in range(2)} <= set(result.log.splitlines())


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_an_exception_is_shown_with_rank_phase_and_step(launcher: str, tmp_path: Path) -> None:
    result = launch(launcher, "rank_1_raises", tmp_path)

    assert result.code == 1
    assert "megarl: rank 1 failed in phase train/forward at step 7: RuntimeError: loss is NaN" in result.err
    assert 'raise RuntimeError("loss is NaN")' in result.err
    assert result.err.count("Traceback") == 1
    assert "rank 0: in phase train/forward at step 7" in result.err
    assert str(tmp_path / "log.txt") in result.err


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_a_killed_rank_is_the_first_error_although_its_peer_fails_too(launcher: str, tmp_path: Path) -> None:
    result = launch(launcher, "rank_1_is_killed", tmp_path)

    assert result.code == 1
    summary = next(line for line in result.err.splitlines() if line.startswith("megarl:"))
    how = "died" if launcher == "ray" else "was killed by signal 9 (SIGKILL)"
    assert summary.startswith(f"megarl: rank 1 {how}")
    assert summary.endswith("in phase rollout/decode at step 3")


@pytest.mark.parametrize(
    ("launcher", "entry"),
    [
        ("local", "rank_1_leaves"),
        ("torchrun", "all_leave"),
        pytest.param("local", "all_leave", marks=pytest.mark.campaign("kills")),
        pytest.param("torchrun", "rank_1_leaves", marks=pytest.mark.campaign("kills")),
    ],
)
def test_a_rank_that_ends_with_0_before_its_work_is_done_has_failed(launcher: str, tmp_path: Path, entry: str) -> None:
    result = launch(launcher, entry, tmp_path)

    assert result.code == 1
    summary = next(line for line in result.err.splitlines() if line.startswith("megarl:"))
    how = "died" if launcher == "ray" else "ended with exit code 0 before its work was done"
    assert summary.startswith(f"megarl: rank {int(entry == 'rank_1_leaves')} {how}")
    assert " in phase rollout" in summary


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_a_run_that_lost_a_rank_is_started_again(
    launcher: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RESTARTS", "1")
    result = launch(launcher, "rank_1_is_killed_once", tmp_path)

    assert result.code == 0, result.err
    again = next(line for line in result.err.splitlines() if " starts again (" in line)
    assert " starts again (1 of 1; there is no checkpoint yet: from the beginning): rank 1 on " in again
    assert again.endswith("in phase rollout at step 3")
    assert {f"[rank {rank}] worker {rank} lives" for rank in range(2)} <= set(result.log.splitlines())


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_a_rank_without_progress_is_reported_with_every_phase_and_stack(launcher: str, tmp_path: Path) -> None:
    result = launch(launcher, "rank_1_hangs", tmp_path, "2", "10")

    assert result.code == 1
    assert "made no progress for 10 s (cluster.timeout_s)" in result.err
    assert "rank 0: in phase sync at step 0" in result.err
    assert "rank 1: in phase reward at step 0" in result.err
    assert result.log.count("in rank_1_hangs") == 2


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_a_mistake_of_the_user_ends_with_2_and_no_traceback(launcher: str, tmp_path: Path) -> None:
    result = launch(launcher, "user_error", tmp_path)

    assert result.code == 2
    assert "train.jsonl:1: no such column\n  found:   'promt'\n  allowed: prompt, answer" in result.err
    assert "Traceback" not in result.err + result.out


def test_out_of_memory_is_recognised(tmp_path: Path) -> None:
    result = launch("local", "out_of_memory", tmp_path)

    assert result.code == 1
    assert "megarl: rank 1 failed in phase train" in result.err
    assert "actor.engine.micro_batch_tokens" in result.err


@pytest.mark.parametrize(
    ("launcher", "number"), [(name, signal.SIGKILL) for name in LAUNCHERS] + [("local", signal.SIGTERM)]
)
def test_workers_go_with_their_launcher(launcher: str, number: int, tmp_path: Path) -> None:
    process, pids = started(launcher, "wait", tmp_path)
    assert alive(pids) == pids

    process.send_signal(number)

    ended = time.monotonic() + DEADLINE_S
    while alive(pids) and time.monotonic() < ended:
        time.sleep(0.1)
    assert alive(pids) == []
    process.communicate(timeout=DEADLINE_S)
    assert process.returncode == (-signal.SIGKILL if number == signal.SIGKILL else 128 + signal.SIGTERM)


def started(launcher: str, entry: str, run_dir: Path) -> tuple[Drive, list[int]]:
    """The command, the leader of a session, and the processes of its two workers once they work."""
    process = Drive(launcher, entry, str(run_dir))
    files = [run_dir / "pid_0", run_dir / "pid_1"]
    deadline = time.monotonic() + DEADLINE_S
    while not all(file.exists() and file.read_text() for file in files):
        assert time.monotonic() < deadline
        time.sleep(0.1)
    return process, [int(file.read_text()) for file in files]


@pytest.mark.parametrize(("launcher", "number"), [("local", signal.SIGUSR1), ("torchrun", signal.SIGTERM)])
def test_a_signal_to_all_processes_of_a_job_leaves_time_to_save(launcher: str, number: int, tmp_path: Path) -> None:
    process, pids = started(launcher, "train", tmp_path)
    if launcher == "ray":  # what Ray itself needs cannot be told to wait
        others = [psutil.Process(pid) for pid in pids]
        os.killpg(process.pid, number)
    else:
        others = psutil.Process(process.pid).children(recursive=True)
        process.send_signal(number)
    for other in others:
        with contextlib.suppress(psutil.NoSuchProcess):  # the run may be over by now
            other.send_signal(number)
    _, said = process.communicate(timeout=DEADLINE_S)

    assert process.returncode == 128 + number, said
    assert f"megarl: stopped by {signal.Signals(number).name}" in said
    # Two: a worker that is told after it has saved, and before its launcher has seen that, saves again.
    assert 1 <= len(list(tmp_path.glob("checkpoints/step_*"))) <= 2, said
    assert not (tmp_path / SAVE_REQUEST).exists()
    assert alive(pids) == []


def _runs(process: psutil.Process, program: str) -> bool:
    """Whether it is `python -m PROGRAM`; torchrun's agent names that of its workers, too."""
    words = process.cmdline()
    return "-m" in words and words[words.index("-m") + 1] == program


def _ignores_its_folder(process: psutil.Process) -> bool:
    """Whether an interpreter leaves its working folder out of the path of imports: folders of the repository, such as
    kernels, would hide other packages of these names."""
    words = process.cmdline()
    options = words[1 : words.index("-m")]
    return bool(process.environ().get("PYTHONSAFEPATH")) and not any(option[:2] in ("-E", "-I") for option in options)


def of_run(mark: str) -> list[psutil.Process]:
    """The processes of a command that was started with this mark in its environment, whoever their parents are."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if process.environ().get("MEGARL_TEST_RUN") == mark and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
    return found


@pytest.mark.parametrize(
    ("launcher", "program", "stopped"),
    [
        ("local", "megarl.runtime.worker", False),
        ("torchrun", "megarl.launchers.torchrun", False),
        pytest.param("torchrun", "megarl.runtime.worker", False, marks=pytest.mark.campaign("kills")),
        ("torchrun", "megarl.runtime.worker", True),
    ],
)
def test_a_launcher_that_ends_while_its_processes_start_leaves_none(
    launcher: str, program: str, stopped: bool, tmp_path: Path
) -> None:
    """They have taken no id of a parent yet: it is told them. One that is stopped cannot look after it."""
    mark = str(tmp_path)
    process = subprocess.Popen(command(launcher, "wait", tmp_path), env=environment() | {"MEGARL_TEST_RUN": mark})
    deadline = time.monotonic() + DEADLINE_S
    started: list[psutil.Process] = []
    while not started:
        assert time.monotonic() < deadline
        time.sleep(0.1)  # they import for seconds
        with contextlib.suppress(psutil.Error):
            children = psutil.Process(process.pid).children(recursive=True)
            started = [child for child in children if _runs(child, program)]
    assert _ignores_its_folder(started[0])

    if stopped:
        started[0].suspend()
        process.terminate()
    else:
        process.kill()
    process.wait(DEADLINE_S)

    ended = time.monotonic() + DEADLINE_S
    while (left := of_run(mark)) and time.monotonic() < ended:
        time.sleep(0.05)
    for survivor in left:
        survivor.kill()
    assert left == []


def test_a_port_in_use_is_named_before_torchrun_starts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        for name, value in {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "NODE_RANK": "0"}.items():
            monkeypatch.setenv(name, value)
        monkeypatch.setattr("megarl.launchers.torchrun.is_loopback", lambda address: False)
        cluster = ClusterConfig(nproc=2, nnodes=2)
        with pytest.raises(ConfigError, match=f"MASTER_PORT: another process listens on this port\n.*:{port}"):
            run_workers("torchrun", "m:f", RunConfig(name="x", cluster=cluster), tmp_path)


def test_torchrun_alone_can_start_the_worker(tmp_path: Path) -> None:
    """Its `main`, in a process that has imported torch; programs are started above."""
    (tmp_path / "config.yaml").write_text(dump_config(RunConfig(name="drive")))
    arguments = ["--nproc-per-node=2", "--master-addr=127.0.0.1", f"--master-port={free_port()}"]
    arguments += ["-m", "megarl.runtime.worker", "--config", str(tmp_path / "config.yaml")]
    output = tmp_path / "output"
    output.touch()

    variables = environment() | {"GLOO_SOCKET_IFNAME": "lo"}
    arguments += ["--entry", "entries:rank_1_raises_after_it_has_met"]
    failed = Forked(_torchrun_main, (arguments, variables, output))

    assert failed.wait(DEADLINE_S) != 0
    assert json.loads((tmp_path / "seen_1.json").read_text())["sum"] == 3
    assert "RuntimeError: loss is NaN" in output.read_text()


def _torchrun_main(arguments: list[str], environment: dict[str, str], output: Path) -> None:
    become(environment, str(output), str(output))
    sys.path.insert(0, str(HERE))
    from torch.distributed.elastic.multiprocessing.subprocess_handler import subprocess_handler
    from torch.distributed.run import main

    if not has_nvidia_device():
        subprocess_handler.Popen = forked_program  # type: ignore[assignment]
    main(arguments)


def test_two_runs_cannot_share_a_run_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first, _ = started("local", "wait", tmp_path)
    try:
        monkeypatch.setenv("NODE_RANK", "1")  # whatever has set it: this command has one machine
        second = launch("local", "wait", tmp_path)
        assert second.code != 0
        assert "another run is using this run folder" in second.err
        assert f"by process {first.pid} on " in second.err
    finally:
        first.send_signal(signal.SIGTERM)
        first.communicate(timeout=DEADLINE_S)
