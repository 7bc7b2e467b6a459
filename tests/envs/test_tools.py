"""Tool use: schemas, the formats of calls, and the processes that run them."""

from __future__ import annotations

import json
import time
from concurrent.futures import Future
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from PIL import Image

from megarl.config.run import RunConfig
from megarl.data.images import open_image
from megarl.envs import Action
from megarl.envs.host import Host
from megarl.envs.registry import check_environment, load_environment
from megarl.envs.tools import Tools, ToolSettings
from megarl.envs.tools.functions import load_tools
from megarl.envs.tools.parsers import PARSERS, Call
from megarl.envs.tools.schema import tool_of
from megarl.envs.tools.worker import _answer
from megarl.system.errors import ConfigError
from tests.envs import some_tools

FILE = str(Path(__file__).parent / "some_tools.py")
ALL = [f"{FILE}:{name}" for name in ("shift", "sums", "misbehave")]
#: A forked process of tools has the address space of all that the tests import.
OF_A_FORK = {"memory_mb": 1 << 16}


def test_the_schema_comes_from_signature_and_docstring():
    assert tool_of(some_tools.shift).schema == {
        "type": "function",
        "function": {
            "name": "shift",
            "description": "Move every letter of a text in the alphabet.",
            "parameters": {
                "type": "object",
                "properties": {
                    "text": {"type": "string", "description": "what is moved."},
                    "by": {"type": "integer", "default": 1, "description": "how far, and no further."},
                    "way": {"type": "string", "enum": ["up", "down"], "default": "up", "description": "direction."},
                },
                "required": ["text"],
            },
        },
    }


@pytest.mark.parametrize(
    ("name", "message"), [("untyped", "'a' of the tool 'untyped' has no type"), ("silent", "has no docstring")]
)
def test_functions_that_tell_a_model_too_little_are_refused(name, message):
    with pytest.raises(ConfigError, match=message):
        tool_of(getattr(some_tools, name))


@pytest.mark.parametrize(
    ("names", "message"),
    [
        ([f"{FILE}:nothing"], "has no function 'nothing'"),
        ([f"{FILE}:shift", f"{FILE}:shift"], r"two tools have the same name[\s\S]*shift"),
        (["shift"], "allowed: file.py:fn, pkg.mod:fn"),
    ],
)
def test_tools_that_are_not_there_are_named(names, message):
    with pytest.raises(ConfigError, match=message):
        load_tools(names)


ADD = Call("add", {"a": 1, "b": "x"})
SAY = Call("say", {"q": "a </think> b <think>"})
BODY = '"arguments": {"a": 1, "b": "x"}'


@pytest.mark.parametrize(
    ("parser", "text", "calls"),
    [
        ("qwen", f'<think>a sum</think><tool_call>\n{{"name": "add", {BODY}}}\n</tool_call><|im_end|>', [ADD]),
        ("qwen25", f'<tool_call>{{"name": "add", {BODY}}}</tool_call>' * 2, [ADD, ADD]),
        ("qwen", '<tool_call>{"name": "add", "arguments": "{\\"a\\": 1, \\"b\\": \\"x\\"}"}</tool_call>', [ADD]),
        ("qwen", '<tool_call>{"name": "now"}</tool_call>', [Call("now")]),
        (
            "qwen",
            f'<think><tool_call>{{"name": "x"}}</tool_call></think><tool_call>{{"name": "add", {BODY}}}</tool_call>',
            [ADD],
        ),
        (
            "qwen",
            f'<tool_call>{{"name": "x"}}</tool_call></think><tool_call>{{"name": "add", {BODY}}}</tool_call>',
            [ADD],
        ),
        ("qwen", '<think><tool_call>{"name": "x"}</tool_call>', []),
        ("qwen", '<tool_call>{"name": "say", "arguments": {"q": "a </think> b <think>"}}</tool_call>', [SAY]),
        ("qwen", "The answer is {42}.", []),
        ("llama3", f'{{"name": "add", {BODY.replace("arguments", "parameters")}}}<|eot_id|>', [ADD]),
        (
            "llama3",
            f'<|python_tag|>{{"name": "add", {BODY}}}; {{"name": "now", "parameters": {{}}}}<|eom_id|>',
            [ADD, Call("now")],
        ),
        ("llama3", '<|python_tag|>add.call(a=1, b="x")<|eom_id|>', [ADD]),
        ("llama3", "It is 42.<|eot_id|>", []),
    ],
)
def test_calls_are_read_in_the_models_formats(parser, text, calls):
    assert PARSERS[parser](text) == calls


DEEP = '{"a":' * 100_000


@pytest.mark.parametrize(
    ("parser", "text", "error"),
    [
        ("qwen", '<tool_call>{"name": "add"', "no </tool_call>"),
        ("qwen", "<tool_call>add(1)</tool_call>", "not valid JSON"),
        ("qwen", "<tool_call>[1]</tool_call>", "a call is a JSON object"),
        ("qwen", '<tool_call>{"name": "add", "arguments": [1]}</tool_call>', '"arguments" is a JSON object'),
        ("llama3", '{"name": "add", ', "not valid JSON"),
        ("llama3", "<|python_tag|>import os", "name.call"),
        ("llama3", "<|python_tag|>add.call(os.name)", "name.call"),
        ("qwen", f"<tool_call>{'[' * 100_000}</tool_call>", "not valid JSON"),
        ("qwen", f"<tool_call>{json.dumps({'name': 'add', 'arguments': DEEP})}</tool_call>", "is a JSON object"),
        ("llama3", '{"name": "add", "parameters": ' + DEEP, "not valid JSON"),
        ("llama3", f"<|python_tag|>add.call(a={'-' * 100_000}1)", "name.call"),
        ("llama3", f"<|python_tag|>add.call(a={'(' * 1000})", "name.call"),
        ("llama3", "<|python_tag|>add.call(a={[]: 1})", "name.call"),
        ("llama3", "<|python_tag|>add.call(a={{}, 1})", "name.call"),
        ("llama3", "<|python_tag|>add.call(a={1, 2})", "name.call"),
        ("llama3", "<|python_tag|>add.call(a=b'x')", "name.call"),
        ("llama3", "<|python_tag|>add.call(a={1: 2})", "name.call"),
        ("llama3", f"<|python_tag|>add.call(a=0x{'f' * 9000})", "name.call"),
    ],
)
def test_malformed_calls_say_what_is_wrong(parser, text, error):
    [call] = PARSERS[parser](text)
    assert error in call.error


@pytest.fixture(scope="module")
def answer():
    """answer(turn, ...) -> what the environment says to these turns of an episode, and the info of the last one."""
    kind, settings = load_environment({"name": "tools", "tools": ALL, "timeout_s": 4.0, "memory_mb": 3072})
    host = Host(kind, settings)
    session = host.session()

    def ask(*calls: Any) -> tuple[list[str] | None, dict[str, float]]:
        text = "".join(c if isinstance(c, str) else f"<tool_call>{json.dumps(c)}</tool_call>" for c in calls)
        session.begin(0, {}, 0, [Action(text, text, [1], "stop", 0)])
        reply = session.all_answers()[0]
        assert not reply.error
        assert reply.done == (reply.observation is None)
        return reply.observation and [message["content"] for message in reply.observation], reply.info

    yield ask
    host.close()


def call(name: str, **arguments: Any) -> dict[str, Any]:
    return {"name": name, "arguments": arguments}


def test_results_come_back_in_the_order_of_the_calls(answer):
    said, info = answer("Let me see.", call("shift", text="abc"), call("sums", numbers=[1, 2.5]))
    assert said == ["bcd", '{"sum": 3.5}']
    assert info == {"tool_calls": 2.0, "tool_errors": 0.0}


@pytest.mark.usefixtures("forked")
def test_a_function_is_given_the_images_of_the_episode_and_returns_one():
    kind, settings = load_environment({"name": "tools", "tools": [f"{FILE}:half"], **OF_A_FORK})
    assert list(kind.tools(settings)[0]["function"]["parameters"]["properties"]) == ["number"]
    shared = kind.open(settings)
    try:
        mine = kind(settings, shared)
        mine.reset({"images": [Image.new("RGB", (64, 32), "red")]}, 0)
        text = f"<tool_call>{json.dumps(call('half', number=0))}</tool_call>"
        text += f"<tool_call>{json.dumps(call('half', number=3))}</tool_call>"
        [message, failed] = mine.step(Action(text, text, [1], "stop", 0)).observation
        image, words = message["content"]
        assert open_image(image["image"], None, "here").size == (32, 32)
        assert words == {"type": "text", "text": "the left half"}
        assert failed["content"].startswith("error: IndexError")
        again = text.replace('"number": 0', '"number": 1')
        [message, _] = mine.step(Action(again, again, [1], "stop", 1)).observation
        assert open_image(message["content"][0]["image"], None, "here").size == (16, 32), (
            "of the image that it returned"
        )
    finally:
        kind.close(shared)


def test_an_image_that_no_encoder_takes_is_told_to_the_model():
    tool = load_tools([f"{FILE}:half"])[0]
    assert not _answer(tool, {"number": 0}, [Image.new("RGB", (28, 28))])[1]
    said, failed = _answer(tool, {"number": 0}, [Image.new("RGB", (2, 28))])
    assert failed
    assert said.startswith("error: result 0: the image has a size that no vision encoder accepts")
    assert "1 x 28" in said


def test_a_column_images_is_kept_only_for_functions_that_ask_for_it():
    for row, asks in (({"images": None}, True), ({"images": ["no image"]}, False), ({}, True)):
        Tools(ToolSettings(tools=["a.py:echo"]), SimpleNamespace(uses_images=asks)).reset(row, 0)


def test_a_turn_without_a_call_is_the_last_one(answer):
    assert answer("It is 42.") == (None, {})


@pytest.mark.parametrize(
    ("asked", "error"),
    [
        ("<tool_call>{</tool_call>", "error: the call is not valid JSON"),
        (call("divide", a=1), "error: there is no tool 'divide'; there are shift, sums, misbehave"),
        (
            call("shift", text="a", by="far"),
            "error: the arguments of shift do not fit: by: Input should be a valid integer",
        ),
        (call("shift"), "text: Field required"),
        (call("misbehave", how="raise"), "error: KeyError: 'raise'"),
        (call("misbehave", how="eat"), "error: MemoryError"),
        (call("misbehave", how="die"), "error: the tool died with its environment process (exit code 3)"),
        (call("misbehave", how="sleep"), "error: no result within 4 s"),
        (call("misbehave", how="interrupt"), "error: KeyboardInterrupt"),
        (
            call("misbehave", how="write pickle -"),
            "error: the tool lost its environment process, which wrote an invalid message",
        ),
        (call("misbehave", how="write garbage -"), "error: the tool lost its environment process, which wrote"),
    ],
    ids=[
        *("malformed", "unknown", "wrong type", "missing", "raises", "memory", "dies", "hangs", "interrupts"),
        *("writes a pickle", "writes garbage"),
    ],
)
def test_what_goes_wrong_is_told_to_the_model_and_the_next_call_works(answer, asked, error):
    said, info = answer(asked, call("shift", text="a"))
    assert error in said[0]
    assert said[1] == "b"
    assert info == {"tool_calls": 2.0, "tool_errors": 1.0}


def test_text_that_no_process_or_tokenizer_takes_is_answered():
    shared = SimpleNamespace(names=["echo"], begin=lambda name, arguments, deadline, images: _done(arguments["text"]))
    mine = Tools(ToolSettings(tools=["a.py:echo"]), shared)
    deep: Any = []
    for _ in range(100_000):
        deep = [deep]
    assert mine._run([Call("echo", {"a": deep})]) == [
        ("error: the arguments are nested more than 100 levels deep", True)
    ]
    half = '<tool_call>{"name": "echo", "arguments": {"text": "a\\ud800b"}}</tool_call>'
    assert mine.step(Action(half, half, [1], "stop", 0)).observation == [{"role": "tool", "content": "a?b"}]


def _done(text: str) -> Future[tuple[str, bool]]:
    future: Future[tuple[str, bool]] = Future()
    future.set_result((text, False))
    return future


@pytest.mark.usefixtures("forked")
def test_calls_of_a_turn_run_side_by_side_and_no_more_than_max_calls(tmp_path):
    limits = {"workers": 3, "max_calls": 3, "timeout_s": 100.0, **OF_A_FORK}
    kind, settings = load_environment({"name": "tools", "tools": [f"{FILE}:meet"], **limits})
    shared = kind.open(settings)
    try:
        one = json.dumps(call("meet", folder=str(tmp_path), count=3))
        text = f"<tool_call>{one}</tool_call>" * 1000
        step = kind(settings, shared).step(Action(text, text, [1], "stop", 0))
    finally:
        kind.close(shared)
    said = [message["content"] for message in step.observation]
    assert said == ["met"] * 3 + ["error: a turn has at most 3 calls; 997 more were not made"]
    assert step.info == {"tool_calls": 1000.0, "tool_errors": 997.0}


@pytest.mark.usefixtures("forked")
def test_what_a_turn_asks_for_never_takes_longer_than_its_deadline():
    kind, settings = load_environment(
        {"name": "tools", "tools": ALL, "turn_timeout_s": 1.0, "timeout_s": 1.5, **OF_A_FORK}
    )
    shared = kind.open(settings)
    try:
        began = time.monotonic()
        calls = [call("misbehave", how="sleep")] * 4 + [call("shift", text="a")]
        text = "".join(f"<tool_call>{json.dumps(one)}</tool_call>" for one in calls)
        step = kind(settings, shared).step(Action(text, text, [1], "stop", 0))
        assert time.monotonic() - began < 60, "as long as one of the calls sleeps"
        said = [message["content"] for message in step.observation]
        assert "error: no result before the turn's deadline" in said
        assert "error: no process was free to run the tool before the turn's deadline" in said
        began = time.monotonic()
        again = f"<tool_call>{json.dumps(call('shift', text='a'))}</tool_call>"
        while kind(settings, shared).step(Action(again, again, [1], "stop", 0)).observation[0]["content"] != "b":
            assert time.monotonic() - began < 120, "its process starts again"
    finally:
        kind.close(shared)


@pytest.mark.parametrize(
    ("parser", "text"),
    [
        ("qwen", "<tool_call>" * 100_000),
        ("qwen", '<tool_call>{"name": "a"}</tool_call>' * 50_000),
        ("llama3", '{"name": "a"};' * 50_000),
    ],
)
def test_parsers_read_any_text_in_linear_time(parser, text):
    began = time.process_time()
    PARSERS[parser](text[: len(text) // 10])
    tenth, began = time.process_time() - began, time.process_time()
    PARSERS[parser](text)
    assert time.process_time() - began < 60 * tenth + 1.0  # quadratic: a hundred times, tens of seconds


@pytest.mark.usefixtures("forked")
def test_a_turn_that_may_take_longer_than_the_run_waits_is_refused():
    config = RunConfig(name="r", env={"name": "tools", "tools": ALL, **OF_A_FORK}, cluster={"timeout_s": 200})
    with pytest.raises(ConfigError, match=r"cluster.timeout_s: a turn of the environment may take 130 s(?s:.*)260"):
        check_environment(config, limit_s=60.0)


@pytest.mark.usefixtures("forked")
def test_a_missing_tool_is_found_before_the_run():
    config = RunConfig(name="r", env={"name": "tools", "tools": [f"{FILE}:nothing"], **OF_A_FORK})
    with pytest.raises(ConfigError, match=r"env.tools: [\s\S]*has no function 'nothing'"):
        check_environment(config, limit_s=60.0)
