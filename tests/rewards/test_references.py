"""Reference answers that a reward cannot use are found before the start; where nothing reads them, none is needed."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from megarl.config.data import RewardConfig
from megarl.config.run import RunConfig
from megarl.data.rows import Row
from megarl.rewards.parts import functions_of
from megarl.rewards.references import check_answers, reads_answers, uses_reward
from megarl.rewards.registry import load_scorer
from megarl.system.errors import DataError

COMPARING = ["exact_match", "gsm8k", "math", "numeric"]


def check(name: str, value: object, **kwargs) -> None:
    row = Row({"gold": value}, "d.jsonl", 7, "line")
    check_answers({"reward": RewardConfig(name=name, kwargs=kwargs)}, "gold", [(row, value)])


@pytest.mark.parametrize("name", COMPARING)
@pytest.mark.parametrize(
    ("value", "words"),
    [
        ({"ground_truth": "7", "style": "rule"}, "the answer is an object(?s:.*)data.answer_key: gold.ground_truth"),
        (None, "the answer is null"),
        (True, "the answer is true or false"),
        (math.nan, "the answer is not a finite number"),
        (-math.inf, "the answer is not a finite number"),
        ("", "the answer is empty"),
        (" \n", "the answer is empty"),
        (["7", "8"], "the answer is a list(?s:.*)reward.kwargs.answers: any"),
        ([], "the answer is a list"),
    ],
)
def test_what_is_no_answer_names_row_and_reward(name, value, words):
    with pytest.raises(
        DataError, match=rf"d.jsonl:7: the reward {name} cannot use the answer in 'gold': (?s:.*){words}"
    ):
        check(name, value)


@pytest.mark.parametrize("name", COMPARING)
def test_text_and_numbers_are_answers_and_lists_where_any_of_them_may_be_met(name):
    for value in ("7", 7, 7.5, -1):
        check(name, value)
    check(name, ["7", 8], answers="any")
    for value in ([], ["7", ""], ["7", None], [["7"]]):
        with pytest.raises(DataError, match="cannot use the answer"):
            check(name, value, answers="any")


def test_answers_without_a_number_are_named_where_one_is_needed():
    for name in ("gsm8k", "numeric"):
        with pytest.raises(DataError, match=r"d.jsonl:7: (?s:.*)seven"):
            check(name, "seven")
    check("format", None)


def test_answers_are_checked_for_the_rewards_of_policies():
    policies = {"left": {"reward": {"name": "numeric"}}, "right": {}}
    config = RunConfig(name="case", reward={"name": "format"}, env={"name": "talks.py:Talk"}, policies=policies)
    row = Row({"gold": ["7"]}, "d.jsonl", 7, "line")
    with pytest.raises(DataError, match=r"reward numeric (?s:.*)set policies\.left\.reward\.kwargs\.answers: any"):
        check_answers(functions_of(config), "gold", [(row, ["7"])])


def test_any_of_several_answers_is_enough():
    sample = {"prompt": "", "response": "8", "answer": ["7", 8]}
    one = load_scorer("numeric", "batch", {})
    some = load_scorer("numeric", "batch", {"answers": "any"})
    assert some.function(sample, **some.kwargs) == {"overall": 1.0, "extracted": "8"}
    assert some.function({**sample, "response": "9"}, **some.kwargs)["overall"] == 0.0
    with pytest.raises(ValueError, match="the answer is a list"):
        one.function(sample, **one.kwargs)


@pytest.mark.parametrize(
    ("settings", "reads", "uses"),
    [
        ({"reward": {"name": "math"}}, True, True),
        ({"reward": {"name": "format"}}, False, True),
        ({"reward": {"name": "rewards.py:style"}}, False, True),
        ({"reward": {"name": "answers.py:right"}}, True, True),
        ({"reward": {"name": "nowhere:fn"}}, True, True),
        ({"reward": {"name": "format"}, "env": {"name": "tools"}}, False, True),
        ({"reward": {"name": "math"}, "env": {"name": "games.py:Game"}}, False, False),
        ({"reward": {"name": "math"}, "env": {"name": "talks.py:Talk"}}, True, True),
        ({"reward": {"name": "format"}, "env": {"name": "answers.py:Game"}}, True, False),
    ],
)
def test_answers_are_asked_for_where_something_reads_them(tmp_path, monkeypatch, settings, reads, uses):
    monkeypatch.chdir(tmp_path)
    Path("rewards.py").write_text("def style(samples):\n    return [0.0 for s in samples]\n")
    Path("answers.py").write_text(
        "def right(samples):\n    return [float(s['response'] == s['answer']) for s in samples]\n"
    )
    Path("games.py").write_text("class Game:\n    pass\n")
    Path("talks.py").write_text("class Talk:\n    scores = False\n")
    config = RunConfig(name="case", **settings)
    assert (reads_answers(config), uses_reward(config)) == (reads, uses)
