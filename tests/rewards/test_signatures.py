"""Reward functions written for other trainers are called as those call them."""

from __future__ import annotations

import textwrap
from contextlib import closing

import pytest

from megarl.config.data import RewardConfig
from megarl.rewards.preflight import check_import
from megarl.rewards.registry import load_scorer, own_keys
from megarl.rewards.runner import RewardRunner
from megarl.rewards.scoring import ScoringFailure, score
from megarl.system.errors import ConfigError

CHAT = [{"role": "user", "content": "1+1"}]
TEXT = {"uid": "train-0-1", "prompt": "<user>1+1=", "response": "2", "answer": "2", "data_source": "sums"}
TALK = {**TEXT, "prompt": "<user>1+1", "messages": CHAT, "row": {"level": 3, "uid": "mine", "prompt": CHAT}}
PLAIN = {**TEXT, "messages": None, "row": {"level": 4, "uid": "other", "prompt": "1+1="}}
REWARDS = """
    def texts(completions, **kwargs):
        assert set(kwargs) >= {"prompts", "answer", "level", "uid"}, kwargs
        return [float(c == a) for c, a in zip(completions, kwargs["answer"], strict=True)]

    def talks(prompts, completions, answer, level):
        return [
            float(p[-1]["content"] == "1+1" and c[0]["content"] == a) + l
            for p, c, a, l in zip(prompts, completions, answer, level, strict=True)
        ]

    def plain_prompts(prompts, completions):
        return [float(p == "1+1=") for p in prompts]

    def own_columns(completions, uid, bonus=0.0):
        return [float(u == "mine") + bonus for u in uid]

    def lacks(completions, solution):
        return [0.0 for c in completions]

    def wants_tokens(completions, completion_ids):
        return [0.0 for c in completions]

    def verl(data_source, solution_str, ground_truth, extra_info=None, width=1):
        right = float(solution_str == ground_truth and data_source == "sums")
        return {"overall": right, "level": (extra_info or {}).get("index", 0)}

    def verl_dict(solution_str, ground_truth):
        right = solution_str == ground_truth
        return {"score": 1.0 if right else -1.0, "acc": right, "pred": solution_str}

    def strips(completions, **kwargs):
        return [float(c.strip() == "2") for c in completions]

    def reads(completions, **kwargs):
        return [float(c[0]["content"] == "2") for c in completions]

    async def later(samples):
        return [float(s["response"] == s["answer"]) for s in samples]

    async def trl_later(completions, answer, **kwargs):
        return [float(c == a) for c, a in zip(completions, answer, strict=True)]

    def wide(samples, prompts):
        return [0.0 for s in samples]
"""


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "rewards.py").write_text(textwrap.dedent(REWARDS))


def scores(name: str, *samples: dict, mode: str = "batch", **kwargs) -> list:
    outcomes = dict(score(load_scorer(f"rewards.py:{name}", mode, kwargs), list(samples), stop_at_failure=False))
    return [outcomes[i].reason if isinstance(outcomes[i], ScoringFailure) else outcomes[i] for i in range(len(samples))]


@pytest.mark.parametrize("mode", ["batch", "sequential"])
def test_completions_of_plain_prompts_are_texts(mode):
    assert scores("texts", PLAIN, {**PLAIN, "response": "3"}, mode=mode) == [{"overall": 1.0}, {"overall": 0.0}]
    assert scores("plain_prompts", PLAIN, mode=mode) == [{"overall": 1.0}], "not as a chat template wrote it"


@pytest.mark.parametrize("mode", ["batch", "sequential"])
def test_completions_of_messages_are_messages_and_columns_come_by_name(mode):
    assert scores("talks", TALK, {**TALK, "response": "x"}, mode=mode) == [{"overall": 4.0}, {"overall": 3.0}]


def test_completions_of_the_other_form_are_told_in_the_failure():
    talk, text = scores("strips", TALK)[0], scores("reads", PLAIN)[0]
    assert "no attribute 'strip' (prompts are messages here" in talk
    assert 'a list of messages: c[0]["content"] is its text' in talk
    assert "(prompts are text here, so that each completion is text" in text


def test_columns_are_the_rows_own_and_settings_are_those_of_the_recipe():
    assert scores("own_columns", TALK, PLAIN, bonus=2.0) == [{"overall": 3.0}, {"overall": 2.0}]
    assert own_keys("rewards.py:own_columns") == ["uid", "bonus"]
    assert own_keys("rewards.py:verl") == ["width"]


def test_what_the_data_lacks_is_named():
    assert "the function requires solution" in scores("lacks", PLAIN)[0]
    assert "answer, data_source, level" in scores("lacks", PLAIN)[0]
    assert scores("lacks", PLAIN, solution=["x"]) == [{"overall": 0.0}]


def test_functions_of_one_solution_are_called_for_each_sample():
    row = {**PLAIN, "row": {"extra_info": {"index": 7}}}
    assert scores("verl", row, {**PLAIN, "response": "3"}) == [
        {"overall": 1.0, "level": 7.0},
        {"overall": 0.0, "level": 0.0},
    ]
    assert scores("verl", row, mode="sequential") == [{"overall": 1.0, "level": 7.0}]


@pytest.mark.parametrize("mode", ["batch", "sequential"])
def test_a_result_with_the_names_of_verl_is_a_score_and_a_vote(mode):
    assert scores("verl_dict", {**PLAIN, "response": "3"}, mode=mode) == [
        {"overall": -1.0, "acc": 0.0, "extracted": "3"}
    ]


def test_async_functions_are_run_to_their_end():
    assert scores("later", PLAIN) == scores("later", PLAIN, PLAIN)[:1] == [{"overall": 1.0}]
    with closing(RewardRunner(RewardConfig(name="rewards.py:trl_later"))) as runner:
        assert runner.result(runner.submit([PLAIN, TALK | {"messages": None}])) == [{"overall": 1.0}] * 2


def test_settings_that_no_form_takes_are_refused_before_the_start():
    with pytest.raises(ConfigError, match=r"does not take these arguments(?s:.*)called as TRL does(?s:.*)remove wdth"):
        check_import(RewardConfig(name="rewards.py:talks", kwargs={"wdth": 1}), limit_s=60)
    with pytest.raises(ConfigError, match="nothing provides a value for completion_ids: give it a default"):
        load_scorer("rewards.py:wants_tokens", "batch", {})
    with pytest.raises(ConfigError, match=r"needs more than these(?s:.*)set reward.kwargs.prompts"):
        load_scorer("rewards.py:wide", "batch", {})
