"""Runs that leave groups unfinished at the end of a step: nothing is lost or trained twice, and resuming is exact."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.disaggregated import test_as_ready_loop as test_flow
from tests.runtime import harness

pytestmark = [pytest.mark.procs, pytest.mark.timeout(900)]

STEPS = 3
#: Samples differ in length, so that some groups are complete before others.
OVER = (
    "rollout={oversample: 1.5, sampling: {max_new_tokens: 48, n: 2}}",
    "rollout_correction.preset=decoupled_token_is",
    "actor.engine.micro_batch_tokens=256",
    "validation.every=2",
    "sft.steps=0",
    f"trainer.steps={STEPS}",
)
RUNS = range(1, STEPS + 1)

Numbers = dict[int, dict[str, float]]


@pytest.fixture(scope="module")
def recipe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return harness.write_recipe(tmp_path_factory.mktemp("recipe"))


@pytest.fixture(scope="module")
def whole(recipe: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Numbers]:
    folder = tmp_path_factory.mktemp("whole")
    return folder, train(recipe, folder, *OVER, "trainer.keep_last=9")


def train(recipe: Path, run_dir: Path, *overrides: str, work: Any = test_flow.noting) -> Numbers:
    run_dir.mkdir(exist_ok=True)
    return harness.train(recipe, run_dir, *overrides, work=work)


def check(run_dir: Path, steps: int = STEPS, n: int = 2) -> None:
    """Each of the first prompts is trained on once, in whole groups, with tokens of one step before at most."""
    found = test_flow.trained(run_dir)
    assert {step: len(samples) for step, samples in found.items()} == dict.fromkeys(range(1, steps + 1), 4 * n)
    names = sorted(sample["id"] for samples in found.values() for sample in samples)
    first = test_flow.first_prompts(run_dir, 4 * steps)
    assert names == sorted(f"{uid}#{sample}" for uid in first for sample in range(n))
    ages = {step - 1 - min(sample["versions"]) for step, samples in found.items() for sample in samples}
    assert ages == {0, 1}, "nothing was carried on, or for too long"


def test_every_prompt_is_trained_on_once_and_samples_are_one_step_old_at_most(whole):
    run_dir, numbers = whole
    check(run_dir)
    assert any(len(s["versions"]) > 1 for samples in test_flow.trained(run_dir).values() for s in samples)
    assert [numbers[step]["oversample/started"] for step in RUNS] == [6, 4, 2]
    assert [numbers[step]["oversample/carried"] for step in RUNS] == [2, 2, 0]
    assert all(numbers[step]["oversample/completed"] >= 4 for step in RUNS)
    assert max(numbers[step]["oversample/age/max"] for step in RUNS) == 1


def test_a_run_that_resumes_is_the_undisturbed_one(recipe, whole, tmp_path):
    run_dir, numbers = whole
    checkpoint = run_dir / "checkpoints" / "step_2"
    partials = json.loads((checkpoint / "carried_0.json").read_text())["partials"]
    assert any(sample["token_ids"] and not sample["ended_by"] for group in partials.values() for sample in group)
    resumed = train(recipe, tmp_path, *OVER, f"trainer.resume={checkpoint}")
    assert resumed == {3: numbers[3]}


def test_small_rounds_of_episodes_fill_batches_of_groups_with_a_signal_until_the_epochs_are_over(recipe, tmp_path):
    """In drop mode, so that the prompts of dropped groups begin again."""
    settings = (
        *harness.DAPO,
        *harness.GUESSING,
        *OVER[1:],
        "rollout={oversample: 1.5, carry_steps: 0, round_prompts: 2}",
    )
    few = "trainer={epochs: 0.2, steps: 4}"  # 13 of 65 prompts: four steps if no group was dropped
    numbers = train(recipe, tmp_path, *settings, "rollout.sampling.n=2", few)
    found, last = test_flow.trained(tmp_path), max(numbers)
    assert {step: len(samples) for step, samples in found.items()} == dict.fromkeys(range(1, last + 1), 8)
    rounds = [numbers[step]["sampling/rounds"] for step in range(1, last + 1)]
    assert min(rounds) >= 2
    assert last == next(step for step in range(1, 5) if 2 * sum(rounds[:step]) >= 13) < 4
    assert all(numbers[step]["sampling/surplus"] <= 1 for step in range(1, last + 1))
    assert sum(numbers[step]["oversample/dropped"] for step in range(1, last + 1)) > 0
    names = [sample["id"] for samples in found.values() for sample in samples]
    assert len(set(names)) == len(names)


#: Episodes that a resumed run plays again.
REPLAYABLE = """
import sys
sys.path.append({folder!r})
from guess import Guess

class Same(Guess):
    replayable = True
"""


@pytest.mark.campaign("kills")
@pytest.mark.parametrize("kind", ["samples", "episodes", "drop"])
def test_a_killed_run_goes_on_as_if_it_had_not_been(recipe, tmp_path, kind):
    file = tmp_path / "same.py"
    file.write_text(REPLAYABLE.format(folder=str(Path(harness.__file__).parents[1] / "envs")))
    episodes = (*harness.GUESSING, f"env.name={file}:Same")
    more = {"samples": (), "episodes": episodes, "drop": ("rollout.carry_steps=0",)}[kind]
    numbers = train(recipe, tmp_path / "whole", *OVER, *more)
    with pytest.raises(AssertionError, match=r"rank \d|exit codes"):
        train(recipe, tmp_path / "killed", *OVER, *more, work=test_flow.killed_in_step_3)
    assert train(recipe, tmp_path / "killed", *OVER, *more) == numbers


@pytest.mark.campaign("teams")
def test_another_number_of_replicas_goes_on_with_what_is_in_flight(recipe, whole, tmp_path):
    checkpoint = whole[0] / "checkpoints" / "step_2"
    first = [line for line in (whole[0] / "trained").read_text().splitlines() if json.loads(line)["step"] <= 2]
    (tmp_path / "trained").write_text("\n".join(first) + "\n")
    train(recipe, tmp_path, *OVER, f"trainer.resume={checkpoint}", "cluster.nproc=1")
    check(tmp_path)
