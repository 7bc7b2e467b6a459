"""Tokens of what an environment says, with the delimiters of the chat template."""

from __future__ import annotations

import datetime

import pytest

from megarl.data.rows import Row
from megarl.data.templates import chat_renderer
from megarl.data.tokenizer import character_tokenizer
from megarl.data.turns import Turns
from megarl.system.errors import ConfigError, DataError

EOS = 2
TOKENIZER = character_tokenizer("abcdefghijklmnopqrstuvwxyz-:;0123456789")
TEMPLATE = (
    "{% for m in messages %}{{ m.role }}:{{ m.content }}{{ '<eos>' if m.role == 'assistant' else ';' }}{% endfor %}"
    "{% if add_generation_prompt %}assistant:{% endif %}"
)


def turns(template: str = TEMPLATE) -> Turns:
    render = chat_renderer(TOKENIZER, template)
    return Turns(TOKENIZER, lambda messages: render(messages, Row({}, "here", 0)), [EOS])


def text(tokens: list[int]) -> str:
    return TOKENIZER.decode(tokens)


def test_messages_get_the_delimiters_of_the_template_and_end_tokens_are_not_doubled():
    said = [{"role": "tool", "content": "42"}]
    assert text(turns().following(said, ended=True)) == "tool:42;assistant:"
    assert text(turns().following(said, ended=False)) == "<eos>tool:42;assistant:"
    assert [turns().is_ended(turn) for turn in ([7, EOS], [EOS, 7])] == [True, False]


def test_a_whole_talk_is_the_first_observation_turns_and_what_follows_them():
    made = turns()
    tail = made.following([{"role": "user", "content": "b"}], ended=True)
    tokens = [*made.first([{"role": "user", "content": "a"}]), *TOKENIZER("hi")["input_ids"], EOS, *tail]
    talk = [("user", "a"), ("assistant", "hi"), ("user", "b")]
    render = chat_renderer(TOKENIZER, TEMPLATE)
    assert text(tokens) == render([{"role": r, "content": c} for r, c in talk], Row({}, "here", 0))


@pytest.mark.parametrize("ended", [True, False])
def test_the_own_text_of_an_observation_is_what_the_template_does_not_write(ended):
    made = turns()
    said = [{"role": role, "content": content} for role, content in (("tool", "42"), ("tool", ""), ("user", "tool"))]
    ids = made.following(said, ended=ended)
    runs = made.bodies(said, ids, ended=ended)
    assert [text(ids[start:stop]) for start, stop in runs] == ["42", "tool"]
    assert text(ids[: runs[1][0]]).endswith("user:")  # not the role of the first message
    assert made.bodies("abc", made.following("abc", ended=ended), ended=ended) == [[0, 3]]


def test_text_and_token_ids_are_taken_as_they_are():
    assert text(turns().following("abc", ended=True)) == "abc"
    assert turns().following([5, 6], ended=True) == [5, 6]
    assert turns().first([7]) == [7]


def test_an_unknown_token_that_the_policy_drew_may_be_quoted_and_an_unknown_letter_may_not():
    assert text(turns().following("a<unk>", ended=True)) == "a<unk>"
    with pytest.raises(DataError, match=r"no token for 'A'"):
        turns().following("aA", ended=True)


@pytest.mark.parametrize(
    "template",
    [
        TEMPLATE.replace("{{ m.content }}", "{{ m.content if not (m.role == 'assistant') else '' }}"),
        TEMPLATE.replace("'<eos>'", "';'"),
    ],
    ids=["drops the answer", "no end token"],
)
def test_templates_that_change_or_do_not_end_a_turn_are_refused(template):
    with pytest.raises(ConfigError, match=r"data.override_chat_template[\s\S]*stop_token_ids"):
        turns(template)


def test_a_line_break_may_be_the_end_token():
    tokenizer = character_tokenizer("abcdefghijklmnopqrstuvwxyz:;\n")
    [stop] = tokenizer("\n")["input_ids"]
    render = chat_renderer(tokenizer, TEMPLATE.replace("'<eos>'", "'\\n'"))
    made = Turns(tokenizer, lambda messages: render(messages, Row({}, "here", 0)), [EOS, stop])
    assert made.end == stop
    assert tokenizer.decode(made.following([{"role": "user", "content": "b"}], ended=True)) == "user:b;assistant:"


def test_messages_without_a_template_are_refused():
    with pytest.raises(ConfigError, match=r"data.chat_template=true"):
        Turns(TOKENIZER, None, [EOS]).first([{"role": "user", "content": "a"}])


def test_token_ids_that_the_tokenizer_does_not_have_are_refused():
    turns = Turns(TOKENIZER, None, [EOS])
    assert turns.first([0, len(TOKENIZER) - 1]) == [0, len(TOKENIZER) - 1]
    with pytest.raises(DataError, match=f"found:   {len(TOKENIZER)}"):
        turns.following([0, len(TOKENIZER)], ended=True)


def test_a_template_that_writes_the_date_is_given_that_of_the_run() -> None:
    inner = "{% macro day(form) %}{{ strftime_now(form) }}{% endmacro %}"
    dated = "\n" + inner + "{{ strftime_now('%d %b %Y 100%% %-d') }} {{ day('%F') }}"
    messages, row = [{"role": "user", "content": "a"}], Row({}, "row", 1)
    rendered = chat_renderer(TOKENIZER, dated + TEMPLATE, date="2024-02-09")(messages, row)
    assert rendered == "\n09 Feb 2024 100% 9 2024-02-09" + chat_renderer(TOKENIZER, TEMPLATE)(messages, row)
    assert datetime.date.today().isoformat() in chat_renderer(TOKENIZER, dated + TEMPLATE)(messages, row)
    indented = "  {% if true %}{% endif %}{{ strftime_now('%Y') }}"  # blanks before a block at the start of a line go
    assert chat_renderer(TOKENIZER, indented + TEMPLATE, date="2024-02-09")(messages, row).startswith("2024")
