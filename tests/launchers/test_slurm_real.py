"""`megarl launch` on a real Slurm with four virtual nodes on this machine."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from megarl import cli
from megarl.commands.cluster import last_step
from megarl.launchers.submit import excluded, jobs_of, state_of
from tests.launchers import slurm_cluster, slurm_runs
from tests.launchers.forking_python import forking_python
from tests.launchers.slurm_runs import a_slurm, events, said, slow_reward, wait, wait_for_end, wait_for_step
from tests.ray_forks.clusters import offered
from tests.runtime import harness

pytestmark = [
    pytest.mark.procs,
    pytest.mark.timeout(400),
    pytest.mark.skipif(bool(slurm_cluster.missing()), reason=slurm_cluster.missing()),
]
STEPS = 10
FEW = (f"trainer.steps={STEPS}", "trainer.save_every=5", "validation.every=5", "sft.steps=0")


@pytest.fixture(scope="module", autouse=True)
def slurm(tmp_path_factory):
    with a_slurm(tmp_path_factory.mktemp("slurm") / "cluster", 4) as found:
        yield found


@pytest.fixture(scope="module")
def recipe(tmp_path_factory):
    return harness.write_recipe(tmp_path_factory.mktemp("recipe"))


@pytest.fixture(scope="module")
def local(recipe, tmp_path_factory):
    return harness.train(recipe, tmp_path_factory.mktemp("local") / "run", *FEW)


@pytest.fixture(scope="module")
def forking(tmp_path_factory):
    """The key that lets the nodes fork their programs."""
    with offered():
        yield f"launch.slurm.python={forking_python(tmp_path_factory.mktemp('python'))}"


def launch(recipe: Path, run_dir: Path, *keys: str) -> int:
    """Without tests of the nodes, which one test below has."""
    return slurm_runs.launch(recipe, run_dir, *FEW, "launch.preflight=false", *keys)


@pytest.mark.campaign("slurm")  # the script as of test_slurm_job.py, the numbers as of two nodes in test_ray.py
def test_two_nodes_of_a_ray_have_the_metrics_of_the_local_launcher(slurm, recipe, local, forking, tmp_path):
    run_dir = tmp_path / "run"
    assert launch(recipe, run_dir, forking, "launch.launcher=ray") == 0
    wait_for_step(run_dir, 1)
    names = {process.name() for process in slurm.processes()}
    assert {"gcs_server", "raylet"} <= names
    lines = [" ".join(process.cmdline()) for process in slurm.processes()]
    assert not [line for line in lines if "ray.util.client" in line or "dashboard.py" in line or "monitor.py" in line]
    assert wait_for_end(run_dir) == "COMPLETED", said(run_dir)
    assert harness.metrics(run_dir) == local


def test_a_chain_of_jobs_that_is_cancelled_and_goes_on_has_the_metrics_of_the_local_launcher(
    recipe, local, forking, tmp_path, capsys
):
    """The signal that Slurm sends before the time limit comes from the test, which cannot wait for minutes."""
    run_dir = tmp_path / "a run"
    chain = (
        forking,
        "launch.launcher=torchrun",
        "launch.slurm.chain=1",
        "launch.slurm.warn_s=60",
        "trainer.save_every=0",
    )
    assert launch(recipe, run_dir, *chain, slow_reward(recipe, 0.4)) == 0
    wait_for_step(run_dir, 3)
    (first,) = jobs_of(run_dir)
    subprocess.run(["scancel", "--batch", "--signal=USR1", first.number], check=True)
    wait(lambda: not state_of(first.number).active, "end of the first job", run_dir=run_dir)
    assert state_of(first.number).name == "COMPLETED", said(run_dir)
    assert (run_dir / "launch" / "chain").read_text() == "0\n"
    assert "no checkpoint" not in said(run_dir)

    wait_for_step(run_dir, last_step(run_dir) + 1)
    assert cli.main(["cancel", str(run_dir)]) == 0
    assert wait_for_end(run_dir) == "CANCELLED"
    assert len(jobs_of(run_dir)) == 2
    assert last_step(run_dir) < STEPS

    assert launch(recipe, run_dir, *chain, slow_reward(recipe, 0)) == 0
    assert cli.main(["logs", "-f", str(run_dir)]) == 0  # until the job ends
    *_, last = jobs_of(run_dir)
    assert state_of(last.number).name == "COMPLETED", said(run_dir)
    assert len(jobs_of(run_dir)) == 3
    assert harness.metrics(run_dir) == local, said(run_dir)
    for job in jobs_of(run_dir):
        assert len(list((run_dir / "launch").glob(f"job-{job.number}.node-?.txt"))) == 2
    capsys.readouterr()
    assert cli.main(["status", str(run_dir)]) == 0
    shown = capsys.readouterr().out
    assert f"finished, step {STEPS} of {STEPS}" in shown
    assert "CANCELLED" in shown


@pytest.mark.parametrize(
    ("keys", "expected"),
    [
        (["launch.slurm.partition=debg"], "did you mean debug?"),
        (["cluster.nnodes=8", "cluster.nproc=8", "data.batch_size=8"], "cluster.nnodes"),
        (["launch.slurm.time=99-0"], "launch.slurm.time"),
    ],
)
def test_what_the_cluster_does_not_have_is_refused_before_anything_is_written(recipe, tmp_path, capsys, keys, expected):
    assert launch(recipe, tmp_path / "run", *keys) == 2
    assert expected in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


@pytest.mark.timeout(1500)  # the job waits for Slurm's own deadlines
def test_a_node_that_fails_its_tests_and_one_that_dies_are_replaced_by_spare_ones(
    slurm, recipe, local, forking, tmp_path, capsys
):
    run_dir = tmp_path / "run"
    broken = """launch.slurm.setup=['if [ "$SLURMD_NODENAME" = n1 ]; then export TMPDIR=/proc; fi']"""
    keys = (*FEW, "trainer.save_every=3", forking, slow_reward(recipe, 0.4), broken, "launch.spares=2")
    assert slurm_runs.launch(recipe, run_dir, *keys) == 0
    wait_for_step(run_dir, 4)
    slurm.lose("n3")
    assert wait_for_end(run_dir) == "COMPLETED", said(run_dir)
    assert harness.metrics(run_dir) == local, said(run_dir)
    assert len(jobs_of(run_dir)) == 1
    found = excluded(run_dir)
    assert found["n1"] == "failed its pre-flight: disk: /proc: 0.0 GB free, launch.preflight_disk_gb = 1"
    assert found["n3"].startswith("lost: ")
    started = events(run_dir, "started")
    assert [text.partition(" on ")[2] for text in started] == ["n2, n3, spare: n4", "n2, n4"]
    capsys.readouterr()
    assert cli.main(["status", str(run_dir)]) == 0
    shown = capsys.readouterr().out
    assert "disk: /proc: 0.0 GB free" in shown
    assert "lost n3: the run starts again in this job, from the checkpoint of step 3" in shown
