"""Settings that are legal and probably not intended: no reward named, enormous groups, batches larger than the data."""

import pytest

from megarl.checks.checklist import Checklist
from megarl.checks.recipe import check_config
from megarl.checks.rows import check_rows
from megarl.config.load import load_config, recipe_names
from megarl.recipes.components import COMPONENTS
from tests.config.conftest import RECIPE, REWARDED

ROWS = "".join(f'{{"prompt": "{i}+1=", "answer": "{i + 1}"}}\n' for i in range(5))
PAIRS = "".join(f'{{"prompt": "{i}+1=", "chosen": "{i}", "rejected": "+"}}\n' for i in range(5))


@pytest.fixture
def named(write):
    """named(text, ...) -> whether a recipe of this text and these overrides passes without the warning."""

    def judge(text, *overrides, job="train"):
        config = load_config(write(text), overrides, components=COMPONENTS)
        return not [check for check in check_config(config, job=job).items if "names no reward" in check.message]

    return judge


def test_a_recipe_without_a_reward_is_warned_of(named):
    assert not named(RECIPE)
    assert not named(RECIPE, "reward.workers=2")
    assert not named(REWARDED, "reward=!replace {}")
    assert not named(RECIPE, "data.val_files=[megarl.recipes.arithmetic:make_rows]", job="eval")


@pytest.mark.parametrize(
    ("text", "overrides", "job"),
    [
        (REWARDED, (), "train"),
        (RECIPE, ("reward.name=math",), "train"),
        (RECIPE, ("reward.parts={right: {name: math}}",), "train"),
        ("extends: grpo_quickstart\n", (), "train"),
        ("extends: dpo_quickstart\n", (), "train"),
        (RECIPE, (), "sft"),
        (RECIPE, (), "generate"),
    ],
)
def test_a_reward_of_any_layer_is_named_and_what_scores_nothing_needs_none(named, text, overrides, job):
    assert named(text, *overrides, job=job)


@pytest.mark.parametrize("name", recipe_names())
def test_shipped_recipes_name_their_rewards(named, name):
    assert named(f"extends: {name}\n")


@pytest.mark.parametrize(
    ("key", "n", "warns"), [("rollout", 1024, 0), ("rollout", 100_000, 1), ("validation", 5000, 1)]
)
def test_an_enormous_group_is_warned_of(warned, key, n, warns):
    checks = [
        check for check in warned(f"{key}.sampling={{n: {n}, temperature: 1.0}}") if "samples of every" in check.message
    ]
    assert [check.key for check in checks] == [f"{key}.sampling.n"] * warns


@pytest.mark.parametrize(
    ("rows", "settings", "job", "key"),
    [
        (ROWS, ["data.batch_size=6"], "train", "data.batch_size"),
        (ROWS, ["data.batch_size=5"], "train", None),
        (ROWS, ["data.batch_size=5", "data.val_split=2"], "train", "data.batch_size"),
        (ROWS, ["data.batch_size=2", "sft={steps: 1, batch_size: 8}"], "train", "sft.batch_size"),
        (ROWS, ["data.batch_size=99", "sft={steps: 1, batch_size: 8}"], "sft", "sft.batch_size"),
        (
            PAIRS,
            ["algorithm.pipeline=dpo", "preference={loss: sigmoid}", "data.batch_size=6"],
            "train",
            "data.batch_size",
        ),
        (PAIRS, ["algorithm.pipeline=kto", "preference={loss: kto}", "data.batch_size=10"], "train", None),
    ],
)
def test_the_dry_run_warns_of_a_batch_larger_than_the_data(config_of, write, rows, settings, job, key):
    write(rows, "rows.jsonl")
    checks = Checklist(name="rows")
    check_rows(config_of("data.train_files=[rows.jsonl]", *settings), job, checks=checks)
    assert [check.key for check in checks.items if check.status == "warn"] == ([key] if key else [])
