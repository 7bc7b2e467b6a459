"""Examples of several turns for the cold start: the same tokens as in RL, and no loss on what tools say."""

from __future__ import annotations

import json

import pytest

from megarl.config.data import DataConfig
from megarl.data.sft import SFTDataset
from megarl.data.tokenizer import character_tokenizer
from megarl.system.errors import ConfigError, DataError

TOKENIZER = character_tokenizer("abcdefghijklmnopqrstuvwxyz0123456789*=[]")
TEMPLATE = (
    "{% for m in messages %}{% if m.role == 'assistant' %}{{ m.content }}<eos>"
    "{% elif m.role == 'tool' %}[{{ m.content }}]{% else %}{{ m.content }}{% endif %}{% endfor %}"
)
TALK = [("assistant", "times"), ("tool", "42"), ("assistant", "is42")]


def dataset(tmp_path, talk, template: str = TEMPLATE, stop_ids: tuple[int, ...] = ()) -> SFTDataset:
    file = tmp_path / "rows.jsonl"
    rows = [{"prompt": "6*7=", "answer": [{"role": r, "content": c} for r, c in talk]}, {"prompt": "1=", "answer": "1"}]
    file.write_text("\n".join(map(json.dumps, rows)))
    config = DataConfig(train_files=[str(file)], override_chat_template=template)
    return SFTDataset(config, TOKENIZER, stop_ids=stop_ids)


def test_answers_of_tools_stand_between_the_turns_and_are_not_learnt(tmp_path):
    batch = dataset(tmp_path, TALK).batch([0, 1])
    ids, mask = batch["response_ids"].unbind(), batch["response_mask"].unbind()
    assert TOKENIZER.decode(ids[0]) == "times<eos>[42]is42<eos>"
    assert TOKENIZER.decode(ids[0][mask[0]]) == "times<eos>is42<eos>"
    assert TOKENIZER.decode(ids[1]) == "1<eos>"
    assert mask[1].all()


def test_turns_end_with_the_token_that_the_template_writes(tmp_path):
    """As those of models whose templates end a turn with another token than the tokenizer's end token."""
    template, star = TEMPLATE.replace("<eos>", "*"), TOKENIZER.convert_tokens_to_ids("*")
    ids = dataset(tmp_path, TALK, template, (star,)).batch([0])["response_ids"].unbind()[0]
    assert TOKENIZER.decode(ids) == "times*[42]is42*"
    with pytest.raises(ConfigError, match=r"rollout\.sampling\.stop_token_ids"):
        dataset(tmp_path, TALK, template)


def test_a_talk_that_does_not_end_with_the_assistant_is_refused(tmp_path):
    with pytest.raises(DataError, match=r"rows.jsonl:1[\s\S]*begin and end with the assistant's"):
        dataset(tmp_path, TALK[:2])
