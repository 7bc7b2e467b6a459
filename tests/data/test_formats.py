"""Files of other trainers and data sets are read with the recipe that their users would write."""

from __future__ import annotations

import json
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from megarl.checks.rows import check_rows
from megarl.config.load import load_config
from megarl.config.run import RunConfig
from megarl.data.announcement import NO_TOOLS
from megarl.data.preferences import PairDataset
from megarl.data.prompts import PromptDataset
from megarl.data.sft import SFTDataset
from megarl.data.tokenizer import character_tokenizer
from megarl.runtime.setup import _prompts
from megarl.system.errors import DataError, UserError

ALPHABET = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789 .,:?$+=[]<>|/{}\\-'\n"
CHAT = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}<eos>{% endfor %}{% if add_generation_prompt %}<a>{% endif %}"
)
RECIPE = """
name: case
model:
  hf_config: {model_type: qwen3, hidden_size: 64, num_hidden_layers: 4, num_attention_heads: 4, num_key_value_heads: 2,
              head_dim: 16, intermediate_size: 128, vocab_size: 128, max_position_embeddings: 256}
  tokenizer: "chars:ab"
data: {override_chat_template: chat.jinja}
"""
ASKED, SAID = {"role": "user", "content": "What is 2+2?"}, {"role": "assistant", "content": "4"}


@pytest.fixture
def tokenizer():
    return character_tokenizer(ALPHABET)


@pytest.fixture
def recipe(tmp_path, monkeypatch):
    """recipe(rows, *overrides) -> the configuration of a run on a file of these rows."""
    monkeypatch.chdir(tmp_path)
    Path("recipe.yaml").write_text(RECIPE)
    Path("chat.jinja").write_text(CHAT)

    def make(rows: list[dict], *overrides: str, file: str = "parquet") -> RunConfig:
        if file == "parquet":
            pq.write_table(pa.Table.from_pylist(rows), "d.parquet")
        else:
            Path("d.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        return load_config(Path("recipe.yaml"), [f"data.train_files=[d.{file}]", *overrides])

    return make


def prompts(config: RunConfig, tokenizer) -> PromptDataset:
    """As a run reads them, after the checks before it."""
    check_rows(config, "train")
    return _prompts(config, tokenizer, NO_TOOLS, None, "train", scored=True)


def examples(config: RunConfig, tokenizer) -> SFTDataset:
    check_rows(config, "sft")
    return SFTDataset(config.data, tokenizer, config.sft.response_key)


def test_verl(recipe, tokenizer):
    row = {
        "data_source": "openai/gsm8k",
        "prompt": [ASKED],
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": "4"},
        "extra_info": {"split": "train", "index": 0, "answer": "2+2 = 4\n#### 4", "question": "What is 2+2?"},
    }
    config = recipe([row], "data.answer_key=reward_model.ground_truth", "reward.name=gsm8k")
    batch = prompts(config, tokenizer).batch([0])
    assert batch["prompt_text"] == ["<user>What is 2+2?<eos><a>"]
    assert (batch["answer"], batch["data_source"]) == (["4"], ["openai/gsm8k"])
    assert batch["row"][0]["extra_info"]["index"] == 0
    whole = recipe([row], "data.answer_key=extra_info.answer", "reward.name=gsm8k")
    assert prompts(whole, tokenizer).answers == ["2+2 = 4\n#### 4"]
    text = recipe([row], "data.prompt_key=extra_info.question", "data.answer_key=reward_model.ground_truth")
    assert prompts(text, tokenizer).texts == ["<user>What is 2+2?<eos><a>"]


def test_dapo(recipe, tokenizer):
    row = {
        "prompt": [{"content": "Solve: x+1=35. Answer: $Answer", "role": "user"}],
        "reward_model": {"ground_truth": "34", "style": "rule-lighteval/MATH_v2"},
        "data_source": "math_dapo",
        "ability": "MATH",
        "extra_info": {"index": "9a9b6eb4"},
    }
    config = recipe([row], "data.answer_key=reward_model.ground_truth", "reward.name=numeric")
    assert prompts(config, tokenizer).answers == ["34"]
    with pytest.raises(
        DataError, match=r"cannot use the answer in 'reward_model': the answer is an object(?s:.*)ground_truth"
    ):
        check_rows(recipe([row], "data.answer_key=reward_model", "reward.name=math"), "train")
    with pytest.raises(DataError, match=r"no column 'answer'(?s:.*)such as 'reward_model.ground_truth'"):
        check_rows(recipe([row], "reward.name=math"), "train")


def test_openai(recipe, tokenizer):
    system = {"role": "system", "content": "Be brief."}
    more = {"role": "user", "content": [{"type": "text", "text": "And 3+3?"}]}
    talk = [system, ASKED, {**SAID, "weight": 0}, more, {"role": "assistant", "content": "6", "weight": 1}]
    config = recipe([{"messages": talk}], "data.prompt_key=messages", "sft.response_key=messages", file="jsonl")
    data = examples(config, tokenizer)
    assert data.texts == ["<system>Be brief.<eos><user>What is 2+2?<eos><a>"]
    batch = data.batch([0])
    assert tokenizer.decode(batch["response_ids"].values) == "4<eos><user>And 3+3?<eos><a>6<eos>"
    assert batch["response_mask"].values.tolist() == [False] * (len("4<user>And 3+3?<a>") + 2) + [True, True]
    with pytest.raises(DataError, match=r"such as 'messages'"):
        check_rows(recipe([{"messages": talk}], file="jsonl"), "sft")


def test_sharegpt(recipe, tokenizer):
    said = [{"from": "human", "value": "What is 2+2?"}, {"from": "gpt", "value": "4"}, {"from": "human", "value": "Oh"}]
    row = {"id": "x_0", "conversations": said}
    config = recipe([row], "data.prompt_key=conversations", "sft.response_key=conversations", file="jsonl")
    data = examples(config, tokenizer)
    assert (data.texts, data.responses) == (["<user>What is 2+2?<eos><a>"], ["4"])
    with pytest.raises(DataError, match="unknown sender"):
        check_rows(
            recipe([{"conversations": [{"from": "function_call", "value": "f"}]}], *config_keys("conversations")), "sft"
        )


def config_keys(column: str) -> list[str]:
    return [f"data.prompt_key={column}", f"sft.response_key={column}"]


def test_ultrafeedback_and_other_preferences(recipe, tokenizer):
    binarized = {
        "prompt": "What is 2+2?",
        "prompt_id": "f1",
        "chosen": [ASKED, SAID],
        "rejected": [ASKED, {"role": "assistant", "content": "5"}],
        "messages": [ASKED, SAID],
        "score_chosen": 8.5,
        "score_rejected": 4.0,
    }
    for keys in (["sft.response_key=chosen"], ["data.prompt_key=chosen", "sft.response_key=chosen"]):
        data = examples(recipe([binarized], *keys), tokenizer)
        assert (data.texts, data.responses) == (["<user>What is 2+2?<eos><a>"], ["4"])
    assert "rewards read the columns messages from sample['row']" in data.describe() or "chosen" in keys[0]
    first = {"instruction": "What is 2+2?", "completions": [{"model": "m", "response": "4", "overall_score": 8.5}]}
    keys = ["data.prompt_key=instruction", "sft.response_key=completions.0.response"]
    assert examples(recipe([first], *keys), tokenizer).responses == ["4"]
    pair = {"chosen": "4", "rejected": "5"}  # the implicit and the explicit form, as text
    with pytest.raises(UserError, match=r"no column 'prompt'(?s:.*)preference pair(?s:.*)sft.response_key: chosen"):
        check_rows(recipe([pair]), "train")
    with pytest.raises(DataError, match=r"no column 'answer'(?s:.*)preference pair"):
        check_rows(recipe([{"prompt": "2+2", **pair}]), "train")
    explicit = {"prompt": [ASKED], "chosen": [SAID], "rejected": [SAID]}
    assert examples(recipe([explicit], "sft.response_key=chosen"), tokenizer).responses == ["4"]
    assert prompts(recipe([binarized], "reward.name=format"), tokenizer).texts == ["<user>What is 2+2?<eos><a>"]


PAIRS = ("algorithm.pipeline=dpo", "preference={}")


@pytest.mark.parametrize("file", ["parquet", "jsonl"])
def test_pairs_of_ultrafeedback_and_trl_go_through_the_chat_template(recipe, tokenizer, file):
    wrong = {"role": "assistant", "content": "5"}
    rows = {
        "UltraFeedback": {"prompt": "What is 2+2?", "chosen": [ASKED, SAID], "rejected": [ASKED, wrong], "score": 8.5},
        "implicit": {"chosen": [ASKED, SAID], "rejected": [ASKED, wrong]},
        "explicit": {"prompt": [ASKED], "chosen": [SAID], "rejected": [wrong]},
        "text": {"prompt": "What is 2+2?", "chosen": "4", "rejected": "5"},
    }
    for name, row in rows.items():
        config = recipe([row], *PAIRS, file=file)
        assert check_rows(config, "train"), name
        batch = PairDataset(config.data, config.preference, tokenizer).batch([0])
        assert batch["prompt_text"] == ["<user>What is 2+2?<eos><a>"] * 2, name
        assert [tokenizer.decode(ids) for ids in batch["response_ids"].unbind()] == ["4<eos>", "5<eos>"], name
    with pytest.raises(DataError, match=r"d\.jsonl:2: no column 'rejected'"):
        check_rows(recipe([rows["text"], {"prompt": "2", "chosen": "4"}], *PAIRS, file="jsonl"), "train")


def test_trl(recipe, tokenizer):
    plain, talk = {"prompt": "2+2", "completion": "4"}, {"prompt": [ASKED], "completion": [SAID]}
    for row in (plain, talk):
        assert examples(recipe([row], "sft.response_key=completion"), tokenizer).responses == ["4"]
    data = examples(recipe([{"messages": [ASKED, SAID]}], *config_keys("messages")), tokenizer)
    assert (data.texts, data.responses) == (["<user>What is 2+2?<eos><a>"], ["4"])
    with pytest.raises(DataError, match="both 'text', and the column holds no conversation"):
        check_rows(recipe([{"text": "2+2=4"}], *config_keys("text")), "sft")


def test_pictures_are_refused_for_every_job(recipe):
    row = {"prompt": [ASKED], "answer": "4", "images": ["1.png"]}
    config = recipe([row], "data.val_files=[d.parquet]")
    for job in ("train", "sft", "eval", "generate"):
        with pytest.raises(DataError, match=r"d.parquet row 1: column 'images' contains images"):
            check_rows(config, job)
