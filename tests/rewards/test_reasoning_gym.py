"""Rows and scores of the real package reasoning-gym."""

from __future__ import annotations

import sys

import pytest

from megarl.data.rows import make_row
from megarl.rewards.reasoning_gym import _UNSEEDED, rows
from megarl.rewards.registry import load_scorer
from megarl.system.errors import ConfigError

#: Tasks that accept several answers and name none.
WITHOUT_ANSWER = {"boxnet", "graph_color", "propositional_logic", "rubiks_cube", "rush_hour"}


@pytest.fixture
def package():
    return pytest.importorskip("reasoning_gym", reason="pip install '.[reasoning-gym]'")


def score(row: dict, response: str, **kwargs) -> dict:
    scorer = load_scorer("reasoning_gym", "batch", kwargs)
    return scorer.function({**make_row(row, "source", 1, "row"), "response": response}, **scorer.kwargs)


def test_held_out_problems_are_repeatable_and_none_for_training(package):
    asked = {"tasks": {"leg_counting": None, "chain_sum": {"min_digits": 1, "max_digits": 1}}, "size": 60}
    train, held = (rows(split, **asked, val_size=20, seed=3) for split in ("train", "val"))
    assert (len(train), len(held)) == (60, 20)
    assert [row["data_source"] for row in train[:3]] == [
        f"reasoning_gym/{asked}" for asked in ("leg_counting", "chain_sum")
    ] + ["reasoning_gym/leg_counting"]
    assert not {row["prompt"] for row in train} & {row["prompt"] for row in held}
    assert rows("val", **asked, val_size=20, seed=3) == held
    assert rows("val", **asked, val_size=20, seed=4) != held


# rearc compares tuples, prime_factorization raises on text, word_sorting gives parts of the score
@pytest.mark.parametrize("task", ["leg_counting", "rearc", "prime_factorization", "word_sorting"])
def test_the_tasks_own_answer_scores_1_and_text_of_any_kind_less(package, task):
    for row in rows(tasks=task, size=2, val_size=0):
        tagged = f"<answer>no</answer> or <answer>\n{row['answer']}\n</answer> it is"
        assert score(row, tagged) == {"overall": 1.0, "acc": 1.0, "answered": 1.0, "extracted": row["answer"].strip()}
        assert score(row, row["answer"])["answered"] == 0.0
        assert score(row, row["answer"], tag=None)["acc"] == 1.0
        for wrong in ("<answer>%</answer>", "<answer></answer>", row["answer"], "</answer><answer>", ""):
            assert score(row, wrong)["overall"] < 0.5, wrong


@pytest.mark.campaign("connectors")
def test_every_task_scores_its_own_answer_in_the_reward(package):
    scored = 0
    for task in sorted(set(package.factory.DATASETS) - set(_UNSEEDED)):
        for row in rows(tasks=task, size=3, val_size=0, seed=11):
            score(row, "<answer>%</answer>")  # must not raise; game_of_life_halting counts it as "False"
            if task not in WITHOUT_ANSWER:
                assert score(row, f"<answer>{row['answer']}</answer>")["overall"] == 1.0, (task, row)
                scored += 1
    assert scored == 297


def test_mistakes_are_named_before_a_run(package):
    with pytest.raises(
        ConfigError, match=r"data.loader_kwargs.tasks: .*\n  found: .*leg_countin'\n.*\n.*'leg_counting'"
    ):
        rows(tasks="leg_countin")
    with pytest.raises(ConfigError, match=r"tasks.leg_counting: (?s:.*)'min_animalz'(?s:.*)allowed: min_animals, max_"):
        rows(tasks={"leg_counting": {"min_animalz": 1}})
    with pytest.raises(ConfigError, match=r"val_size: the tasks have too few(?s:.*)\d+ problems that are not among"):
        rows("val", {"chain_sum": {"max_terms": 2, "max_digits": 1}}, size=300)


def test_the_missing_package_is_named_with_its_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "reasoning_gym", None)
    with pytest.raises(ConfigError, match=r"reasoning-gym cannot be imported(?s:.*)pip install '.\[reasoning-gym\]'"):
        rows()


@pytest.mark.campaign("connectors")
@pytest.mark.timeout(400)
def test_a_run_trains_on_a_task(package, tmp_path):
    from tests.runtime.harness import train, write_recipe

    source = "megarl.rewards.reasoning_gym:rows"
    run_metrics = train(
        write_recipe(tmp_path),
        tmp_path / "run",
        f"data={{train_files: [{source!r}], val_files: [{source!r}], max_prompt_tokens: 96, batch_size: 4, "
        "loader_kwargs: !replace {tasks: {chain_sum: {max_terms: 2, max_digits: 1}}, size: 40, val_size: 8}}",
        "reward=!replace {name: reasoning_gym, timeout_s: 100, kwargs: {tag: null}}",
        "model.tokenizer=chars: 0123456789+-*/=.:abcdefghijklmnopqrstuvwxyzS",
        "model.hf_config.vocab_size=50",
        "model.hf_config.max_position_embeddings=128",
        "actor.engine.micro_batch_tokens=256",
        "sft.steps=0",
        "trainer.steps=2",
    )
    assert run_metrics[2]["reward/answered"] == 1.0
    assert "val/acc" in run_metrics[2]
