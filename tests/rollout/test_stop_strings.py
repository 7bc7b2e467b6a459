"""Where stop strings end a turn: the first prefix of its tokens whose text holds one, whatever the tokenizer."""

from __future__ import annotations

import copy
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megarl.config.rollout import HeldOutSamplingConfig, SamplingConfig
from megarl.rollout import stop_strings
from megarl.rollout.stop_strings import StopStrings, TurnText, check_stop_strings
from megarl.system.errors import ConfigError
from tests.data.templates import tokenizer_of


def as_llama() -> Any:
    """Bytes of a character that the vocabulary lacks become the character, as in tokenizers of sentencepiece."""
    from tokenizers import decoders

    made = copy.deepcopy(tokenizer_of("always"))
    parts = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    made.backend_tokenizer.decoder = decoders.Sequence(parts)
    return made


TOKENIZERS = {"bytes": tokenizer_of("bytes"), "metaspace": tokenizer_of("first"), "llama": as_llama()}
STRINGS = ["\n\n", "学", "é!", "</a>", " ", "no", "yes 学", "answer is", "🤖", "a", "I am"]
TEXTS = st.text(st.sampled_from("aé学🤖 \nyesno<>/!"), max_size=60)


def first_prefix(tokenizer: Any, strings: list[str], tokens: list[int]) -> int | None:
    """The rule by brute force: every prefix is decoded."""
    texts = (tokenizer.decode(tokens[:n], skip_special_tokens=True) for n in range(1, len(tokens) + 1))
    return next((n for n, text in enumerate(texts, 1) if any(s in text for s in strings)), None)


@pytest.mark.parametrize("kind", TOKENIZERS)
@settings(max_examples=30)
@given(st.data())
def test_a_turn_ends_with_the_first_token_after_which_its_text_holds_a_string(kind, data):
    """Of tokens of texts, and of any tokens: broken characters, special tokens, and texts longer than the window."""
    tokenizer = TOKENIZERS[kind]
    written = TEXTS.map(lambda text: tokenizer(text, add_special_tokens=False)["input_ids"])
    pieces = data.draw(st.lists(written | st.lists(st.integers(0, len(tokenizer) - 1), max_size=9), max_size=8))
    tokens = [token for piece in pieces for token in piece]
    strings = data.draw(st.lists(st.sampled_from(STRINGS), min_size=1, max_size=2))
    small = data.draw(st.sampled_from([4, 16, 64]))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(stop_strings, "_FIRST_LOOK", small)
        found, end = StopStrings(strings, tokenizer), first_prefix(tokenizer, strings, tokens)
        assert found.end(tokens) == end
        text = tokenizer.decode(tokens[:end], skip_special_tokens=True)
        assert not any(string in found.before(text) for string in strings)
        assert (found.before(text) == text) == (end is None)
        begun = data.draw(st.integers(0, len(tokens) if end is None else end - 1))  # as where a turn is interrupted
        assert found.end(tokens, begun) == end


@pytest.mark.parametrize("kind", TOKENIZERS)
def test_the_window_of_a_long_text_stays_small(kind):
    tokenizer = TOKENIZERS[kind]
    tokens = tokenizer("the answer 学🤖 is yes " * 40, add_special_tokens=False)["input_ids"]
    text = TurnText(StopStrings(["####"], tokenizer))
    assert not any(text.add(token) for token in tokens)
    assert len(text._tokens) <= 128 < len(tokens)


@pytest.mark.parametrize("kind", TOKENIZERS)
def test_a_special_token_in_a_stop_string_is_refused_and_its_id_named(kind):

    check_stop_strings("rollout.sampling", ["</a>", "\n"], TOKENIZERS[kind])
    with pytest.raises(ConfigError, match=r"validation\.sampling\.stop[\s\S]*id 2 to validation.*\.stop_token_ids"):
        check_stop_strings("validation.sampling", ["a</s>"], TOKENIZERS[kind])


@pytest.mark.parametrize("wrong", ["", "a\ufffd"])
def test_no_text_and_half_a_character_are_no_stop_strings(wrong):
    with pytest.raises(ValueError, match="stop"):
        SamplingConfig(stop=["a", wrong])
    assert SamplingConfig(stop=["\n", "a\nb"]).stop == ["\n", "a\nb"]


def test_held_out_samples_end_at_the_strings_of_training_as_well():
    own = HeldOutSamplingConfig(stop=["b"])
    assert own.after(SamplingConfig(stop=["a", "b"])).stop == ["b", "a"]
