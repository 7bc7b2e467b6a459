"""Whole runs on better and worse responses: the same in two processes, and when they go on from a checkpoint."""

from __future__ import annotations

import pytest

from megarl.config.load import dump_config, load_config
from tests.forked import Command
from tests.runtime import harness
from tests.runtime.test_same_run import assert_same

pytestmark = [pytest.mark.procs, pytest.mark.timeout(900)]

DATA = "megarl.recipes.arithmetic:make_pairs"
LOADING = "loader_kwargs: {low: 1, high: 9, held_out: 16}, max_prompt_tokens: 8, batch_size: 4"


def overrides(pipeline: str, *more: str) -> list[str]:
    return [
        f"data=!replace {{train_files: ['{DATA}'], val_files: ['{DATA}'], {LOADING}}}",
        f"algorithm=!replace {{pipeline: {pipeline}}}",
        "rollout=!replace {}",
        "validation=!replace {every: 2}",
        "cluster.nproc=1",
        "trainer.steps=3",
        *more,
    ]


@pytest.mark.parametrize(
    ("pipeline", "more"),
    [
        ("dpo", ["preference={beta: 0.5, sft_coef: 0.1}", "actor.mini_batch_size=2"]),
        ("kto", ["preference={loss: kto, beta: 0.5}", "actor.mini_batch_size=2"]),
        ("reward_model", ["preference={loss: bradley_terry}", "sft.steps=0"]),
    ],
)
def test_a_run_is_the_same_in_two_processes_and_after_a_checkpoint(pipeline, more, tmp_path):
    recipe = harness.write_recipe(tmp_path)
    whole = harness.train(recipe, tmp_path / "whole", *overrides(pipeline, *more))
    assert set(whole) == {0, 1, 2, 3}
    assert whole[3]["rewards/margins"] > 0 == whole[0]["val/rewards/margins"]
    assert whole[3]["val/acc"] == whole[3]["val/rewards/accuracies"]
    cut = harness.train(recipe, tmp_path / "cut", *overrides(pipeline, *more, "trainer.steps=2"))
    assert set(cut) == {0, 1, 2}
    if pipeline != "reward_model":  # both at once, which is one run less
        assert_same(harness.train(recipe, tmp_path / "cut", *overrides(pipeline, *more, "cluster.nproc=2")), whole)
        return
    assert harness.train(recipe, tmp_path / "cut", *overrides(pipeline, *more)) == whole
    exported = tmp_path / "whole" / "hf"
    written = dump_config(load_config(recipe, overrides(pipeline, *more)))  # as a launcher does
    (tmp_path / "whole" / "config.yaml").write_text(written)
    for source, name in ((exported, "again"), (tmp_path / "whole" / "checkpoints" / "step_3", "converted")):
        harness.finish(Command(["convert", source, tmp_path / name], tmp_path))
    config = (exported / "config.json").read_text()
    assert "Qwen3ForSequenceClassification" in config
    assert all((tmp_path / name / "config.json").read_text() == config for name in ("again", "converted"))
    assert_same(harness.train(recipe, tmp_path / "two", *overrides(pipeline, *more, "cluster.nproc=2")), whole)
