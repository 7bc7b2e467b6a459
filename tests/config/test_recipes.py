"""What the shipped recipes say about their data, checked on the data."""

import json

import pytest

from megarl.checks.recipe import check_config
from megarl.config.load import load_config
from megarl.dag.placement import place
from megarl.data.prompts import PromptDataset
from megarl.data.tokenizer import load_tokenizer
from megarl.planning.memory import device_memory
from megarl.planning.step import occupied
from megarl.recipes.build import build_task_graph


def prompts(config, split):
    return set(PromptDataset(config.data, load_tokenizer(config.model), split).texts)


def test_quickstart_never_trains_on_held_out_prompts():
    config = load_config("grpo_quickstart")
    train, held_out = prompts(config, "train"), prompts(config, "val")
    assert len(train) == 8100 - 512
    assert len(held_out) == 512
    assert not train & held_out


def test_gsm8k_calculator_never_trains_on_held_out_prompts(tmp_path):
    for name, values in (("train", ["1+2=3", "48/2=24"]), ("test", ["48/2=24", "5*5=25"])):
        rows = [{"question": "?", "answer": f"so <<{value}>>."} for value in values]
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    overrides = [f"data.loader_kwargs.{name}={tmp_path / name}.jsonl" for name in ("train", "test")]
    config = load_config("grpo_gsm8k_calc", overrides)
    assert prompts(config, "train") == {"1+2=", "48/2="}
    assert prompts(config, "val") == {"5*5="}


@pytest.mark.parametrize(
    "name",
    ["grpo_qwen3_8b_8gpu", "grpo_qwen3_30b_a3b_32gpu", "grpo_qwen3_vl_8b_8gpu", "grpo_qwen3_vl_30b_a3b_32gpu"],
)
def test_recipes_for_gpus_generate_on_servers_that_share_the_trainers_gpus(name):
    rollout = load_config(name).rollout
    assert (rollout.engine, rollout.sglang.colocated) == ("sglang", True)


def test_the_asynchronous_recipe_for_a_cluster_fills_its_gpus():
    config = load_config("grpo_async_qwen3_8b_32gpu")
    graph = build_task_graph(config)
    assert occupied(config, place(graph, config)) == config.cluster.nproc == 32


def test_the_8b_recipe_keeps_its_activations():
    """Recomputing all of them costs a quarter of the update, and micro-batches of 8k tokens fit without."""
    engine = load_config("grpo_qwen3_8b_8gpu").actor.engine
    assert (engine.recompute, engine.micro_batch_tokens) == ("none", 8192)


# `large`, `small`: samples of 4095 tokens and one image, of 1003520 and 250880 pixels, that fit a budget of 16384. It
# counts 0.598 tokens for each of 5120 and 1280 patches, or 1.43 for each of 3920 and 980.
@pytest.mark.parametrize(
    ("name", "large", "small"), [("grpo_qwen2_5_vl_7b_8gpu", 2, 3), ("grpo_qwen3_vl_30b_a3b_32gpu", 1, 2)]
)
def test_the_memory_of_recipes_with_images_counts_patches_unless_the_tower_is_frozen(name, large, small):
    def encoder(*changes: str) -> list[float]:
        config = load_config(name, list(changes))
        checked = check_config(config)
        assert checked.placement is not None
        memory = device_memory(config, checked.sizes, checked.placement.teams[0], gpu=True)
        return [term.bytes for term in memory.terms() if "vision encoder" in term.what]

    assert encoder("model.freeze=[tower]") == []
    (whole,), (quarter,) = encoder("model.freeze=[]"), encoder("model.freeze=[]", "data.max_pixels=250880")
    assert whole > 1e8
    assert quarter / small == pytest.approx(whole / large / 4)  # the bytes of one image's patches
