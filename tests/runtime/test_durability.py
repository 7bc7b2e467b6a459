"""kill -9 at any moment; the resumed run equals the undisturbed one bit for bit (fp32, one layout)."""

from __future__ import annotations

import gzip
import json
import shutil
import time
from pathlib import Path

import pytest

from megarl.artifacts.profiles import profile_files
from tests.models.tiny import tiny_drafting
from tests.runtime import harness

pytestmark = [pytest.mark.procs, pytest.mark.timeout(900)]


#: A run that is killed after its second step has one to go.
STEPS = "trainer.steps=3"


@pytest.fixture(scope="module")
def recipe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return harness.write_recipe(tmp_path_factory.mktemp("recipe"))


@pytest.fixture(scope="module")
def whole(recipe: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("undisturbed")
    harness.train(recipe, folder, STEPS)
    return folder


@pytest.fixture(scope="module")
def undisturbed(whole: Path) -> dict[int, dict[str, float]]:
    return harness.metrics(whole)


def at_step(run_dir: Path, step: int) -> bool:
    path = run_dir / "metrics.jsonl"
    return path.exists() and f'{{"step": {step}, "stage": "train"' in path.read_text()


def kill_after_step_2(recipe: Path, run_dir: Path, rank: int, *overrides: str) -> tuple[int | None, str]:
    """Exit code and output of a run that loses a rank before its last step; nobody waits until `cluster.timeout_s`."""
    with harness.held_at(recipe, run_dir / "checkpoints" / "step_2"):
        process = harness.start(recipe, run_dir, STEPS, *overrides, "cluster.timeout_s=600")
        harness.wait_for(lambda: at_step(run_dir, 2), process)
        harness.kill(harness.workers(run_dir)[rank])
    output = harness.finish(process)
    return process.returncode, output


def test_a_run_that_loses_a_rank_names_it_and_goes_on_with_critic_draft_head_and_kl_controller(tmp_path):
    """By itself, from a checkpoint. Without a restart it ends: tests/launchers."""
    recipe = harness.write_recipe(tmp_path, tiny_drafting())
    settings = (*harness.PPO, "actor.mtp={loss_weight: 0.5}")
    whole = harness.train(recipe, tmp_path / "whole", STEPS, *settings)
    assert whole[3]["actor/mtp_grad_norm"] > 0
    run_dir = tmp_path / "killed"
    code, output = kill_after_step_2(recipe, run_dir, 1, *settings, "cluster.max_restarts=1", "tracking.report=true")
    assert code == 0, output[-4000:]
    assert harness.metrics(run_dir) == whole
    assert " starts again (1 of 1; from the checkpoint of step " in output
    assert "rank 1 on " in output
    assert "SIGKILL" in output
    assert "phase" in output
    assert '"name": "restart 1"' in (run_dir / "trace.json").read_text()
    assert "1, the last one because rank 1 on " in (run_dir / "report.html").read_text()
    exported = [(tmp_path / run / "hf/model.safetensors").read_bytes() for run in ("whole", "killed")]
    assert exported[0] == exported[1]
    assert b'"model.layers.1.eh_proj.weight"' in exported[0]


def test_a_run_that_ends_before_the_limit_of_its_job_goes_on_to_the_same_numbers(recipe, undisturbed, tmp_path):
    settings = (STEPS, "trainer.save_every=3", "trainer.resume_every=2", "trainer.save_by_s=0.001")
    output = harness.finish(process := harness.start(recipe, tmp_path, *settings))
    assert process.returncode == 0, output[-4000:]
    assert "saved at step 1: trainer.save_by_s = 0.001" in output
    assert "(from the checkpoint of step 1)" in output
    assert json.loads((tmp_path / "run.json").read_text())["status"] == "stopped"
    assert not (tmp_path / "hf").exists()
    assert harness.train(recipe, tmp_path, *settings[:3]) == undisturbed
    assert (tmp_path / "hf").is_dir()


def test_without_its_launcher_no_rank_lives_on_and_the_resumed_run_is_the_same(recipe, undisturbed, tmp_path):
    start = tmp_path / "checkpoints" / "step_0" / "meta.json"  # before reference, step-0 validation and step 1
    with harness.held_at(recipe, start):
        process = harness.start(recipe, tmp_path, STEPS)
        harness.wait_for(start.is_file, process)
        harness.kill(process.pid)
    process.wait(timeout=60)
    deadline = time.monotonic() + 150
    while harness.workers(tmp_path) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not harness.workers(tmp_path)
    assert harness.train(recipe, tmp_path, STEPS) == undisturbed


def test_damaged_files_beside_the_checkpoints_change_no_number(recipe, whole, undisturbed, tmp_path):
    tmp_path = tmp_path / "run"
    shutil.copytree(whole, tmp_path)
    shutil.rmtree(tmp_path / "checkpoints" / "step_3")
    (tmp_path / "run.json").write_bytes(b"")
    metrics, samples = (tmp_path / name for name in ("metrics.jsonl", "samples.jsonl"))
    metrics.write_bytes(bytes(99) + b"\n" + metrics.read_bytes())
    samples.write_bytes(samples.read_bytes() + b"[]\n" + bytes(99) + b"\n")
    (tmp_path / "config.yaml").write_bytes(b"\xff\xfe" * 9)
    with (tmp_path / "trace" / "rank_0.jsonl").open("ab") as trace:
        trace.write(bytes(99) + b"\n")
    (tmp_path / "log.txt").mkdir()
    (tmp_path / "errors").write_text("")
    (tmp_path / "checkpoints" / "best.json").write_text("[1]")
    process = harness.start(recipe, tmp_path, STEPS)
    output = harness.finish(process)
    assert process.returncode == 0, output[-4000:]
    assert harness.metrics(tmp_path) == undisturbed
    for name in ("run.json", "metrics.jsonl", "samples.jsonl", "trace/rank_0.jsonl", "log.txt", "errors", "best.json"):
        assert sum(f"{name} is damaged" in line or f"{name}: " in line for line in output.splitlines()) == 1, output
    assert '"trace.json"' not in output
    assert (tmp_path / "trace.json").is_file()


def test_a_finished_run_has_nothing_left_to_do_and_one_that_starts_again_keeps_its_checkpoints_aside(recipe, tmp_path):
    short = ("trainer.steps=1", "sft.steps=0", "cluster.nproc=1")
    first = harness.train(recipe, tmp_path / "one", *short)
    process = harness.start(recipe, tmp_path / "one", *short, "trainer.keep_last=3")
    output = harness.finish(process)
    assert harness.metrics(tmp_path / "one") == first
    assert "this run is finished: step 1 of 1 is done" in output
    assert "changed since the checkpoint: trainer.keep_last: 2 -> 3" in output
    assert f"model:  {tmp_path / 'one' / 'hf'}" in output
    assert "FutureWarning" not in output

    assert harness.train(recipe, tmp_path / "one", *short, "trainer.resume=never") == first
    assert (tmp_path / "one" / "checkpoints.old-1" / "step_1" / "meta.json").is_file()
    assert (tmp_path / "one" / "checkpoints.old-1" / "reference" / "config.json").is_file()
    source = tmp_path / "one" / "checkpoints" / "step_1"
    last = ("trainer.steps=2", f"trainer.resume={source}", "trainer.profile={steps: [2]}")
    assert list(harness.train(recipe, tmp_path / "two", *short, *last)) == [2]
    (profile,) = profile_files(tmp_path / "two")
    recorded = gzip.decompress((tmp_path / "two" / profile).read_bytes()).decode()
    assert all(f'"phase: {name}"' in recorded for name in ("load", "rollout", "actor_train"))
    assert (tmp_path / "two" / "reference" / "config.json").is_file()  # for later resumes of this run
