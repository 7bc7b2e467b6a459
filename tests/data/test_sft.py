"""Supervised examples: prompt tokens as in RL, response and end token learned."""

import json

import pytest

from megarl.config.data import DataConfig
from megarl.data.loader import PromptLoader
from megarl.data.prompts import PromptDataset
from megarl.data.sft import SFTDataset
from megarl.data.tokenizer import character_tokenizer
from megarl.system.errors import DataError
from tests.same import same


@pytest.fixture
def tokenizer():
    return character_tokenizer("0123456789+= ")


def config(tmp_path, rows) -> DataConfig:
    (tmp_path / "d.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return DataConfig(train_files=[str(tmp_path / "d.jsonl")], format_prompt="{{ content }}=")


def test_response_ends_with_the_end_token_and_all_of_it_is_learned(tmp_path, tokenizer):
    data = SFTDataset(config(tmp_path, [{"prompt": "1+1", "answer": "2"}, {"prompt": "9+9", "answer": 18}]), tokenizer)
    batch = data.batch([1, 0])
    assert [tokenizer.decode(ids) for ids in batch["prompt_ids"].unbind()] == ["9+9=", "1+1="]
    assert [tokenizer.decode(ids) for ids in batch["response_ids"].unbind()] == ["18<eos>", "2<eos>"]
    assert batch["response_mask"].lengths.tolist() == [3, 2]
    assert batch["response_mask"].values.all()
    assert batch["response_text"] == ["18", "2"]


def test_prompts_are_those_of_rl(tmp_path, tokenizer):
    settings = config(tmp_path, [{"prompt": "1+1", "answer": "2"}])
    expected = PromptDataset(settings, tokenizer).batch([0])
    batch = SFTDataset(settings, tokenizer).batch([0])
    assert same(batch.drop(["response_ids", "response_mask", "response_text"]), expected)


def test_the_loader_draws_examples(tmp_path, tokenizer):
    data = SFTDataset(config(tmp_path, [{"prompt": str(i), "answer": str(i)} for i in range(5)]), tokenizer)
    batch = next(PromptLoader(data, 8, 1, 2))
    assert len(batch) == 4
    assert batch["response_text"] == [text.removesuffix("=") for text in batch["prompt_text"]]


def test_another_response_column_is_other_data(tmp_path, tokenizer):
    settings = config(tmp_path, [{"prompt": "1", "answer": "2", "solution": "1 2"}])
    assert SFTDataset(settings, tokenizer).fingerprint != SFTDataset(settings, tokenizer, "solution").fingerprint


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"prompt": "1", "answer": None}, r"d.jsonl:1: column 'answer' does not hold a response"),
        ({"prompt": "1", "answer": 0.5}, r"column 'answer' does not hold a response(?s:.*)found:   0.5"),
        ({"prompt": "1", "answer": True}, "column .answer. does not hold a response"),
        ({"prompt": "1", "answer": ""}, r"d.jsonl:1: the response is empty"),
        ({"prompt": "1", "answer": "x"}, r"no token for 'x'"),
    ],
)
def test_bad_responses_name_the_row(tmp_path, tokenizer, row, message):
    with pytest.raises(DataError, match=message):
        SFTDataset(config(tmp_path, [row]), tokenizer)


def test_a_missing_response_column_names_the_key(tmp_path, tokenizer):
    with pytest.raises(DataError, match=r"no column 'solution'(?s:.*)sft.response_key"):
        SFTDataset(config(tmp_path, [{"prompt": "1", "answer": "2"}]), tokenizer, "solution")


def test_examples_longer_than_the_model_takes_are_dropped_and_counted(tmp_path, tokenizer):
    rows = [{"prompt": "1", "answer": "1234"}, {"prompt": "1", "answer": "12"}, {"prompt": "123", "answer": "1"}]
    settings = config(tmp_path, rows)
    data = SFTDataset(settings, tokenizer, max_tokens=5)  # with "=" and the end token: 7, 5 and 6
    assert (data.responses, data.texts, data.answers, data.too_long) == (["12"], ["1="], ["12"], 2)
    assert data.describe() == "sft: 1 example of 5 tokens; 2 longer than 5 tokens dropped"
    assert data.batch([0])["prompt_text"] == ["1="]
    with pytest.raises(DataError, match=r"d.jsonl:1: (?s:.*)in 2 of 3 rows(?s:.*)7 tokens(?s:.*)filter"):
        SFTDataset(settings.model_copy(update={"overlong": "error"}), tokenizer, max_tokens=5)
    with pytest.raises(DataError, match="in 3 of 3 rows"):
        SFTDataset(settings, tokenizer, max_tokens=4)


def test_long_examples_lose_the_end_of_their_response_where_they_may(tmp_path, tokenizer):
    rows = [{"prompt": "1", "answer": text} for text in ("12345", "12")] + [{"prompt": "111111", "answer": "1"}]
    data = SFTDataset(config(tmp_path, rows), tokenizer, max_tokens=6, overlong="cut")
    assert [tokenizer.decode(ids) for ids in data.response_ids.unbind()] == ["1234", "12<eos>"]
    assert (data.cut, data.too_long) == (1, 1)  # the prompt of the third leaves no room
    assert "1 longer than 6 tokens dropped; 1 cut to 6 tokens" in data.describe()
    with pytest.raises(DataError, match=r"sft.overlong: filter"):
        SFTDataset(config(tmp_path, rows), tokenizer, max_tokens=6, overlong="error")
