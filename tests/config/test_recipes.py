"""What the shipped recipes say about their data, checked on the data."""

import json

from megarl.config.load import load_config
from megarl.data.prompts import PromptDataset
from megarl.data.tokenizer import load_tokenizer


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
