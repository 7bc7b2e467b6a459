"""Whole runs whose rollout has a team of its own, beside those of one team."""

from __future__ import annotations

import os
import re
import signal
from pathlib import Path
from typing import Any

import pytest

from megarl.artifacts.jsonl import read_jsonl
from megarl.artifacts.trained import steps_in
from tests.disaggregated.test_in_order_loop import wait_for
from tests.rollout.servers import running_server
from tests.runtime import harness
from tests.runtime.harness import of_training

pytestmark = [
    *(pytest.mark.procs, pytest.mark.wide, pytest.mark.timeout(900)),
    pytest.mark.usefixtures("forked_ray"),
]

STEPS = ("trainer.steps=2", "validation.every=1")
TWO_TEAMS = (
    "cluster.nproc=2",
    "placement.teams.train={roles: [actor, reference], devices: 1}",
    "placement.teams.draw={roles: [rollout], devices: 1}",
)
FOUR_TEAMS = (
    "cluster.nproc=4",
    "placement.teams.train={roles: [actor], devices: 1}",
    "placement.teams.value={roles: [critic], devices: 1}",
    "placement.teams.frozen={roles: [reference], devices: 1}",
    "placement.teams.draw={roles: [rollout], devices: 1}",
)


@pytest.fixture(scope="module")
def recipe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return harness.write_recipe(tmp_path_factory.mktemp("recipe"))


def test_a_rollout_of_its_own_changes_no_number_of_grpo(recipe, tmp_path):
    """After a cold start, with validation before and after every step."""
    together = harness.train(recipe, tmp_path / "one", *STEPS, "cluster.nproc=1")
    apart = harness.train(recipe, tmp_path / "two", *STEPS, *TWO_TEAMS)
    assert of_training(apart) == together
    assert set(apart) == {0, 1, 2}
    assert apart[0]["sync/verified_tensors"] > 0
    for numbers in apart.values():
        assert "val/acc" in numbers
        assert (numbers["sync/servers"], numbers["sync/failed"]) == (1, 0)
    assert {row["step"] for row in read_jsonl(tmp_path / "one" / "training_samples.jsonl")} == {1, 2}


@pytest.mark.campaign("teams")  # the weights that arrive: tests/sync/test_engines.py
def test_a_team_generates_with_fp8_weights_and_its_gap_is_measured_and_corrected(recipe, tmp_path):
    settings = (*STEPS, *TWO_TEAMS, "sft.steps=0", "rollout_correction.preset=decoupled_token_is")
    numbers = {
        name: harness.train(recipe, tmp_path / name, *settings, f"sync.fp8={name}", f"rollout.dtype={dtype}")
        for name, dtype in (("false", "fp32"), ("true", "fp16"))
    }
    exact, rounded = ([run[step]["rollout_corr/k3_kl"] for step in (1, 2)] for run in numbers.values())
    assert max(exact) < 1e-9
    assert min(rounded) > 1e-7
    weighed = [numbers["true"][step]["rollout_corr/is_weight_max"] for step in (1, 2)]
    assert all(1 < weight <= 2 for weight in weighed)
    sent = [numbers[name][2]["sync/gb"] for name in ("false", "true")]
    assert sent[1] < 0.6 * sent[0], "a byte and scales in place of four bytes, but for embeddings and norms"


def test_two_replicas_draw_turns_of_an_environment_as_one_process_does(recipe, tmp_path):
    """Both take the weights and share out the prompts; the size of a batch decides how products are rounded."""
    settings = (*STEPS, *harness.GUESSING, "sft.steps=0")
    together = harness.train(recipe, tmp_path / "one", *settings, "cluster.nproc=1")
    teams = (*TWO_TEAMS, "cluster.nproc=3", "placement.teams.draw.devices=2")
    apart = of_training(harness.train(recipe, tmp_path / "three", *settings, *teams))
    assert apart.keys() == together.keys()
    for step, numbers in together.items():
        assert apart[step] == pytest.approx(numbers, rel=1e-6, abs=1e-6)


@pytest.mark.campaign("teams")  # the critic and the reference apart: tests/runtime/test_teams.py
def test_ppo_with_a_team_for_every_model_changes_no_number(recipe, tmp_path):
    settings = (*harness.PPO, *STEPS, "sft.steps=2")  # a critic, too, begins where the cold start ends
    together = harness.train(recipe, tmp_path / "one", *settings, "cluster.nproc=1")
    apart = harness.train(recipe, tmp_path / "four", *settings, *FOUR_TEAMS)
    assert of_training(apart) == together


@pytest.mark.parametrize(
    ("metric", "ahead"),
    [
        pytest.param("critic/score/mean", (), marks=pytest.mark.campaign("teams")),
        # Weights 2 of 4 steps are for no training.
        pytest.param("critic/score/mean", ("async.max_staleness=2",), marks=pytest.mark.campaign("teams")),
        ("actor/entropy", ("async.max_staleness=1", "async.order=as_ready", "async.partial=true")),
    ],
)
def test_a_run_that_a_metric_of_training_ends_early_has_its_last_validation(recipe, tmp_path, metric, ahead):
    settings = ("sft.steps=0", "trainer.steps=4", "validation.every=0")
    settings += (f"trainer.early_stop={{metric: {metric}, patience: 1, min_delta: 5.0}}",)
    apart = harness.run(recipe, tmp_path / "two", *settings, *TWO_TEAMS, *ahead)
    assert [step for step in apart if "val/acc" in apart[step]] == [0, 2]
    assert max(apart) == 2
    assert {row["step"] for row in read_jsonl(tmp_path / "two" / "training_samples.jsonl")} == {1, 2}
    assert not (tmp_path / "two" / "restarts.jsonl").exists(), "the launcher ends the other team"
    if not ahead:
        assert of_training(apart) == harness.train(recipe, tmp_path / "one", *settings, "cluster.nproc=1")


@pytest.fixture(scope="module")
def undisturbed(recipe: Path) -> tuple[tuple[str, ...], dict[int, dict[str, float]]]:
    """Settings of a run that nothing happened to, and its metrics."""
    settings = (*TWO_TEAMS, "trainer.steps=5", "validation.every=1", "trainer.save_every=1", "cluster.timeout_s=240")
    return settings, harness.train(recipe, recipe.parent / "whole", *settings)


@pytest.mark.campaign("kills")  # at other places: tests/runtime/test_rollout_killed.py
def test_a_killed_run_goes_on_as_if_nothing_had_happened(recipe, undisturbed, tmp_path):
    settings, expected = undisturbed
    with pytest.raises(AssertionError, match=r"rank \d|exit codes"):
        harness.train(recipe, tmp_path, *settings, work=killed_in_step_4)
    assert steps_in(tmp_path / "checkpoints")[-1] in (2, 3)
    assert of_training(harness.train(recipe, tmp_path, *settings)) == of_training(expected)
    assert not list(tmp_path.glob("checkpoints.old-*")), "it does not start again"


@pytest.mark.campaign("kills")  # the start as of tests/launchers/test_ray.py, the numbers as above
def test_a_run_whose_rollout_worker_is_killed_goes_on_by_itself_from_its_newest_checkpoint(
    recipe, undisturbed, tmp_path
):
    """In a Ray, as users start it."""
    settings, expected = undisturbed
    with harness.held_at(recipe, tmp_path / "checkpoints" / "step_2"):
        process = harness.start(recipe, tmp_path, *settings)
        harness.wait_for((tmp_path / "checkpoints" / "step_2").is_dir, process)
        harness.kill(harness.workers(tmp_path)[1])
    output = harness.finish(process)
    assert process.returncode == 0, output[-4000:]
    assert of_training(harness.metrics(tmp_path)) == of_training(expected)
    assert re.search(r"starts again \(1 of 3; from the checkpoint of step \d\): worker 1 \(draw, rank 0\)", output)


@pytest.mark.servers
@pytest.mark.campaign("servers")  # as ready: tests/runtime/test_sglang_run.py
def test_servers_are_asked_by_one_team_and_filled_by_another(recipe, tmp_path):
    settings = ("rollout.engine=sglang", "sync.verify=every", "cluster.timeout_s=400", "sft.steps=0")
    with running_server(recipe) as server:
        steps = harness.train(recipe, tmp_path, *settings, *server, *STEPS, *TWO_TEAMS)
    for step in (1, 2):
        numbers = steps[step]
        assert (numbers["sync/servers"], numbers["sync/failed"]) == (1, 0)
        assert numbers["sync/verified_tensors"] > 0
        assert numbers["rollout_corr/staleness_max"] == 0
        # Both compute in fp32 with other kernels; old weights would differ by 1e-2.
        assert numbers["rollout_corr/logp_diff_max"] < 1e-4
        assert 0 < numbers["sync/probe_gap"] < 1e-4
        assert "val/acc" in numbers


def killed_in_step_4(recipe: str, run_dir: str, overrides: list[str], teams: list[dict[str, str]]) -> None:
    """The run, whose rollout's worker is killed when it generates step 4, after the checkpoint of step 2."""
    from megarl.runtime.stages import rollout

    generate = rollout.generate

    def generating(c: Any, *arguments: Any, **named: Any) -> Any:
        if c.step == 4:
            wait_for(Path(run_dir) / "checkpoints" / "step_2" / "meta.json")  # this team has written its part
            os.kill(os.getpid(), signal.SIGKILL)
        return generate(c, *arguments, **named)

    rollout.generate = generating
    harness.work_of_rank(recipe, run_dir, overrides, teams)
