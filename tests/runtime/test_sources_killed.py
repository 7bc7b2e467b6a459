"""kill -9 of the actor of a run of two teams with experts, replay or a curriculum.

In order the resumed run goes on as if nothing had happened; as samples get ready every prompt is trained on once, with
the experts that were drawn for it, and replayed groups are those that were stored.
"""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest

from megarl.rollout.seeds import Seeds
from tests.disaggregated import test_as_ready_loop as test_flow
from tests.disaggregated import test_in_order_loop as test_ahead
from tests.runtime import harness

pytestmark = [pytest.mark.procs, pytest.mark.wide, pytest.mark.timeout(900), pytest.mark.campaign("kills")]

EXPERTS = (
    'data.experts={files: ["megarl.recipes.arithmetic:make_rows"], response_key: answer, in_group: true, share: 0.5}',
    *("algorithm.loss.name=luffy", "algorithm.advantage.norm_by_std=false"),
)
REPLAY = ("data.replay={share: 0.5, max_age: 4}", "rollout_correction.preset=ppo_is_bypass", "actor.mini_batch_size=2")
IN_ORDER = {
    "experts": EXPERTS,
    "replay": REPLAY,
    "curriculum": ("data.curriculum.pools={hard: {up_to: 0.4, weight: 4}, easy: {weight: 0.2}}",),
}


@pytest.fixture(scope="module")
def recipe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return harness.write_recipe(tmp_path_factory.mktemp("recipe"))


@pytest.mark.parametrize("source", IN_ORDER)
def test_in_order_the_numbers_are_those_of_an_undisturbed_run(recipe, tmp_path, source):
    settings = IN_ORDER[source]
    whole = test_ahead.train(recipe, tmp_path / "whole", *settings)
    assert any(name.startswith(f"{source}/") for name in whole[4])
    with pytest.raises(AssertionError, match=r"rank \d|exit codes"):
        test_ahead.train(recipe, tmp_path / "killed", *settings, work=test_ahead.killed_in_step_3)
    assert test_ahead.train(recipe, tmp_path / "killed", *settings) == whole


def test_as_samples_get_ready_each_group_has_its_experts_once(recipe, tmp_path):
    test_flow.killed_and_resumed(recipe, tmp_path, *EXPERTS)
    experts = [sample for step in test_flow.trained(tmp_path).values() for sample in step if "#expert" in sample["id"]]
    check_fresh(tmp_path, lambda step, samples: [sample for sample in samples if "#expert" not in sample["id"]])
    prompts = test_flow.first_prompts(tmp_path, 4 * test_flow.STEPS)
    chosen = [uid for uid in prompts if random.Random(Seeds(0).expert(uid)).random() < 0.5]
    assert sorted(map(test_flow.prompt_of, experts)) == sorted(chosen)
    assert {version for sample in experts for version in sample["versions"]} == {-1}


def test_as_samples_get_ready_groups_are_replayed_after_a_kill_as_they_were_stored(recipe, tmp_path):
    numbers = test_flow.killed_and_resumed(recipe, tmp_path, *REPLAY)
    found = test_flow.trained(tmp_path)
    fresh = {sample["id"]: (step, sample) for step, samples in found.items() for sample in samples[:16]}
    for step, samples in found.items():
        again = samples[16:]
        assert len(again) == 4 * numbers[step]["replay/groups"]
        for sample in again:
            before, original = fresh[sample["id"]]
            assert before < step
            assert [sample[name] for name in ("versions", "tokens", "length", "score")] == [
                original[name] for name in ("versions", "tokens", "length", "score")
            ]
            assert step - 1 - min(sample["versions"]) <= 4
    assert numbers[3]["replay/groups"] == 4, "the checkpoint has the groups of the steps before the kill"
    check_fresh(tmp_path, lambda step, samples: samples[:16])


def check_fresh(run_dir: Path, choose: Any) -> None:
    """Check that every prompt is trained on once by the samples that `choose(step, samples)` returns."""
    kept = [line for step, samples in test_flow.trained(run_dir).items() for line in choose(step, samples)]
    (run_dir / "trained").write_text("".join(f"{json.dumps(line)}\n" for line in kept))
    test_flow.check(run_dir, test_flow.STEPS)
