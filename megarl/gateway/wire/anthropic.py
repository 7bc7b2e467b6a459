"""Anthropic's API: `/v1/messages` and `/v1/messages/count_tokens`."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
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
    only_users,
    pieces,
    read_content,
    read_parts,
    refuse_changes,
    string,
    strings,
    wrong,
)

OVERRIDDEN = ("temperature", "top_p", "top_k")
_KINDS = {
    400: "invalid_request_error",
    401: "authentication_error",
    404: "not_found_error",
    410: "invalid_request_error",
    413: "request_too_large",
    429: "rate_limit_error",
}
#: Types of parts that only one role may send.
_AUTHORS = {"tool_result": USER, "tool_use": ASSISTANT, "thinking": ASSISTANT}


def read_messages(body: dict[str, Any]) -> ChatRequest:
    """Return the request in the body of a message. Raise Refusal for what cannot be answered."""
    refuse_changes(body, CONSTRAINTS)
    refuse_changes(mapping(body, "output_config"), {"format": []}, "output_config.")
    messages: list[ChatMessage] = []
    if system := join_texts(body.get("system"), "system"):
        messages.append(ChatMessage(SYSTEM, system))
    for place, message in enumerate(items(body, "messages")):
        messages += _messages(message, f"messages[{place}]")
    if not any(message.role != SYSTEM for message in messages):
        raise wrong("messages", body.get("messages"), "a list with at least one message of the user or the assistant")
    return ChatRequest(messages, _tools(body), None, number(body, "max_tokens", 1), strings(body, "stop_sequences"))


def write(body: dict[str, Any], replies: Sequence[ChatReply], name: str) -> tuple[dict[str, Any], Iterator[str]]:
    """Return the body of a message, and the events of a stream with its content."""
    whole = _whole(replies[0], name, str(body.get("model")))
    return whole, _stream(whole)


def _whole(reply: ChatReply, name: str, model: str) -> dict[str, Any]:
    message, blocks = reply.message, list[dict[str, Any]]()
    if message.reasoning:
        blocks.append({"type": "thinking", "thinking": message.reasoning, "signature": name})
    if message.content or not message.calls:
        blocks.append({"type": "text", "text": message.content})
    for call in message.calls:
        blocks.append({"type": "tool_use", "id": call.id, "name": call.name, "input": call.parsed})
    reason = "tool_use" if message.calls else "stop_sequence" if reply.stop else "end_turn"
    return {
        "id": name,
        "type": "message",
        "role": ASSISTANT,
        "model": model,
        "content": blocks,
        "stop_reason": "max_tokens" if reply.node.finish == "length" else reason,
        "stop_sequence": reply.stop or None,
        "usage": {"input_tokens": reply.prompt_tokens, "output_tokens": len(reply.node.token_ids)},
    }


def _stream(whole: dict[str, Any]) -> Iterator[str]:
    usage = whole["usage"]
    begun = {**whole, "content": [], "stop_reason": None, "stop_sequence": None, "usage": {**usage, "output_tokens": 0}}
    yield event("message_start", message=begun)
    for place, block in enumerate(whole["content"]):
        empty, deltas = _parts(block)
        yield event("content_block_start", index=place, content_block=empty)
        for delta in deltas:
            yield event("content_block_delta", index=place, delta=delta)
        yield event("content_block_stop", index=place)
    ended = {key: whole[key] for key in ("stop_reason", "stop_sequence")}
    yield event("message_delta", delta=ended, usage=usage)
    yield event("message_stop")


def event(kind: str, **fields: Any) -> str:
    """Return a server-sent event of a streamed message."""
    return f"event: {kind}\ndata: {json.dumps({'type': kind, **fields})}\n\n"


def error_body(refusal: Refusal) -> dict[str, Any]:
    """Return the body of an error."""
    kind = _KINDS.get(refusal.status, "api_error")
    return {"type": "error", "error": {"type": kind, "message": refusal.message}}


def _parts(block: dict[str, Any]) -> tuple[dict[str, Any], Iterator[dict[str, Any]]]:
    """Return a content block with empty content, and the events that stream the content in pieces."""
    if block["type"] == "tool_use":
        text = json.dumps(block["input"], ensure_ascii=False)
        return {**block, "input": {}}, ({"type": "input_json_delta", "partial_json": piece} for piece in pieces(text))
    if block["type"] == "text":
        return {**block, "text": ""}, ({"type": "text_delta", "text": piece} for piece in pieces(block["text"]))
    thoughts = [{"type": "thinking_delta", "thinking": piece} for piece in pieces(block["thinking"])]
    signature = {"type": "signature_delta", "signature": block["signature"]}
    return {**block, "thinking": "", "signature": ""}, iter([*thoughts, signature])


def _messages(message: dict[str, Any], key: str) -> list[ChatMessage]:
    """Return the messages that one message of the body contains; results of tools come before the text beside them."""
    role, content = message.get("role"), message.get("content")
    if role not in (USER, ASSISTANT, SYSTEM):
        raise wrong(f"{key}.role", role, "user, assistant, system")
    if not isinstance(content, list):
        return [ChatMessage(role, string(content, f"{key}.content"))]
    parts, thoughts = list[tuple[str, Any]](), list[str]()
    results, calls = list[ChatMessage](), list[ToolCall]()
    for place, block in enumerate(items(message, "content", f"{key}.")):
        where, kind = f"{key}.content[{place}]", block.get("type")
        if kind == "tool_result" and role == USER:
            text, images = read_content(block.get("content"), f"{where}.content")
            call_id = string(block.get("tool_use_id"), f"{where}.tool_use_id")
            results.append(ChatMessage(TOOL, text, call_id=call_id, images=images))
        elif kind == "tool_use" and role == ASSISTANT:
            arguments = json.dumps(block.get("input") or {}, ensure_ascii=False)
            call_id, name = (string(block.get(part), f"{where}.{part}") for part in ("id", "name"))
            calls.append(ToolCall(call_id, name, arguments))
        elif kind == "thinking" and role == ASSISTANT:
            thoughts.append(string(block.get("thinking"), f"{where}.thinking"))
        elif kind in ("tool_result", "tool_use", "thinking"):
            raise wrong(f"{where}.type", kind, f"parts of this type in messages of the {_AUTHORS[kind]}")
        elif kind != "redacted_thinking":
            parts.append((where, block))
    text, images = read_parts(parts)
    if images and role != USER:
        raise only_users(images[0])
    if role == ASSISTANT:
        return [ChatMessage(role, text, "".join(thoughts), tuple(calls))]
    return [*results, *([ChatMessage(role, text, images=images)] if parts or not results else [])]


def _tools(body: dict[str, Any]) -> list[dict[str, Any]]:
    choice = mapping(body, "tool_choice").get("type", "auto")
    if choice not in ("auto", "none"):
        raise Refusal(400, f"tool_choice: found {choice!r}. It changes the distribution of tokens; allowed: auto, none")
    tools = []
    for place, tool in enumerate(items(body, "tools")):
        if not tool.get("name") or not isinstance(tool.get("input_schema"), dict):
            raise wrong(f"tools[{place}]", tool, "an object with name and input_schema")
        described = {"description": tool["description"]} if tool.get("description") else {}
        function = {"name": tool["name"], **described, "parameters": tool["input_schema"]}
        tools.append({"type": "function", "function": function})
    return [] if choice == "none" else tools
