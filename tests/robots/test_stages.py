"""Rewards, values and advantages of policy calls, against a loop over the calls in float64."""

from __future__ import annotations

import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from megarl.config.load import load_config
from megarl.data.batch import Batch, Jagged
from megarl.data.fields import VALUE_MASK
from megarl.robots.stages import call_value, episode_reward
from megarl.runtime.stages.advantage import advantage
from megarl.system.errors import ConfigError
from megarl.system.metrics import Metrics
from tests.robots.recipes import write_robots_recipe

GAMMA, LAM, FACTOR, TOKENS = 0.9, 0.8, 0.5, 4
#: Executed tokens of each call of three episodes; the simulator of the last one failed.
EXECUTED = [[4, 4, 2], [4, 4], [4, 0]]
PROGRESS = [[0.5, 0.25, 1.0], [0.0, 0.125], [0.5, math.nan]]
SCORES = [1.0, 0.0, 0.0]


def context(folder: Path, *overrides: str) -> Any:
    wanted = f"algorithm.advantage={{name: gae, gamma: {GAMMA}, lam: {LAM}}}"
    config = load_config(write_robots_recipe(folder), [wanted, f"robot.reward.per_call={FACTOR}", *overrides])
    scores = SimpleNamespace(score=lambda samples, step, metrics: torch.tensor(SCORES))
    alone = SimpleNamespace(all_sum=lambda values: values)
    return SimpleNamespace(config=config, scores=scores, step=1, metrics=Metrics(), all_sum=alone.all_sum)


def episodes() -> Batch:
    played = [True, True, False]
    masks = [
        [ok and place < count for count in calls for place in range(TOKENS)]
        for calls, ok in zip(EXECUTED, played, strict=True)
    ]
    ends = [[TOKENS * number for number in range(1, len(calls) + 1)] for calls in EXECUTED]
    mask = Jagged.from_list(masks, dtype=torch.bool)
    fields = {
        "response_mask": mask,
        "response_ids": mask.like(torch.zeros(len(mask.values), dtype=torch.int64)),
        "turn_ends": Jagged.from_list(ends, dtype=torch.int64),
        "success": torch.tensor([True, False, False]),
        "call_progress": Jagged.from_list(PROGRESS, dtype=torch.float32),
    }
    return Batch(fields, {"uid": list("abc"), "env_error": ["", "", "crash"]}, size=3)


def test_rewards_and_values_of_policy_calls_become_their_advantages(tmp_path: Path) -> None:
    c = context(tmp_path)
    values = torch.randn(sum(map(len, EXECUTED)) * TOKENS, generator=torch.Generator().manual_seed(5))
    critic = SimpleNamespace(values=lambda samples: samples["response_mask"].like(values))
    samples = advantage(c, call_value(c, episode_reward(c, episodes()), critic=critic))
    mask, first, expected = samples["response_mask"].values, 0, []
    for calls, progress, score in list(zip(EXECUTED, PROGRESS, SCORES, strict=True))[:2]:
        gains = np.diff([0.0, *progress]) * FACTOR
        gains[-1] += score
        later = {"value": 0.0, "advantage": 0.0}
        for number in reversed(range(len(calls))):
            at = first + number * TOKENS
            value = float(values[at])
            gained = gains[number] + GAMMA * later["value"] - value + GAMMA * LAM * later["advantage"]
            later = {"value": value, "advantage": gained}
            expected.append((at, calls[number], gained, gained + value))
        first += len(calls) * TOKENS
    # Advantages of all calls have mean 0 and variance 1: every call counts once, whatever was executed of it.
    gained = np.array([row[2] for row in expected])
    whitened = (gained - gained.mean()) / gained.std(ddof=1)
    tokens = torch.zeros(2, len(mask), dtype=torch.float64)
    for (at, count, _, target), each in zip(expected, whitened, strict=True):
        tokens[0, at : at + count], tokens[1, at : at + count] = each, target
    # float32 against float64
    for name, wanted in zip(("advantages", "returns"), tokens, strict=True):
        torch.testing.assert_close(samples[name].values.double(), wanted, atol=1e-5, rtol=0)
    assert samples[VALUE_MASK].values.nonzero()[:, 0].tolist() == sorted(row[0] for row in expected)


def test_a_simulator_without_progress_gives_no_rewards_of_calls(tmp_path: Path) -> None:
    samples = episodes()
    samples.set("call_progress", samples["call_progress"].like(torch.full((7,), math.nan)))
    with pytest.raises(ConfigError, match="does not report progress"):
        episode_reward(context(tmp_path), samples)
    rewards = episode_reward(context(tmp_path, "robot.reward.per_call=0"), samples)["token_rewards"].values
    assert rewards.nonzero()[:, 0].tolist() == [9], "the last executed token of the first episode"
