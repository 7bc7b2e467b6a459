"""OpenAI's API `/v1/responses`, as far as a client sends the whole conversation with every request."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

from megarl.gateway.messages import ASSISTANT, SYSTEM, TOOL, USER, ChatMessage, ToolCall
from megarl.gateway.refusals import Refusal
from megarl.gateway.session import ChatReply, ChatRequest
from megarl.gateway.wire.fields import (
    CONSTRAINTS,
    items,
    join_texts,
    mapping,
    number,
    pieces,
    read_content,
    refuse_changes,
    string,
    wrong,
)

_EMPTY: dict[str, dict[str, Any]] = {
    "message": {"content": []},
    "function_call": {"arguments": ""},
    "reasoning": {"summary": []},
}
#: Keys that refer to something on the server -> values that refer to nothing, in addition to null.
_STORED: dict[str, list[Any]] = {"previous_response_id": [], "conversation": [], "prompt": []}
_ROLES = {"system": SYSTEM, "developer": SYSTEM, "user": USER, "assistant": ASSISTANT}


def read_response(body: dict[str, Any]) -> ChatRequest:
    """Return the request in the body of a response. Raise Refusal for what cannot be answered."""
    refuse_changes(body, CONSTRAINTS)
    refuse_changes(mapping(body, "text"), {"format": [{"type": "text"}]}, "text.")
    refuse_changes(body, _STORED, why="The gateway stores no conversations and prompts: send them in `input`")
    refuse_changes(body, {"top_logprobs": [0]}, why="Only sampled tokens have log-probs")
    choice = body.get("tool_choice")
    if choice not in (None, "auto", "none"):
        raise Refusal(
            400, f"tool_choice: found {choice!r:.100}. It changes the distribution of tokens; allowed: auto, none"
        )
    given = body.get("input")
    messages = [ChatMessage(SYSTEM, text)] if (text := string(body.get("instructions"), "instructions")) else []
    if isinstance(given, str):
        messages.append(ChatMessage(USER, given))
    else:
        for place, item in enumerate(items(body, "input")):
            _add(messages, item, f"input[{place}]")
    if not any(message.role != SYSTEM for message in messages):
        raise wrong("input", given, "a text, or a list with at least one item that is not a system message")
    tools = [] if choice == "none" else _tools(body)
    return ChatRequest(messages, tools, None, number(body, "max_output_tokens", 1))


def write(body: dict[str, Any], replies: Sequence[ChatReply], name: str) -> tuple[dict[str, Any], Iterator[str]]:
    """Return the body of a response, and the events of a stream with its content."""
    whole = _whole(replies[0], name, str(body.get("model")))
    begun = {**whole, "status": "in_progress", "incomplete_details": None, "output": [], "usage": None}
    events = (
        f"event: {kind}\ndata: {json.dumps({'type': kind, 'sequence_number': place, **fields})}\n\n"
        for place, (kind, fields) in enumerate(_events(whole, begun))
    )
    return whole, events


def _whole(reply: ChatReply, name: str, model: str) -> dict[str, Any]:
    message, output = reply.message, list[dict[str, Any]]()
    if message.reasoning:
        summary = [{"type": "summary_text", "text": message.reasoning}]
        output.append({"id": f"rs_{name}", "type": "reasoning", "summary": summary, "status": "completed"})
    if message.content or not message.calls:
        part = {"type": "output_text", "text": message.content, "annotations": [], "logprobs": []}
        written = {"type": "message", "role": ASSISTANT, "status": "completed", "content": [part]}
        output.append({"id": f"msg_{name}", **written})
    for call in message.calls:
        made = {"type": "function_call", "call_id": call.id, "name": call.name, "arguments": call.arguments}
        output.append({"id": f"fc_{name}_{call.id}", **made, "status": "completed"})
    cut, sampled = reply.node.finish == "length", len(reply.node.token_ids)
    return {
        "id": name,
        "object": "response",
        "created_at": int(time.time()),
        "status": "incomplete" if cut else "completed",
        "incomplete_details": {"reason": "max_output_tokens"} if cut else None,
        "error": None,
        "model": model,
        "output": output,
        "parallel_tool_calls": True,
        "tool_choice": "auto",
        "tools": [],
        "usage": {
            "input_tokens": reply.prompt_tokens,
            "input_tokens_details": {"cached_tokens": 0},
            "output_tokens": sampled,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": reply.prompt_tokens + sampled,
        },
    }


def _events(whole: dict[str, Any], begun: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    yield "response.created", {"response": begun}
    for place, item in enumerate(whole["output"]):
        where = {"item_id": item["id"], "output_index": place}
        empty = {**item, **_EMPTY[item["type"]], "status": "in_progress"}
        yield "response.output_item.added", {"output_index": place, "item": empty}
        if item["type"] == "message":
            part, at = item["content"][0], {**where, "content_index": 0}
            yield "response.content_part.added", {**at, "part": {**part, "text": ""}}
            for piece in pieces(part["text"]):
                yield "response.output_text.delta", {**at, "delta": piece, "logprobs": []}
            yield "response.output_text.done", {**at, "text": part["text"], "logprobs": []}
            yield "response.content_part.done", {**at, "part": part}
        elif item["type"] == "function_call":
            for piece in pieces(item["arguments"]):
                yield "response.function_call_arguments.delta", {**where, "delta": piece}
            done = {"arguments": item["arguments"], "name": item["name"]}
            yield "response.function_call_arguments.done", {**where, **done}
        yield "response.output_item.done", {"output_index": place, "item": item}
    yield f"response.{whole['status']}", {"response": whole}


def _add(messages: list[ChatMessage], item: dict[str, Any], key: str) -> None:
    """Add an item of the input: the items of one reply of the assistant become one message."""
    kind, last = item.get("type", "message"), messages[-1] if messages else ChatMessage(SYSTEM)
    reply = last if last.role == ASSISTANT else ChatMessage(ASSISTANT)
    if kind == "message":
        role = _ROLES.get(string(item.get("role"), f"{key}.role"))
        if role is None:
            raise wrong(f"{key}.role", item.get("role"), ", ".join(_ROLES))
        if role == USER:
            text, images = read_content(item.get("content"), f"{key}.content")
            messages.append(ChatMessage(role, text, images=images))
            return
        text = join_texts(item.get("content"), f"{key}.content")
        if role != ASSISTANT:
            messages.append(ChatMessage(role, text))
            return
        reply = replace(reply, content=reply.content + text)
    elif kind == "function_call_output":
        text, images = read_content(item.get("output"), f"{key}.output")
        messages.append(ChatMessage(TOOL, text, call_id=string(item.get("call_id"), f"{key}.call_id"), images=images))
        return
    elif kind == "function_call":
        texts = (string(item.get(name), f"{key}.{name}") for name in ("call_id", "name", "arguments"))
        reply = replace(reply, calls=(*reply.calls, ToolCall(*texts)))
    elif kind == "reasoning":
        text = "".join(string(part.get("text"), f"{key}.summary.text") for part in items(item, "summary", f"{key}."))
        reply = replace(reply, reasoning=reply.reasoning + text)
    else:
        raise wrong(f"{key}.type", kind, "message, function_call, function_call_output, reasoning")
    if last.role == ASSISTANT:
        messages.pop()
    messages.append(reply)


def _tools(body: dict[str, Any]) -> list[dict[str, Any]]:
    tools = []
    for place, tool in enumerate(items(body, "tools")):
        if tool.get("type") != "function" or not tool.get("name"):
            raise wrong(f"tools[{place}]", tool, 'an object {"type": "function", "name": ...}')
        described = {"description": tool["description"]} if tool.get("description") else {}
        function = {"name": tool["name"], **described, "parameters": tool.get("parameters") or {}}
        tools.append({"type": "function", "function": function})
    return tools
