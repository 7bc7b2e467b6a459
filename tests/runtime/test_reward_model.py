"""A reward model of the run: its scores are those of transformers, and one of the weighted rewards."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.runtime import harness

pytestmark = [pytest.mark.procs, pytest.mark.timeout(600)]

CHARACTERS = "0123456789+-*/=."
LONGEST = 24


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A classifier with random weights, of other sizes than the policy, and with its tokenizer."""
    import torch
    from transformers import AutoModelForSequenceClassification, Qwen3Config

    from megarl.data.tokenizer import character_tokenizer

    path = tmp_path_factory.mktemp("classifier")
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    more = {"num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": LONGEST, "pad_token_id": 0}
    torch.manual_seed(0)
    config = Qwen3Config(vocab_size=20, num_labels=1, bos_token_id=1, eos_token_id=2, **sizes, **more)
    model = AutoModelForSequenceClassification.from_config(config)
    torch.nn.init.normal_(model.score.weight)
    model.save_pretrained(path)
    character_tokenizer(CHARACTERS).save_pretrained(path)
    return path


def of_transformers(folder: Path, rows: list[list[int]]) -> list[float]:
    import torch
    from transformers import AutoModelForSequenceClassification

    model = AutoModelForSequenceClassification.from_pretrained(folder, dtype=torch.float64).eval()
    with torch.inference_mode():
        return [float(model(torch.tensor([row])).logits[0, 0]) for row in rows]


def settings(folder: Path, *more: str, **parts: str) -> list[str]:
    """Settings of a run whose score is half the model's and a function's, with further parts."""
    of_model = "{name: reward_model, weight: 0.5}"
    function = "{name: 'reward.py:closeness'}"
    others = "".join(f", {name}: {part}" for name, part in parts.items())
    return [
        f"reward=!replace {{parts: {{model: {of_model}, digits: {function}{others}}}, timeout_s: 50}}",
        f"reward_model.path={folder}",
        "algorithm.kl.use=none",
        "sft.steps=0",
        "trainer.steps=2",
        "trainer.export_hf=false",
        *more,
    ]


@pytest.fixture(scope="module")
def one(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[int, dict[str, float]]]:
    """A run in one process, in which the reward `classifier` has transformers score the same text."""
    recipe = harness.write_recipe(tmp_path_factory.mktemp("reward_model"))
    same = f"{{name: classifier, weight: 0, kwargs: {{path: {folder}}}}}"
    more = settings(folder, "cluster.nproc=1", "reward_model.form=text", same=same)
    return recipe, harness.train(recipe, recipe.parent / "one", *more)


def test_its_score_is_a_weighted_part_of_the_reward_in_training_and_validation(one, folder):
    from megarl.data.tokenizer import character_tokenizer

    recipe, steps = one
    for numbers in (steps[1], steps[2]):
        assert numbers["reward/model"] == pytest.approx(numbers["reward/same"], abs=1e-5)
        total = 0.5 * numbers["reward/model"] + numbers["reward/digits"]
        assert numbers["reward/overall"] == pytest.approx(total, abs=1e-5) == numbers["critic/score/mean"]
    tokenizer = character_tokenizer(CHARACTERS)
    rows = [json.loads(line) for line in (recipe.parent / "one" / "samples.jsonl").read_text().splitlines()][:8]
    texts = [row["prompt"] + row["response"] + tokenizer.eos_token for row in rows]
    scores = of_transformers(folder, [tokenizer(text, add_special_tokens=False)["input_ids"] for text in texts])
    digits = [sum(c.isdigit() for c in row["response"]) / 6 + (row["response"] == row["answer"]) for row in rows]
    wanted = [0.5 * score + share for score, share in zip(scores, digits, strict=True)]
    assert [row["score"] for row in rows] == pytest.approx(wanted, abs=1e-5)
