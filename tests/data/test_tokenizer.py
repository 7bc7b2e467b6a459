"""Tokenizers: one token per character, and folders."""

import hypothesis.strategies as st
import pytest
from hypothesis import given

from megarl.config.model import ModelConfig
from megarl.data.light_tokenizer import WrittenTokenizer
from megarl.data.tokenizer import character_tokenizer, load_tokenizer, word_tokenizer
from megarl.system.errors import ConfigError

ALPHABET = "0123456789+-=? \n<>aä"
TOKENIZER = character_tokenizer(ALPHABET)


def test_one_token_per_character_after_four_special_ones():
    tokenizer = load_tokenizer(ModelConfig(tokenizer="chars:0123"))
    assert (tokenizer.pad_token_id, tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.unk_token_id) == (
        0,
        1,
        2,
        3,
    )
    assert tokenizer("0123")["input_ids"] == [4, 5, 6, 7]
    assert len(tokenizer) == 8


@given(st.text(ALPHABET, max_size=30))
def test_text_survives_the_trip(text):
    ids = TOKENIZER(text)["input_ids"]
    assert TOKENIZER.decode(ids) == text or "<" in text
    if "<" not in text:
        assert len(ids) == len(text)


def test_one_token_per_word(tmp_path):
    tokenizer = load_tokenizer(ModelConfig(tokenizer="words:push the  disc"))
    assert tokenizer("the disc\n push  it")["input_ids"] == [5, 6, 4, 3]
    assert tokenizer.decode([4, 5, 6]) == "push the disc"
    tokenizer.save_pretrained(tmp_path)
    assert load_tokenizer(ModelConfig(tokenizer=str(tmp_path)))("disc the")["input_ids"] == [6, 5]


def test_words_are_known_without_transformers():
    words = "a b cd"
    real, light = word_tokenizer(words), WrittenTokenizer(f"words:{words}")
    for texts in ("cd a  b", ["b", "", "\tx a"]):
        assert light(texts)["input_ids"] == real(texts)["input_ids"]


def test_it_reloads_from_its_folder(tmp_path):
    TOKENIZER.save_pretrained(tmp_path)
    again = load_tokenizer(ModelConfig(tokenizer=str(tmp_path)))
    text = "1+1 =\n 2  "
    assert again(text)["input_ids"] == TOKENIZER(text)["input_ids"]
    assert again.decode([*again(text)["input_ids"], again.eos_token_id], skip_special_tokens=True) == text
    assert again.eos_token_id == TOKENIZER.eos_token_id


def test_the_model_folder_is_the_default(tmp_path):
    TOKENIZER.save_pretrained(tmp_path)
    assert load_tokenizer(ModelConfig(path=str(tmp_path))).eos_token == "<eos>"


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (ModelConfig(), "model.tokenizer: the run has no tokenizer"),
        (ModelConfig(tokenizer="chars:"), "the alphabet is empty"),
        (ModelConfig(tokenizer="chars:abca"), "repeats characters: 'a'(?s:.*)write 'chars:abc'"),
        (ModelConfig(tokenizer="chars:ab\ud83d"), "the alphabet contains half of a surrogate pair"),
        (ModelConfig(tokenizer="words: "), "the list of words is empty"),
        (ModelConfig(tokenizer="words:up to up"), "repeats words: 'up'(?s:.*)write 'words:up to'"),
        (ModelConfig(tokenizer="./not/there"), "model.tokenizer: the tokenizer cannot be loaded"),
    ],
)
def test_bad_names_are_told(model, message):
    with pytest.raises(ConfigError, match=message):
        load_tokenizer(model)


def test_a_tokenizer_without_an_end_token_is_refused(tmp_path):
    tokenizer = character_tokenizer("ab")
    tokenizer.eos_token = None
    tokenizer.save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match="no end token"):
        load_tokenizer(ModelConfig(tokenizer=str(tmp_path)))
