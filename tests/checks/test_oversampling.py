"""What rounds of generation that leave groups unfinished do not go with is refused before a run starts."""

from __future__ import annotations

import pytest

from megarl.artifacts.facts import ModelFacts
from megarl.checks.recipe import check_config

OVER = "rollout.oversample=1.5"
DAPO = ("algorithm.pipeline=dapo", "algorithm.dynamic_sampling.enabled=true", "data.batch_size=32")
MOE = ModelFacts("test", "qwen3_moe", 4, 64, 4, 2, 16, 96, 32, 256, False, experts=4, experts_per_token=2)


@pytest.mark.parametrize(
    ("overrides", "key", "words"),
    [
        (("data.curriculum.pools={all: {}}",), "data.curriculum", "the order in which groups are complete"),
        (("rollout.stale_steps=1",), "rollout.stale_steps", "between older weights"),
        (("rollout.sampling.min_new_tokens=4",), "rollout.sampling.min_new_tokens", "count from 0 again"),
        (("actor.parallel.cp=2", "cluster.nproc=2"), "rollout.oversample", "would wait for all groups anyway"),
        (
            (
                "cluster.nproc=2",
                "placement.teams={train: {roles: [actor], devices: 1}, draw: {roles: [rollout], devices: 1}}",
            ),
            "rollout.oversample",
            "but another team generates",
        ),
    ],
)
def test_it_is_refused(failures, overrides, key, words):
    (check,) = failures(OVER, *overrides)
    assert (check.key, words in check.message) == (key, True), check.message


def test_it_is_allowed(failures):
    assert failures(OVER) == []
    assert failures(OVER, "rollout.carry_steps=0", "rollout.sampling.min_new_tokens=4") == []
    assert failures(OVER, *DAPO, "rollout.round_prompts=16") == []


def test_experts_of_an_embedded_engine_decode_in_rounds(config_of):
    found = [check for check in check_config(config_of(OVER), hf=MOE).items if check.status == "fail"]
    assert [check.key for check in found] == ["rollout.oversample"]


def test_older_tokens_without_a_correction_are_warned_of(warned):
    assert "rollout.carry_steps" in [check.key for check in warned(OVER)]
    for repaired in ("rollout_correction.preset=decoupled_token_is", "rollout.carry_steps=0"):
        assert "rollout.carry_steps" not in [check.key for check in warned(OVER, repaired)]


def test_small_rounds_need_dynamic_sampling(failures):
    (check,) = failures("data.batch_size=32", "rollout.round_prompts=16")
    assert (check.key, "every step would be too small" in check.message) == ("rollout.round_prompts", True)
    (check,) = failures(*DAPO, "rollout.round_prompts=64")
    assert "more groups than a step trains on" in check.message
