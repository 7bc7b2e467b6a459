"""Which calls continue which, and with which tokens."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megarl.gateway.messages import ChatMessage, ToolCall, fold_systems
from tests.gateway.talking import TOOL, Talk, tool, user

CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": [2.0, true]}}\n</tool_call>'


def reply(node) -> ChatMessage:
    return replace(node.reply)


def causes(talk: Talk) -> list[str]:
    return [node.cause for node in talk.record.nodes]


@pytest.mark.parametrize("family", ["qwen2.5", "qwen3", "llama3", "gemma"])
def test_a_call_that_extends_another_continues_its_tokens_as_the_template_writes_the_whole_talk(family):
    talk = Talk(family)
    first = [user("hello")]
    node = talk.say(first, "yes")
    second = [*first, reply(node), user("and 2?")]
    node = talk.say(second, "no")
    third = [*second, reply(node), user("are you kind")]
    node = talk.begin(third)
    assert (node.parent, causes(talk)) == (1, ["", "", ""])
    whole = talk.form._render(third, [])
    assert talk.tokenizer.decode(talk.read[-1]) == talk.tokenizer.decode(talk.ids(whole))
    assert talk.read[-1] == [*talk.read[1], *talk.record.nodes[1].token_ids, *node.prompt_ids]


@pytest.mark.parametrize("family", ["qwen2.5", "qwen3"])
def test_results_of_calls_continue_the_tokens_that_made_the_calls(family):
    talk = Talk(family)
    asked = [ChatMessage("system", "you are kind"), user("1+2?")]
    node = talk.say(asked, CALL, [TOOL])
    [call] = node.reply.calls
    assert (node.reply.content, call.name, json.loads(call.arguments)) == ("", "add", {"a": 1, "b": [2.0, True]})
    node = talk.begin([*asked, reply(node), tool("3"), tool("4")], [TOOL])
    text = talk.tokenizer.decode(node.prompt_ids)
    assert node.parent == 0
    assert text.count("<|im_start|>user") == 1  # the two results are one message of this template
    assert text.startswith("\n<|im_start|>user\n<tool_response>\n3")
    assert text.endswith("<|im_start|>assistant\n")


def test_json_spelled_again_null_content_and_thoughts_left_out_are_the_same_message():
    talk = Talk()
    asked = [user("1+2?")]
    node = talk.say(asked, f"<think>\nadd\n</think>\n\n{CALL}", [TOOL])
    assert node.reply.reasoning == "add"
    [call] = node.reply.calls
    spelled = ToolCall("other", "add", '{"b":[2.0,true],"a":1}')
    node = talk.begin([*asked, ChatMessage("assistant", calls=(spelled,)), tool("3")], [TOOL])
    assert node.parent == 0
    for wrong in (
        '{"a": 1.0, "b": [2.0, true]}',
        '{"a": true, "b": [2.0, true]}',
        '{"a": 1, "a": 1, "b": [2.0, true]}',
    ):
        changed = ChatMessage("assistant", calls=(replace(call, arguments=wrong),))
        assert talk.begin([*asked, changed, tool("3")], [TOOL]).parent is None
    thought = replace(reply(talk.record.nodes[0]), reasoning="subtract")
    assert talk.begin([*asked, thought, tool("3")], [TOOL]).cause == "history"


def test_thoughts_that_the_template_drops_are_a_branch_or_kept_as_history_says():
    for history, parent, cause in (("template", None, "template"), ("exact", 0, "")):
        talk = Talk(history=history)
        node = talk.say([user("1?")], "<think>\nso\n</think>\n\nyes")
        node = talk.begin([user("1?"), reply(node), user("2?")])
        assert (node.parent, node.cause) == (parent, cause)
        assert ("so" in talk.text(node)) == (history == "exact")
    talk = Talk()  # within one question the template keeps the thoughts, and the client need not send them
    node = talk.say([user("1?")], f"<think>\nso\n</think>\n\n{CALL}", [TOOL])
    node = talk.begin([user("1?"), replace(reply(node), reasoning=""), tool("3")], [TOOL])
    assert node.parent == 0
    assert "so" in talk.text(node)


def test_broken_and_unlisted_calls_are_text():
    talk = Talk()
    for text, tools in ((CALL.replace("}}", "}"), [TOOL]), (CALL, [])):
        node = talk.say([user("1?")], text, tools)
        assert (node.reply.content, node.reply.calls) == (text, ())


def test_the_same_question_again_is_a_sibling_and_each_can_be_continued():
    talk = Talk(history="exact")
    first = [user("hello")]
    left, right = talk.begin(first), talk.begin(first)  # in flight together
    talk.answer(left, "yes")
    talk.answer(right, "no")
    assert causes(talk) == ["", "sibling"]
    for node in (right, left):
        assert talk.begin([*first, reply(node), user("why")]).parent == node.number
    node = talk.begin([*first, reply(left), user("kind")])
    assert (node.parent, node.cause) == (0, "sibling")
    assert [leaf.number for leaf in talk.record.leaves()] == [2, 3, 4]


def test_equal_replies_are_continued_from_the_latest_that_arrived():
    talk = Talk(history="exact")
    first = [user("hello")]
    talk.say(first, "yes")
    node = talk.say(first, "yes")
    talk.say(first, "yes", delivered=False)
    assert talk.begin([*first, reply(node), user("why")]).parent == 1


def test_what_begins_a_sequence_of_its_own_and_why():
    talk = Talk(history="exact")
    first = [user("hello")]
    node = talk.say(first, "yes", [TOOL])
    cut = talk.say([*first, reply(node), user("why")], "the answer is", [TOOL], finish="length")
    lost = talk.say([*first, reply(node), user("kind")], "no", [TOOL], delivered=False)
    calls = {
        "cut": [*first, reply(node), user("why"), reply(cut), user("go")],
        "undelivered": [*first, reply(node), user("kind"), reply(lost), user("go")],
        "history": [*first, replace(reply(node), content="yes "), user("why")],  # white space counts
        "root": [ChatMessage("system", "add"), *first],
    }
    for cause, messages in calls.items():
        node = talk.begin(messages, [TOOL])
        assert (node.parent, node.cause) == (None, cause)
        assert talk.read[-1] == talk.ids(talk.form._render(messages, [TOOL]))
    assert talk.begin(first).cause == "tools"


def test_system_messages_in_the_middle_are_folded_only_for_templates_that_refuse_them():
    messages = [user("a"), ChatMessage("system", "b"), user("c"), ChatMessage("system", "d")]
    assert [m.content for m in fold_systems(messages)] == ["a", "b\n\nc", "d"]
    assert "system\nb" in Talk("qwen3").form._render(messages, [])
    strict = Talk("qwen3")
    refuses = "{%- for m in messages %}{%- if m.role == 'system' and not loop.first %}{{ raise_exception('no') }}"
    strict.form._template = type(strict.template)(  # the same template, which takes a system message first only
        strict.tokenizer, f"{refuses}{{% endif %}}{{% endfor %}}{strict.family.template}", strict.template._tools, {}
    )
    assert "user\nb\n\nc<" in strict.form._render(messages, [])


TEXTS = st.sampled_from(["yes", "no add", "<think>\nso\n</think>\n\nkind", CALL, "", "the [INST] <|im_start|>", "é学"])


@settings(max_examples=30, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 9), TEXTS, st.sampled_from(["more", "again", "edit", "drop", "cut", "lose"]))))
def test_the_tokens_of_a_path_are_what_the_engine_read_and_generated(moves):
    """Whatever a client does with its history, no token that was sampled is tokenised again on a path."""
    talk, histories = Talk(history="exact"), [[user("hello")]]
    for pick, text, move in moves:
        messages = list(histories[pick % len(histories)])
        if move == "edit":
            messages[0] = user(f"add {pick}")
        elif move == "drop":
            messages = [replace(m, reasoning="") if m.role == "assistant" else m for m in messages]
        node = talk.begin(messages, [TOOL])
        talk.answer(node, text, tools=True, finish="length" if move == "cut" else "stop", delivered=move != "lose")
        follow = tool("3") if node.reply.calls else user("and")
        if move != "again":
            histories.append([*messages, reply(node), follow])
    for node, read in zip(talk.record.nodes, talk.read, strict=True):
        assert talk.record.tokens(node) == [*read, *node.token_ids]
        if node.parent is not None:
            above = talk.record.tokens(talk.record.nodes[node.parent])
            assert read[: len(above)] == above
