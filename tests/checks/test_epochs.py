"""Epochs become steps of the prompts that are trained on, and what has no epochs is refused."""

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest

from megarl.checks.before_start import with_steps
from megarl.config.load import load_config
from megarl.runtime.epochs import epochs_end, prompts_used
from megarl.runtime.setup import check_epochs
from megarl.runtime.sft import load_held_out
from megarl.system.errors import ConfigError, DataError
from tests.robots.recipes import write_robots_recipe


@pytest.fixture
def recipe(config_of, write):
    """recipe(...) -> a recipe of ten prompts, three of which are overlong."""
    write(
        "".join(json.dumps({"prompt": "1+1=" * (1 + 9 * (i < 3)), "answer": "2"}) + "\n" for i in range(10)), "t.jsonl"
    )
    return lambda *overrides: config_of("data.train_files=[t.jsonl]", "data.batch_size=4", *overrides)


@pytest.mark.parametrize(
    ("overrides", "steps"),
    [
        (["trainer.epochs=1"], 2),  # seven prompts in batches of four: the second one is filled from the next pass
        (["trainer.epochs=4"], 7),
        (["trainer.epochs=0.5"], 1),
        (["trainer.epochs=3", "data.max_prompt_tokens=64"], 8),  # 30 prompts
        ([], 100),
    ],
)
def test_epochs_are_steps_of_the_prompts_that_are_short_enough(recipe, overrides, steps, capsys):
    config = with_steps(recipe(*overrides))
    assert config.trainer.steps == steps
    assert (f"trainer.steps={steps}" in capsys.readouterr().out) == bool(overrides)
    if overrides:
        assert with_steps(config) == config, "of a run folder's recipe, too"


def test_steps_that_are_set_beside_epochs_are_said_to_be_left_out(recipe, capsys):
    with_steps(recipe("trainer.steps=9", "trainer.epochs=1"))
    assert "trainer.steps=2 (not 9, which trainer.epochs=null would use)" in capsys.readouterr().out
    with_steps(recipe("trainer.steps=2", "trainer.epochs=1"))
    with_steps(recipe("trainer.epochs=1"))
    assert "not" not in capsys.readouterr().out


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (
            [
                "algorithm.pipeline=dapo",
                "algorithm.dynamic_sampling.enabled=true",
                "async={max_staleness: 1, order: as_ready}",
            ],
            "with dynamic sampling and async.order",
        ),
        (["algorithm.filter.high=0.9", "async={max_staleness: 1, order: as_ready}"], "with a filter and async.order"),
    ],
)
def test_what_has_no_epochs_is_refused(recipe, overrides, words):
    with pytest.raises(ConfigError, match=words):
        with_steps(recipe("trainer.epochs=2", *overrides))


@pytest.mark.procs
def test_epochs_of_a_robot_are_steps_of_the_start_states_that_are_not_held_out(tmp_path):
    """Of two tasks with five start states each, two of them held out. A dry run starts no simulator."""
    recipe = write_robots_recipe(tmp_path)
    config = load_config(recipe, ["trainer.epochs=3"])
    assert with_steps(config).trainer.steps == 5  # 18 start states in batches of four
    assert "trainer" in with_steps(config, dry=True).uncounted
    again = load_config(recipe, ["trainer.epochs=3", "algorithm.dynamic_sampling={enabled: true, metric: success}"])
    assert with_steps(again).trainer.steps == 5, "at most"


def test_with_dynamic_sampling_the_steps_are_the_most_that_there_can_be(recipe, capsys):
    """Prompts count then: of 7 prompts twice, 14 end the run, whatever was dropped; groups in flight do not count."""
    config = with_steps(recipe("trainer.epochs=2", "algorithm={pipeline: dapo, dynamic_sampling: {enabled: true}}"))
    assert config.trainer.steps == 4
    assert "trainer.steps=4, or fewer: the run ends when" in capsys.readouterr().out
    loader = {"samples": 7, "epoch": 2, "position": 1}
    assert prompts_used({"loader": loader, "carried": {"parts": 2, "groups": 2}}) == 13
    assert epochs_end(config, prompts_used({"loader": loader, "carried": {"parts": 2, "groups": 2}}), 7) is None
    assert epochs_end(config, prompts_used({"loader": loader}), 7) == (
        "15 prompts are 2.14 epochs of 7, and trainer.epochs is 2"
    )
    assert epochs_end(with_steps(recipe("trainer.epochs=2")), 15, 7) is None, "the number of steps ends it"


def test_workers_that_find_other_prompts_say_so(recipe):
    config = with_steps(recipe("trainer.epochs=4"))
    check_epochs(config, 7)
    with pytest.raises(ConfigError, match="10 prompts are 10 steps, but the run was started with 7"):
        check_epochs(config, 10)


@pytest.mark.parametrize(
    ("overrides", "steps"),
    [
        (["sft.epochs=2"], 4),  # seven examples
        (["sft.epochs=2", "sft.max_tokens=5"], None),
        (["sft.steps=3", "sft.epochs=2"], 4),
        (["sft.steps=3"], 3),
    ],
)
@pytest.mark.parametrize("job", ["train", "sft"])
def test_epochs_of_fine_tuning_are_steps_of_its_examples(recipe, overrides, steps, job, capsys):
    config = recipe("sft.batch_size=4", *overrides)
    if steps is None:
        with pytest.raises(DataError, match=r"sft.max_tokens"):
            with_steps(config, job)
        return
    assert with_steps(config, job).sft.steps == steps
    assert (f"sft.steps={steps}" in capsys.readouterr().out) == (config.sft.epochs is not None)


def test_workers_that_find_other_examples_say_so(recipe):
    config = with_steps(recipe("sft.epochs=2", "sft.batch_size=4"))
    check_epochs(config, 7, "sft")
    with pytest.raises(ConfigError, match=r"sft.epochs: 2 epochs of 6 examples are 3 steps(?s:.*)sft.steps=3"):
        check_epochs(config, 6, "sft")


def test_demonstrations_are_no_epoch(recipe):
    with pytest.raises(ConfigError, match="demonstrations are read when the run starts"):
        with_steps(recipe("sft.epochs=2").model_copy(update={"robot": SimpleNamespace()}))


def test_a_held_out_loss_that_is_not_measured_is_named(config_of, capsys):
    config = config_of("sft.train_files=[more.jsonl]", "data.val_files=[test.jsonl]")
    assert load_held_out(SimpleNamespace(config=config, layout=SimpleNamespace(rank=0))) is None
    assert "val/loss is not measured: sft.train_files is set" in capsys.readouterr().out
