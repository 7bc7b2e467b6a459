"""Nodes that die, preemption, and the time limit, on a real Slurm with four virtual nodes on this machine: a campaign.

Nodes that spare ones replace: test_slurm_real.py.
"""

from __future__ import annotations

import subprocess

import pytest

from megarl.launchers.submit import excluded, jobs_of, state_of
from tests.launchers import slurm_cluster
from tests.launchers.slurm_runs import a_slurm, events, launch, said, slow_reward, wait, wait_for_end, wait_for_step
from tests.rollout.servers import need_interpreter
from tests.runtime import harness

pytestmark = [
    *(pytest.mark.procs, pytest.mark.campaign("slurm")),
    pytest.mark.timeout(1500),  # a job waits for Slurm's own deadlines, and the first test for the run to compare with
    pytest.mark.skipif(bool(slurm_cluster.missing()), reason=slurm_cluster.missing()),
]
#: Jobs of `urgent` take the nodes of those of `debug`, which hear of it a minute before.
PARTITIONS = """\
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
SlurmctldParameters=preempt_send_user_signal
PartitionName=debug Nodes=ALL Default=YES MaxTime=60 PriorityTier=1 PreemptMode=REQUEUE GraceTime=60
PartitionName=killed Nodes=ALL MaxTime=60 PriorityTier=1 PreemptMode=REQUEUE GraceTime=0
PartitionName=urgent Nodes=ALL MaxTime=60 PriorityTier=10 PreemptMode=OFF
PartitionName=left Nodes=n[1-2] MaxTime=60 PriorityTier=10 PreemptMode=OFF
PartitionName=right Nodes=n[3-4] MaxTime=60 PriorityTier=10 PreemptMode=OFF
"""
STEPS = 10
FEW = (f"trainer.steps={STEPS}", "trainer.save_every=3", "validation.every=10", "sft.steps=0")
UNTESTED = "launch.preflight=false"


@pytest.fixture
def slurm(tmp_path):
    with a_slurm(tmp_path / "cluster", 4, PARTITIONS) as found:
        yield found


@pytest.fixture(scope="module")
def recipe(tmp_path_factory):
    return harness.write_recipe(tmp_path_factory.mktemp("recipe"))


@pytest.fixture(scope="module")
def local(recipe, tmp_path_factory):
    """Metrics of a run that nothing happens to."""
    return harness.train(recipe, tmp_path_factory.mktemp("local") / "run", *FEW)


def test_without_a_spare_node_another_job_or_the_same_one_again_leaves_out_the_one_that_died(
    slurm, recipe, local, tmp_path
):
    """Whoever is first: Slurm, which puts a job that has lost a node into the queue again, or the job itself."""
    run_dir = tmp_path / "run"
    assert launch(recipe, run_dir, *FEW, UNTESTED, slow_reward(recipe, 0.4)) == 0
    wait_for_step(run_dir, 4)
    slurm.lose("n2")
    wait(lambda: len(events(run_dir, "started")) == 2, "second start")
    assert wait_for_end(run_dir) == "COMPLETED", said(run_dir)
    assert harness.metrics(run_dir) == local
    assert excluded(run_dir).keys() == {"n2"}


@pytest.mark.parametrize("spares", [0, 1])
def test_the_first_node_of_a_job_dies(slurm, recipe, local, tmp_path, spares):
    """Without spare nodes Slurm itself puts the job into the queue again; with them the guard on another node does."""
    run_dir = tmp_path / "run"
    assert launch(recipe, run_dir, *FEW, UNTESTED, slow_reward(recipe, 0.4), f"launch.spares={spares}") == 0
    wait_for_step(run_dir, 4)
    slurm.lose("n1")
    assert wait_for_end(run_dir, 400) == "COMPLETED", said(run_dir)
    assert harness.metrics(run_dir) == local
    assert excluded(run_dir).keys() == {"n1"}
    assert len(jobs_of(run_dir)) == 1  # the same one again
    assert events(run_dir, "restart")


def without_times(run_dir):
    """Metrics without the seconds that teams wait for each other."""
    steps = harness.metrics(run_dir).items()
    return {step: {key: value for key, value in found.items() if not key.startswith("team/")} for step, found in steps}


def urgent(seconds, partition="urgent"):
    command = ["sbatch", f"--partition={partition}", "--nodes=4", "--exclusive", "--output=/dev/null"]
    subprocess.run([*command, f"--wrap=sleep {seconds}"], check=True)


@pytest.mark.parametrize("partition", ["debug", "killed"])
def test_a_preempted_job_goes_on_later(slurm, recipe, local, tmp_path, partition):
    """With time (debug) a checkpoint is written first; without, it goes on from an earlier one."""
    run_dir = tmp_path / "run"
    keys = (UNTESTED, slow_reward(recipe, 0.4), f"launch.slurm.partition={partition}", "launch.slurm.warn_s=50")
    assert launch(recipe, run_dir, *FEW, *keys) == 0
    wait_for_step(run_dir, 4)
    urgent(5)
    (job,) = jobs_of(run_dir)
    wait(lambda: state_of(job.number).name != "RUNNING", "preemption", 90)
    wait(lambda: state_of(job.number).name == "RUNNING", "second start of the job")
    assert wait_for_end(run_dir) == "COMPLETED", said(run_dir)
    assert harness.metrics(run_dir) == local, said(run_dir)
    assert len(jobs_of(run_dir)) == 1
    saved = (run_dir / "checkpoints" / "step_3" / "meta.json").exists()
    assert ("the job is preempted: requesting a checkpoint" in said(run_dir)) == (partition == "debug"), saved


@pytest.mark.timeout(1500)
def test_a_time_limit_of_two_minutes_and_a_chain_of_jobs(slurm, recipe, tmp_path):
    """Nobody but Slurm says when. Its warning comes 45 s before the limit, or up to a minute earlier: a job has at most
    75 s for its steps, and all of them wait for 175 s for their rewards, so there are three jobs at least."""
    run_dir, steps = tmp_path / "run", 70
    few = (f"trainer.steps={steps}", "trainer.save_every=0", "validation.every=35", "sft.steps=0")
    undisturbed = harness.train(recipe, tmp_path / "local", *few)
    limits = ("launch.slurm.time=2", "launch.slurm.warn_s=45", "launch.slurm.chain=12")
    assert launch(recipe, run_dir, *few, *limits, UNTESTED, slow_reward(recipe, 2.5)) == 0
    wait(lambda: len(jobs_of(run_dir)) >= 3, "third job", 600)
    assert wait_for_end(run_dir, 800) == "COMPLETED", said(run_dir)
    assert harness.metrics(run_dir) == undisturbed, said(run_dir)
    assert {state_of(job.number).name for job in jobs_of(run_dir)} == {"COMPLETED"}


def test_teams_on_nodes_of_two_partitions_are_one_ray(slurm, recipe, tmp_path):
    """A heterogeneous job: the actor on a node of `left`, the reference on one of `right`."""
    run_dir = tmp_path / "run"
    teams = "placement.teams={train: {roles: [actor, rollout], devices: 1}, frozen: {roles: [reference], devices: 1}}"
    harness.train(recipe, tmp_path / "local", *FEW, teams)
    undisturbed = without_times(tmp_path / "local")
    apart = ("launch.slurm.partition=left", "launch.slurm.teams={frozen: {nodes: 1, partition: right}}")
    assert launch(recipe, run_dir, *FEW, teams, *apart, "launch.launcher=ray") == 0
    assert wait_for_end(run_dir, 300) == "COMPLETED", said(run_dir)
    assert without_times(run_dir) == undisturbed
    tested = {file.stem for file in (run_dir / "launch" / "preflight").glob("*/n?.json")}
    assert tested == {"n1", "n3"}
    assert events(run_dir, "started")[0].endswith("on n1, n3")
    assert list((run_dir / "launch").glob("job-*.frozen-0.txt"))  # a component has a number of its own


@pytest.mark.servers
def test_servers_of_a_team_on_two_nodes_of_another_partition(slurm, recipe, tmp_path):
    """A heterogeneous job: the workers on nodes of `right` lend what they have to the servers that these start."""
    need_interpreter()
    run_dir = tmp_path / "run"
    few = ("trainer.steps=3", "sft.steps=0", "rollout.engine=sglang", "rollout.sglang.servers=2", "sync.verify=every")
    teams = (
        "cluster={nproc: 3, nnodes: 3, timeout_s: 400}",
        "placement.teams={train: {roles: [actor, reference], devices: 1}, draw: {roles: [rollout], devices: 2}}",
        "launch={launcher: ray, slurm: {partition: left, teams: {draw: {nodes: 2, partition: right}}}}",
    )
    assert launch(recipe, run_dir, *few, UNTESTED, *teams) == 0
    assert wait_for_end(run_dir, 400) == "COMPLETED", said(run_dir)
    assert events(run_dir, "started")[0].endswith("on n1, n3, n4")
    assert sorted(file.name for file in (run_dir / "servers").glob("server_*.log")) == ["server_0.log", "server_1.log"]
    for step in (1, 2, 3):
        numbers = harness.metrics(run_dir)[step]
        assert (numbers["sync/servers"], numbers["sync/failed"]) == (2, 0)
        assert numbers["rollout_corr/logp_diff_max"] < 1e-4  # fp32 with other kernels; old weights differ by 1e-2
