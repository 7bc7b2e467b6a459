"""What a batch job does on its first node, with stand-ins for Slurm's commands: test_slurm_real.py has a real Slurm."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from megarl.config.launch import LaunchConfig, SlurmConfig
from megarl.config.run import ClusterConfig, RunConfig
from megarl.launchers import submit
from megarl.launchers.slurm import Submission
from megarl.launchers.slurm_job import driver, files, guard
from megarl.launchers.slurm_job import nodes as nodes_module
from megarl.launchers.slurm_job.driver import SlurmJob
from megarl.launchers.slurm_job.files import Folder
from megarl.launchers.slurm_job.nodes import Nodes, failed_checks, link_faults, odd_versions, slow_nodes, wrong_clocks

#: Each command of Slurm: notes how it was called, and does what WORLD (a folder) says. Without json and pathlib it
#: starts in half of the time.
COMMANDS = r"""
import os, sys, time
world, name, given = os.environ["WORLD"], os.path.basename(sys.argv[0]), sys.argv[1:]
def is_there(file): return os.path.exists(os.path.join(world, file))
def read(file):
    with open(os.path.join(world, file)) as text: return text.read()
def write(file, text, mode="w"):
    with open(os.path.join(world, file), mode) as out: out.write(text)
write("asked", "\0".join([name, *given]) + "\0\n", "a")
dead = read("dead").split() if is_there("dead") else []
if name == "sbatch":
    print("8")
elif name == "scontrol" and given[:2] == ["show", "hostnames"]:
    print("\n".join(given[2].split(","))) if given[2] != "none" else sys.exit("Invalid hostlist: none")
elif name == "scontrol" and given[:2] == ["show", "node"] and is_there("silent"):
    sys.exit("slurm_load_node error: Unable to contact slurm controller")
elif name == "scontrol" and given[:2] == ["show", "node"] and given[-1] == "gone":
    sys.exit(print("Node gone not found") or 1)
elif name == "scontrol" and given[:2] == ["show", "node"]:
    print(f"NodeName={given[-1]} NodeAddr=10.0.0.1 State={'DOWN*' if given[-1] in dead else 'ALLOCATED'}")
elif name == "scontrol" and given[:2] == ["show", "job"]:
    end = time.strftime("%Y-%m-%dT%H:%M:%S", time.localtime(time.time() + 120))
    print(f"JobId=7 EndTime={end} PreemptTime={'2026-01-01T00:00:00' if is_there('preempted') else 'None'}")
elif name == "scontrol" and given[0] == "requeue":
    os.kill(int(os.environ["SLURM_DRIVER"]) if "SLURM_DRIVER" in os.environ else os.getppid(), 9)
elif name == "srun":
    nodes = next(o for o in given if o.startswith("--nodelist=")).partition("=")[2].split(",")
    if given[-1] == "true":
        write("called", "")
        time.sleep(60 if is_there("hangs") else 2 if is_there("slow") else 0)
        if nodes[0] in dead or is_there("no steps"):
            sys.exit(f"srun: error: Task launch failed on node {nodes[0]}")
    elif given[-1] == "guard":
        time.sleep(60)
    elif "preflight" in given:
        sys.path.insert(0, world)
        import tests_of_nodes
        tests_of_nodes.do(given[given.index("preflight") + 1:], nodes)
    else:
        code = read("steps").split()
        write("steps", " ".join(code[1:]))
        if code[0] == "cancelled":  # a step that ends with its job
            os.kill(os.getppid(), 15)
            sys.exit(143)
        if code[0].startswith("fail"):  # a run that fails where it writes the checkpoint
            write("waits", "")
            while not is_there(os.environ["RUN_DIR"] + "/launch/save"): time.sleep(0.05)
            write("dead", code[0][5:])
            sys.exit(3)
        if code[0] == "wait":  # as a run that is asked for a checkpoint
            save = os.environ["RUN_DIR"] + "/launch/save"
            write("waits", "")
            while not is_there(save): time.sleep(0.05)
            os.unlink(save)
            time.sleep(60)
        if code[0] == "saved":  # a run that ends before the limit of its job
            write(os.environ["RUN_DIR"] + "/run.json", '{"status": "stopped"}')
            write("began", os.environ["MEGARL_JOB_BEGAN"])
            sys.exit(0)
        dead_now = code[0].partition(":")[2]
        if dead_now:
            write("dead", dead_now)
        sys.exit(int(code[0].partition(":")[0]))
"""


class World:
    """A run folder, and what Slurm answers."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.run_dir = folder / "world", folder / "run of TEAM 100%"
        self.folder.mkdir()
        for name in ("srun", "scontrol", "sbatch"):
            file = self.folder / name
            file.write_text(f"#!{sys.executable} -IS{COMMANDS}")
            file.chmod(0o755)

    def job(self, **launch: object) -> Submission:
        """Of two nodes."""
        chain, restarts = launch.pop("chain", 0), launch.pop("restarts", 3)
        section = LaunchConfig(slurm=SlurmConfig(chain=chain, restarts=restarts), **{"preflight": False, **launch})
        config = RunConfig(name="x", cluster=ClusterConfig(nproc=2, nnodes=2, start_timeout_s=120), launch=section)
        return Submission(config, self.run_dir, "train", "torchrun", self.run_dir)

    def begin(self, steps: str, nodes: str = "n1,n2,n3", again: str = "", **launch: object) -> subprocess.Popen[str]:
        """The job on these nodes, whose steps end so: CODE, CODE:NODES-THAT-DIE, `wait`, `fail`, `fail:NODES`,
        `saved`, `cancelled`."""
        job = self.job(**launch)
        if not again:
            submit.write_scripts(job)
            submit.prepare(job)
        (self.folder / "steps").write_text(steps)
        outside = self.outside(nodes) | ({"SLURM_RESTART_COUNT": again} if again else {})
        command = [sys.executable, "-m", "slurm_job", str(self.run_dir)]
        return subprocess.Popen(command, cwd=self.run_dir / "launch", env=outside, stdout=subprocess.PIPE, text=True)

    def outside(self, nodes: str) -> dict[str, str]:
        """Environment variables of the job."""
        own = {"PATH": f"{self.folder}:{os.environ['PATH']}", "WORLD": str(self.folder), "RUN_DIR": str(self.run_dir)}
        return {**os.environ, **own, "SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": nodes, "SLURMD_NODENAME": "n1"}

    def run(self, steps: str, nodes: str = "n1,n2,n3", **launch: object) -> tuple[int, str]:
        """Its exit code, and what it prints."""
        job = self.begin(steps, nodes, **launch)
        said = job.communicate(timeout=120)[0]
        return job.returncode, said

    def asked(self, name: str, *words: str) -> list[str]:
        """How a command was called, each call in a line, if these words were among its own."""
        calls = [call.split("\0") for call in (self.folder / "asked").read_text().split("\0\n")[:-1]]
        return [" ".join(call[1:]) for call in calls if call[0] == name and set(words) <= set(call)]

    def excluded(self) -> dict[str, str]:
        return submit.excluded(self.run_dir)

    def steps(self) -> list[str]:
        """Nodes of each attempt."""
        runs = [call for call in self.asked("srun") if call.endswith("node.sh")]
        return [next(word for word in call.split() if word.startswith("--nodelist=")) for call in runs]


@pytest.fixture
def world(tmp_path):
    return World(tmp_path)


def test_a_run_that_ends_well_leaves_its_spare_node_in_peace(world):
    code, said = world.run("0", spares=1)
    assert code == 0
    assert "attempt 1 of job 7 on n1, n2, spare: n3" in said
    assert world.steps() == ["--nodelist=n1,n2"]
    output = f"--output={world.run_dir}%/launch/job-%j.node-%n.txt"  # a folder with %, which is %% there
    assert world.asked("srun", output)
    assert not world.asked("sbatch")


def test_a_lost_node_is_replaced_by_the_spare_one(world):
    (world.run_dir / "checkpoints" / "step_5").mkdir(parents=True)
    (world.run_dir / "checkpoints" / "step_5" / "meta.json").touch()
    code, said = world.run("1:n2 0", spares=1)
    assert code == 0
    assert world.steps() == ["--nodelist=n1,n2", "--nodelist=n1,n3"]
    assert world.excluded() == {"n2": "lost: Slurm says DOWN*"}
    assert "lost n2: the run starts again in this job, from the checkpoint of step 5" in said
    (restart,) = map(json.loads, (world.run_dir / "restarts.jsonl").read_text().splitlines())
    assert restart["why"] == "lost n2"


def test_without_a_spare_node_the_next_job_goes_on_without_the_lost_one(world):
    code, said = world.run("1:n2", nodes="n1,n2")
    assert code == 1
    assert "1 of the 2 nodes of this job can be used" in said
    (call,) = world.asked("sbatch")
    assert call.endswith(f"--dependency=afterany:7 {world.run_dir}/launch/next.sh")
    assert "#SBATCH --exclude=n2\n" in (world.run_dir / "launch" / "next.sh").read_text()
    assert [job.number for job in submit.jobs_of(world.run_dir)] == ["8"]


def test_a_run_that_fails_on_nodes_that_are_well_is_not_started_again(world):
    code, said = world.run("2")
    assert code == 2
    assert "exit code 2; all its nodes reply" in said
    assert not world.asked("sbatch")
    assert not world.excluded()


def test_where_nothing_can_be_started_no_node_is_blamed(world):
    (world.folder / "dead").write_text("n1 n2")
    code, said = world.run("1", nodes="n1,n2")  # n1 is the one that the job's program runs on
    assert code == 1
    assert "no program succeeds on any of the nodes n1, n2" in said
    assert not world.asked("sbatch")


def test_restarts_are_counted_until_there_is_a_newer_checkpoint(world):
    code, said = world.run("1:n2", restarts=0, spares=1)
    assert code == 1
    assert "no restart is left: 0 without a new checkpoint (launch.slurm.restarts)" in said


def test_near_the_time_limit_a_checkpoint_is_written_and_the_next_job_submitted(world):
    job = world.begin("wait", chain=2)
    wait_for(world.folder / "waits")
    job.send_signal(signal.SIGUSR1)
    said = job.communicate(timeout=120)[0]
    assert job.returncode == 0, said
    assert (
        "requesting a checkpoint, waiting at most 1" in said or "requesting a checkpoint, waiting at most 9" in said
    )  # 120 s are left, less 20
    assert "no checkpoint" not in said
    assert (world.run_dir / "launch" / "chain").read_text() == "1\n"
    assert len(world.asked("sbatch")) == 1


@pytest.mark.parametrize("chain", [0, 2])
def test_a_run_that_has_saved_before_the_time_limit_goes_on_in_the_next_job_of_a_chain(world, monkeypatch, chain):
    monkeypatch.setenv("SLURM_JOB_START_TIME", "1700000000")
    monkeypatch.setenv("MEGARL_JOB_BEGAN", "1600000000")  # of the job that has submitted this one
    code, said = world.run("saved", chain=chain)
    assert (code, (world.folder / "began").read_text()) == (0, "1700000000")
    assert "the run has saved and ended before the time limit" in said
    assert (world.run_dir / "launch" / "chain").read_text() == f"{max(0, chain - 1)}\n"
    assert len(world.asked("sbatch")) == (1 if chain else 0)


def test_a_run_that_fails_while_its_checkpoint_is_awaited_has_failed(world):
    job = world.begin("fail", chain=2)
    wait_for(world.folder / "waits")
    job.send_signal(signal.SIGUSR1)
    said = job.communicate(timeout=120)[0]
    assert job.returncode == 3, said
    assert "exit code 3; all its nodes reply" in said
    assert not world.asked("sbatch")


def test_a_node_that_dies_while_a_checkpoint_is_awaited_does_not_end_the_chain(world):
    job = world.begin("fail:n2", chain=2, spares=1)
    wait_for(world.folder / "waits")
    job.send_signal(signal.SIGUSR1)
    said = job.communicate(timeout=120)[0]
    assert job.returncode == 0, said
    assert world.excluded().keys() == {"n2"}
    assert len(world.asked("sbatch")) == 1
    assert len(world.steps()) == 1


def test_a_warning_that_finds_no_run_yet_submits_the_next_job(world):
    (world.folder / "tests_of_nodes.py").write_text(
        "import os, pathlib, time\n"
        "def do(given, nodes):\n    pathlib.Path(os.environ['WORLD'], 'tested').touch()\n    time.sleep(600)\n"
    )
    job = world.begin("0", chain=2, preflight=True)
    wait_for(world.folder / "tested")
    job.send_signal(signal.SIGUSR1)
    said = job.communicate(timeout=120)[0]
    assert job.returncode == 0, said
    assert "the time limit is near before the run was started" in said
    assert (world.run_dir / "launch" / "chain").read_text() == "1\n"
    assert len(world.asked("sbatch")) == 1
    assert not world.excluded()
    assert not world.steps()


@pytest.fixture
def here(world, monkeypatch):
    """A job on n1 and n2, in this process."""
    submit.write_scripts(world.job())
    for name, value in world.outside("n1,n2").items():
        monkeypatch.setenv(name, value)
    return SlurmJob(world.run_dir)


def test_a_requeue_that_slurm_takes_and_does_not_do_is_noted(world, here, monkeypatch):
    monkeypatch.setattr(driver, "answer", lambda *command: "")
    monkeypatch.setattr(driver.time, "sleep", lambda seconds: None)
    with pytest.raises(driver.Over):
        here._requeue("preempted")
    assert submit.notes_of(world.run_dir)[-1]["text"].endswith("not end job 7 within 120 s")


def test_a_job_whose_nodes_slurm_does_not_tell_has_failed(world):
    code, said = world.run("0", nodes="none")
    assert code == 1
    assert "Invalid hostlist: none" in said
    assert submit.notes_of(world.run_dir)[-1]["kind"] == "failed"


def test_steps_of_jobs_that_share_their_first_node_meet_at_different_ports():
    ports = [nodes_module.port_of(job, step) for job in range(950, 1050) for step in range(1, 20)]
    assert len(set(ports)) == len(ports)
    assert 20000 <= min(ports) <= max(ports) < 30000  # below those that Linux chooses by itself


def test_a_warning_counts_from_its_signal(here, monkeypatch):
    monkeypatch.setattr(here, "_slurm_fields", dict)  # Slurm does not answer
    here.warned = time.monotonic() - 100
    assert here._left_s() == pytest.approx(200, abs=5)  # the recipe's launch.slurm.warn_s is 300


def test_a_preempted_job_goes_into_the_queue_again_and_submits_nothing(world):
    (world.folder / "preempted").touch()
    job = world.begin("wait", chain=2)
    wait_for(world.folder / "waits")
    job.send_signal(signal.SIGUSR1)
    said = job.communicate(timeout=120)[0]
    assert job.returncode == -signal.SIGKILL, said  # by the stand-in of `scontrol requeue`
    assert world.asked("scontrol", "requeue", "7")
    assert not world.asked("sbatch")
    assert (world.run_dir / "launch" / "chain").read_text() == "2\n"


def test_a_step_that_preemption_has_ended_is_no_failure(world):
    (world.folder / "preempted").touch()
    code, _ = world.run("143")
    assert code == -signal.SIGKILL
    assert world.asked("scontrol", "requeue", "7")


def test_a_cancelled_job_submits_nothing(world):
    job = world.begin("wait", chain=2)
    wait_for(world.folder / "waits")
    job.send_signal(signal.SIGTERM)
    assert "stopped by SIGTERM" in job.communicate(timeout=120)[0]
    assert job.returncode == 143
    assert not world.asked("sbatch")


def test_a_step_that_ends_with_its_cancelled_job_speaks_against_no_node(world):
    code, said = world.run("cancelled", chain=2)
    assert code == 143
    assert "stopped by SIGTERM" in said
    assert not (world.folder / "called").exists()  # no node was asked anything


def test_nodes_that_are_asked_while_the_job_is_cancelled_are_not_blamed(world):
    (world.folder / "slow").touch()
    (world.folder / "no steps").touch()
    job = world.begin("1", chain=2)
    wait_for(world.folder / "called")
    job.send_signal(signal.SIGTERM)
    said = job.communicate(timeout=120)[0]
    assert job.returncode == 143, said
    assert not world.excluded()
    assert not world.asked("sbatch")


def test_a_job_that_slurm_runs_again_leaves_out_the_first_node_that_it_lost(world):
    world.run("0", nodes="n1,n2")
    (world.folder / "dead").write_text("n1")
    job = world.begin("0", nodes="n2,n3", again="1")
    said = job.communicate(timeout=120)[0]
    assert job.returncode == 0, said
    assert "Slurm restarted job 7 (restart 1)" in said
    assert world.excluded() == {"n1": "lost: Slurm says DOWN*"}


def test_a_slurm_that_does_not_answer_says_nothing_of_the_nodes(world):
    world.run("0", nodes="n1,n2")
    (world.folder / "silent").touch()
    job = world.begin("0", nodes="n1,n2", again="1")
    said = job.communicate(timeout=120)[0]
    assert job.returncode == 1
    assert "Unable to contact slurm controller" in said
    assert not world.excluded()


def test_a_node_that_slurm_does_not_know_any_more_is_lost(world):
    world.run("0", nodes="n1,gone")
    job = world.begin("0", nodes="n1,n2", again="1")
    said = job.communicate(timeout=120)[0]
    assert job.returncode == 0, said
    assert world.excluded() == {"gone": "lost: Slurm does not list it any more"}


@pytest.fixture
def told_alive(monkeypatch):
    """Times at which the driver tells its guard that it runs."""
    told: list[float] = []
    monkeypatch.setattr(Folder, "write_heartbeat", lambda self: told.append(time.monotonic()))
    return told


@pytest.fixture
def nodes(world, monkeypatch):
    """Of a job on n1 and n2, in this process."""
    submit.write_scripts(world.job())
    for name, value in world.outside("n1,n2").items():
        monkeypatch.setenv(name, value)
    folder = Folder(world.run_dir)
    return Nodes(folder, "7", lambda: folder.write_heartbeat())


def test_a_port_of_this_node_that_is_taken_is_passed_over(nodes):
    taken = nodes_module.port_of(7, 1)
    with socket.create_server(("", taken)):
        assert nodes._next_port("n1") == taken + 1
        assert nodes._next_port("n1") == taken + 2
    assert nodes._next_port("n2") == taken + 3  # of another node this one knows nothing


def test_the_guard_hears_of_the_driver_while_this_waits_for_answers_of_nodes(world, nodes, told_alive):
    (world.folder / "slow").touch()
    assert nodes.roll_call(["n1", "n2"]) == {}
    assert len(told_alive) >= 3


def test_nodes_that_all_hang_are_named_once_their_common_time_is_up(world, nodes, monkeypatch):
    (world.folder / "hangs").touch()
    monkeypatch.setitem(nodes._plan, "limit_s", 0.5)
    with pytest.raises(files.CommandFailed, match=r"any of the nodes n1, n2: not finished within 0\.5 s"):
        nodes.roll_call(["n1", "n2"])


def test_a_node_that_hangs_is_not_waited_for_again_once_the_time_is_up(nodes, monkeypatch):
    """Of a thousand nodes that hang each would take LOOK_S more."""
    monkeypatch.setattr(nodes_module, "LOOK_S", 600.0)
    with subprocess.Popen(["sleep", "20"], stderr=subprocess.PIPE, text=True) as process:
        assert nodes._stderr_lines(process, time.monotonic() - 1) is None
        process.kill()


def test_the_guard_hears_of_the_driver_while_this_waits_for_the_end_of_a_step(nodes, told_alive, monkeypatch):
    monkeypatch.setattr(nodes_module, "STOP_S", 2.0)
    monkeypatch.setattr(nodes_module, "LOOK_S", 0.05)
    with subprocess.Popen(["bash", "-c", "trap '' TERM; echo ready; sleep 30 & wait; wait"], stdout=-1) as step:
        assert step.stdout is not None
        step.stdout.readline()
        nodes.stop(step)
        step.stdout.close()
    assert step.returncode == -signal.SIGKILL
    assert len(told_alive) >= 2


def test_the_guard_waits_longer_than_a_command_of_slurm_takes():
    assert guard.GUARD_S > files.ANSWER_S + files.ALIVE_S + files.LOOK_S


def wait_for(file: Path) -> None:
    end = time.monotonic() + 120
    while not file.exists():
        assert time.monotonic() < end, f"no {file}"
        time.sleep(0.05)


# -- pre-flight ---------------------------------------------------------------------------------------------------

TESTS = """
import json, pathlib
def do(given, nodes):
    folder = pathlib.Path(given[1])
    if given[0] == "node":
        bad = nodes[0] in {failing!r}
        (folder / (nodes[0] + ".json")).write_text(json.dumps(dict(
            checks=dict(gpus=dict(ok=not bad, reason="7 of 8 GPUs are visible")), versions=dict(torch="2"))))
    else:
        edges = [dict(nodes=[a, b], gb_per_s=20.0) for a, b in zip(nodes, nodes[1:])]
        (folder / "links.json").write_text(json.dumps(dict(nodes=nodes, clocks=dict.fromkeys(nodes, 0.0), edges=edges)))
"""


def test_a_node_that_fails_its_tests_is_left_out(world):
    (world.folder / "tests_of_nodes.py").write_text(TESTS.format(failing=["n1"]))
    code, _ = world.run("0", spares=1, preflight=True)
    assert code == 0
    assert world.steps() == ["--nodelist=n2,n3"]
    assert world.excluded() == {"n1": "failed its pre-flight: gpus: 7 of 8 GPUs are visible"}


def test_a_node_that_fails_in_the_test_of_links_does_not_end_it(world):
    (world.folder / "tests_of_nodes.py").write_text(TESTS.format(failing=[]))
    code, _ = world.run("0", spares=1, preflight=True)
    assert code == 0
    (call,) = world.asked("srun", "links")
    assert "--kill-on-bad-exit=0 --wait=0" in call
    assert call.endswith("--limit-s 30")  # of cluster.start_timeout_s = 120, which the whole test has
    assert len(world.asked("srun", "--kill-on-bad-exit=1")) == 1  # the run


def test_where_nothing_can_be_started_no_node_is_blamed_though_the_first_one_takes_no_part(world):
    submit.write_scripts(world.job(preflight=False))
    (world.run_dir / "launch" / "excluded.jsonl").write_text('{"node": "n1", "reason": "failed its pre-flight"}\n')
    (world.folder / "no steps").touch()
    code, said = world.run("1", spares=1)
    assert code == 1
    assert "no program succeeds on any of the nodes n2, n3: srun: error" in said
    assert world.excluded().keys() == {"n1"}


def test_with_too_few_nodes_that_pass_the_next_job_is_told_which_to_leave_out(world):
    (world.folder / "tests_of_nodes.py").write_text(TESTS.format(failing=["n2"]))
    code, said = world.run("0", nodes="n1,n2", preflight=True)
    assert code == 1
    assert "found:   n2: failed its pre-flight: gpus: 7 of 8 GPUs are visible" in said
    assert "#SBATCH --exclude=n2\n" in (world.run_dir / "launch" / "next.sh").read_text()
    assert world.steps() == []


def test_a_failed_check_is_the_reason():
    checks = {"disk": {"ok": False, "reason": "0.1 GB free"}, "gpus": {"ok": True, "reason": "8 x H100"}}
    assert failed_checks({"checks": checks}) == "disk: 0.1 GB free"


def test_the_version_that_most_nodes_have_counts():
    found = odd_versions({"a": {"torch": "2.13"}, "b": {"torch": "2.12"}, "c": {"torch": "2.13"}})
    assert found == {"b": "versions: torch 2.12, and 2.13 on other nodes"}


def test_clocks_are_held_against_the_median():
    assert wrong_clocks({"a": 0.0, "b": 0.2, "c": -7.0}, 1.0).keys() == {"c"}
    # The first node, against which all are measured, is the wrong one.
    assert wrong_clocks({"a": 0.0, "b": 5.0, "c": 5.1}, 1.0).keys() == {"a"}


def edge(a: str, b: str, speed: float | None) -> dict[str, object]:
    return {"nodes": [a, b], **({"gb_per_s": speed} if speed else {"error": "timed out"})}


def test_a_slow_node_does_not_take_its_neighbours_with_it():
    ring = [edge("a", "b", 20), edge("b", "c", 2), edge("c", "d", 2), edge("d", "a", 20)]
    assert slow_nodes(ring, 0.5) == {"c": "all-reduce: 2 GB/s with its best neighbour, the median is 20"}
    dead = [edge("a", "b", 20), edge("b", "c", None), edge("c", "d", None), edge("d", "a", 20)]
    assert slow_nodes(dead, 0.5) == {"c": "all-reduce with d: timed out"}
    assert slow_nodes([edge("a", "b", 0.1)], 0.5) == {}  # two nodes: nobody says what is slow


def test_who_does_not_come_to_the_first_node_fails_unless_nobody_does():
    found = {"nodes": ["a", "b"], "clocks": {"a": 0.0, "b": 0.0}, "edges": [edge("a", "b", 20)]}
    assert link_faults(found, ["a", "b", "c"], 1.0, 0.5) == {"c": "links: it did not reach a in time"}
    nobody = {"nodes": ["a"], "clocks": {"a": 0.0}, "edges": []}
    assert link_faults(nobody, ["a", "b", "c"], 1.0, 0.5) == {"a": "links: no other node can reach it"}
