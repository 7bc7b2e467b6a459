"""Rewards of several policies: each sample is scored by its policy's function, or by the recipe's."""

from __future__ import annotations

from contextlib import closing

import pytest

from megarl.config.run import RunConfig
from megarl.rewards.policies import PolicyRewards
from megarl.system.errors import ConfigError

FUNCTION = """
def length(samples, factor):
    return [factor * len(sample["response"]) for sample in samples]
"""


def sample(policy, response):
    return {"uid": "u", "prompt": "1+1=", "response": response, "answer": "2", "policy": policy}


def config_of(**solver):
    policies = {"proposer": {}, "solver": {"reward": solver}, "judge": {}}
    return RunConfig(name="x", reward={"name": "numeric", "on_error": -1}, policies=policies)


def test_a_policy_with_a_function_of_its_own_is_scored_by_it_and_others_by_the_recipe_s(tmp_path):
    (tmp_path / "own.py").write_text(FUNCTION)
    config = config_of(name=f"{tmp_path}/own.py:length", kwargs={"factor": 0.5})
    policies, responses = ["solver", "proposer", "solver", "judge"], ["222", "2", "2", "3"]
    with closing(PolicyRewards(config)) as rewards:
        handle = rewards.submit(list(map(sample, policies, responses)))
        results = rewards.result(handle)
        assert handle.done()
        assert [result["overall"] for result in results] == [1.5, 1.0, 0.5, 0.0]
        assert rewards.result(rewards.submit([])) == []


def test_an_error_names_the_policy_s_section():
    with pytest.raises(ConfigError, match=r"policies\.solver\.reward\.name"):
        PolicyRewards(config_of(name="numbric"))
