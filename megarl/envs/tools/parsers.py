"""Formats of a chat model's calls, as the models' chat templates have them: how prompts describe them, and parsers.

The names of formats are SGLang's.

qwen, qwen25   <tool_call>\\n{"name": "add", "arguments": {"a": 1}}\\n</tool_call>, any number of them
llama3         {"name": "add", "parameters": {"a": 1}}, after <|python_tag|> or not, several separated by ;
               <|python_tag|>add.call(a=1)
"""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

_TAG = "<|python_tag|>"
_PART = re.compile(r"</?think>|<tool_call>")
#: Exceptions that a policy's text can raise in Python's parsers: invalid, nested too deep, too large, unhashable keys.
_UNREADABLE = (ValueError, SyntaxError, RecursionError, MemoryError, TypeError)
_BETWEEN = re.compile(r"\s*;?\s*")
_INTEGER_BITS = 1024  # Python refuses to write very large integers as digits, and 0xff... is one
_SPECIAL = re.compile(r"<\|(?!python_tag)[^|<>]*\|>")


@dataclass(frozen=True)
class Call:
    """One tool call in the policy's text; `error` is the text for the policy if the call is malformed."""

    name: str = ""
    arguments: dict[str, Any] = field(default_factory=dict)
    error: str = ""


def parse_qwen(text: str) -> list[Call]:
    """Return the calls in the order of the text; calls inside a thought (`<think>`) are ignored.

    >>> parse_qwen('<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>')
    [Call(name='add', arguments={'a': 1}, error='')]
    """
    calls: list[Call] = []
    place = end = other = 0
    while part := _PART.search(text, place):
        place = part.end()
        if part[0] == "<think>":
            over = text.find("</think>", place)
            place = len(text) if over < 0 else over + len("</think>")
        elif part[0] == "</think>":  # ends a thought that the prompt opened
            calls.clear()
        else:
            end, other = _next(text, "</tool_call>", place, end), _next(text, "<tool_call>", place, other)
            if other < end or end == len(text):
                calls.append(Call(error="a <tool_call> has no </tool_call>"))
                place = other
            else:
                try:
                    calls.append(_checked(json.loads(text[place:end]), "arguments"))
                except _UNREADABLE as error:
                    calls.append(Call(error=f"the call is not valid JSON ({error})"))
                place = end + len("</tool_call>")
    return calls


def _next(text: str, tag: str, place: int, last: int) -> int:
    """Return the position of the first `tag` at or after `place`, or the text's length. `last` is the result for an
    earlier place: it keeps the search linear in a text without end tags, where every call would scan the whole rest.
    """
    if last >= place:
        return last
    start = text.find(tag, place)
    return len(text) if start < 0 else start


def parse_llama3(text: str) -> list[Call]:
    """Return the calls in the order of the text. Text that begins neither with `<|python_tag|>` nor with a brace is not
    a call.

    >>> parse_llama3('{"name": "add", "parameters": {"a": 1}}')
    [Call(name='add', arguments={'a': 1}, error='')]
    """
    text = _SPECIAL.sub("", text).strip()
    tagged, body = text.startswith(_TAG), text.removeprefix(_TAG).strip()
    if not tagged and not body.startswith("{"):
        return []
    if not body.startswith("{"):
        return [_from_python(body)]
    calls: list[Call] = []
    decoder, place = json.JSONDecoder(), 0
    while place < len(body):
        try:
            value, place = decoder.raw_decode(body, place)
        except _UNREADABLE as error:
            return [*calls, Call(error=f"the call is not valid JSON ({error})")]
        calls.append(_checked(value, "parameters"))
        between = _BETWEEN.match(body, place)
        place = place if between is None else between.end()
    return calls


#: Name of a format of tool calls -> its parser.
PARSERS: dict[str, Callable[[str], list[Call]]] = {"qwen": parse_qwen, "qwen25": parse_qwen, "llama3": parse_llama3}


#: By format: how a system message describes a call, for models whose chat template writes no tools.
_HOW_TO_CALL = {
    "qwen": "To call a function, write a JSON object with its name and arguments inside <tool_call></tool_call>:\n"
    '<tool_call>\n{"name": "function name", "arguments": {"argument name": "value"}}\n</tool_call>',
    "llama3": "To call a function, answer with a JSON object with its name and parameters, and nothing else:\n"
    '{"name": "function name", "parameters": {"argument name": "value"}}',
}
_HOW_TO_CALL["qwen25"] = _HOW_TO_CALL["qwen"]


def system_text(parser: str, schemas: Sequence[dict[str, Any]]) -> str:
    """Return the description of the tools, and of a call in the form that `parser` reads."""
    listed = "\n".join(json.dumps(schema, ensure_ascii=False) for schema in schemas)
    return f"You may call these functions, given as JSON schemas:\n<tools>\n{listed}\n</tools>\n{_HOW_TO_CALL[parser]}"


def _checked(value: Any, key: str) -> Call:
    """Return the call in a JSON value. The key `arguments` or `parameters` has an object, or its JSON as a string."""
    if not isinstance(value, dict) or not isinstance(value.get("name"), str):
        return Call(error=f'a call is a JSON object {{"name": ..., "{key}": {{...}}}}')
    arguments = value.get("arguments", value.get("parameters", {}))
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments)
        except _UNREADABLE:
            arguments = None
    if not isinstance(arguments, dict):
        return Call(error=f'"{key}" is a JSON object')
    return Call(value["name"], arguments)


def _from_python(body: str) -> Call:
    """Parse `add.call(a=1)` or `add(a=1)`, with literal keyword arguments."""
    wrong = Call(error="a call has the form name.call(argument=value)")
    try:
        node = ast.parse(body, mode="eval").body
    except _UNREADABLE:
        return wrong
    if not isinstance(node, ast.Call) or node.args or any(keyword.arg is None for keyword in node.keywords):
        return wrong
    target = node.func.value if isinstance(node.func, ast.Attribute) and node.func.attr == "call" else node.func
    if not isinstance(target, ast.Name):
        return wrong
    try:
        arguments = {str(keyword.arg): _of_json(ast.literal_eval(keyword.value)) for keyword in node.keywords}
    except _UNREADABLE:
        return wrong
    return Call(target.id, arguments)


def _of_json(value: Any) -> Any:
    """Convert a literal to the JSON value that it represents. Raise ValueError if it represents none."""
    if isinstance(value, (list, tuple)):
        return [_of_json(item) for item in value]
    if isinstance(value, dict) and all(isinstance(key, str) for key in value):
        return {key: _of_json(item) for key, item in value.items()}
    if isinstance(value, int) and value.bit_length() <= _INTEGER_BITS:
        return value
    if value is None or isinstance(value, (str, float)):
        return value
    raise ValueError(f"no JSON value stands for this {type(value).__name__}, or it is too large")
