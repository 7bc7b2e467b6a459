"""OpenAI's API: `/v1/chat/completions` and `/v1/completions`."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Sequence
from typing import Any

from megarl.gateway.messages import ASSISTANT, SYSTEM, TOOL, USER, ChatMessage, ToolCall
from megarl.gateway.refusals import Refusal
from megarl.gateway.session import ChatReply, ChatRequest
from megarl.gateway.wire.fields import (
    CONSTRAINTS,
    flag,
    items,
    join_texts,
    mapping,
    number,
    pieces,
    read_content,
    refuse_changes,
    string,
    strings,
    wrong,
)

#: Sampling settings of a request that have no effect, because the recipe's settings apply.
OVERRIDDEN = ("temperature", "top_p", "top_k", "min_p", "seed")
MOST_SAMPLES = 16
_ROLES = {
    "system": SYSTEM,
    "developer": SYSTEM,
    "user": USER,
    "assistant": ASSISTANT,
    "tool": TOOL,
    "function": TOOL,
}
_NEUTRAL: dict[str, Any] = {
    "logit_bias": [{}],
    "presence_penalty": [0],
    "frequency_penalty": [0],
    "repetition_penalty": [1],
    "response_format": [{"type": "text"}],
    **CONSTRAINTS,
}


def read_chat(body: dict[str, Any]) -> ChatRequest:
    """Return the request in the body of a chat completion. Raise Refusal for what cannot be answered."""
    refuse_changes(body, _NEUTRAL)
    messages = [_message(message, f"messages[{place}]") for place, message in enumerate(items(body, "messages"))]
    if not messages:
        raise wrong("messages", body.get("messages"), "a list of at least one message")
    if (number(body, "top_logprobs", 0) or 0) > 0:
        raise wrong("top_logprobs", body["top_logprobs"], "0: only sampled tokens have log-probs")
    room = number(body, "max_completion_tokens", 1) or number(body, "max_tokens", 1)
    return ChatRequest(messages, _tools(body), None, room, strings(body, "stop"))


def read_text(body: dict[str, Any]) -> ChatRequest:
    """Return the request in the body of a text completion. Raise Refusal for what cannot be answered."""
    refuse_changes(body, {**_NEUTRAL, "suffix": [""], "best_of": [1]})
    refuse_changes(body, {"echo": [False]}, why="The reply contains only the text that the policy has sampled")
    prompt = body.get("prompt")
    if isinstance(prompt, list) and len(prompt) == 1:
        prompt = prompt[0]
    if not isinstance(prompt, str) or not prompt:
        raise wrong("prompt", prompt, "a text that is not empty")
    return ChatRequest(text=prompt, room=number(body, "max_tokens", 1), stop=strings(body, "stop"))


def samples_of(body: dict[str, Any]) -> int:
    """Return how many replies a request wants."""
    return number(body, "n", 1, MOST_SAMPLES) or 1


def write_chat(body: dict[str, Any], replies: Sequence[ChatReply], name: str) -> tuple[dict[str, Any], Iterator[str]]:
    """Return the body of a chat completion, and the events of a stream with its content."""
    choices = []
    for place, reply in enumerate(replies):
        choice = {"index": place, "message": _sent(reply.message), "finish_reason": _finish(reply)}
        choice["logprobs"] = _logprobs(reply) if flag(body, "logprobs") else None
        choices.append(_with_tokens(choice, reply, body))
    whole = _whole("chat.completion", choices, replies, body, name)
    return whole, _chat_stream(whole, body)


def write_text(body: dict[str, Any], replies: Sequence[ChatReply], name: str) -> tuple[dict[str, Any], Iterator[str]]:
    """Return the body of a text completion, and the events of a stream with its content."""
    choices = []
    for place, reply in enumerate(replies):
        text = reply.message.reasoning + reply.message.content
        choice: dict[str, Any] = {"index": place, "text": text, "finish_reason": _finish(reply), "logprobs": None}
        if body.get("logprobs") is not None:
            choice["logprobs"] = {"token_logprobs": reply.node.logprobs, "tokens": [], "top_logprobs": None}
        choices.append(_with_tokens(choice, reply, body))
    whole = _whole("text_completion", choices, replies, body, name)
    return whole, _text_stream(whole, body)


def _chat_stream(whole: dict[str, Any], body: dict[str, Any]) -> Iterator[str]:
    """Yield the events of a stream with the content of a chat completion."""
    head = {**{key: whole[key] for key in ("id", "created", "model")}, "object": "chat.completion.chunk"}

    def chunk(choices: list[dict[str, Any]], **more: Any) -> str:
        return _event({**head, "choices": choices, **more})

    for choice in whole["choices"]:
        message, place = choice["message"], choice["index"]
        deltas: list[dict[str, Any]] = [{"role": "assistant", "content": ""}]
        deltas += [{"reasoning_content": piece} for piece in pieces(message.get("reasoning_content") or "")]
        deltas += [{"content": piece} for piece in pieces(message["content"] or "")]
        for number_, call in enumerate(message.get("tool_calls") or []):
            function = call["function"]
            deltas.append({"tool_calls": [{**call, "index": number_, "function": {**function, "arguments": ""}}]})
            for piece in pieces(function["arguments"]):
                deltas.append({"tool_calls": [{"index": number_, "function": {"arguments": piece}}]})
        for delta in deltas:
            yield chunk([{"index": place, "delta": delta, "finish_reason": None, "logprobs": None}])
        last = {key: value for key, value in choice.items() if key != "message"}
        yield chunk([{**last, "delta": {}}])
    if flag(mapping(body, "stream_options"), "include_usage"):
        yield chunk([], usage=whole["usage"])
    yield "data: [DONE]\n\n"


def _text_stream(whole: dict[str, Any], body: dict[str, Any]) -> Iterator[str]:
    """Yield the events of a stream with the content of a text completion."""
    head = {key: whole[key] for key in ("id", "created", "model", "object")}
    for choice in whole["choices"]:
        for piece in pieces(choice["text"]):
            yield _event({**head, "choices": [{"index": choice["index"], "text": piece, "finish_reason": None}]})
        yield _event({**head, "choices": [{**choice, "text": ""}]})
    if flag(mapping(body, "stream_options"), "include_usage"):
        yield _event({**head, "choices": [], "usage": whole["usage"]})
    yield "data: [DONE]\n\n"


def error_body(refusal: Refusal) -> dict[str, Any]:
    """Return the body of an error."""
    return {"error": {"message": refusal.message, "type": refusal.kind, "param": None, "code": refusal.code}}


def _event(value: dict[str, Any]) -> str:
    return f"data: {json.dumps(value)}\n\n"


def _message(message: dict[str, Any], key: str) -> ChatMessage:
    role = _ROLES.get(string(message.get("role"), f"{key}.role"))
    if role is None:
        raise wrong(f"{key}.role", message.get("role"), ", ".join(_ROLES))
    if role in (USER, TOOL):
        content, images = read_content(message.get("content"), f"{key}.content")
        call_id = string(message.get("tool_call_id"), f"{key}.tool_call_id")
        return ChatMessage(role, content, call_id=call_id, images=images)
    content = join_texts(message.get("content"), f"{key}.content")
    if role == SYSTEM:
        return ChatMessage(role, content)
    reasoning = string(message.get("reasoning_content") or message.get("reasoning"), f"{key}.reasoning_content")
    calls = []
    for place, call in enumerate(items(message, "tool_calls", f"{key}.")):
        where, function = f"{key}.tool_calls[{place}]", call.get("function")
        if not isinstance(function, dict):
            raise wrong(f"{where}.function", function, "an object with name and arguments")
        arguments = string(function.get("arguments"), f"{where}.function.arguments")
        name = string(function.get("name"), f"{where}.function.name")
        calls.append(ToolCall(string(call.get("id"), f"{where}.id"), name, arguments))
    return ChatMessage(role, content, reasoning, tuple(calls))


def _tools(body: dict[str, Any]) -> list[dict[str, Any]]:
    choice = body.get("tool_choice")
    if choice not in (None, "auto", "none"):
        raise Refusal(
            400, f"tool_choice: found {choice!r:.100}. It changes the distribution of tokens; allowed: auto, none"
        )
    tools = items(body, "tools")
    for place, tool in enumerate(tools):
        function = tool.get("function")
        if tool.get("type") != "function" or not isinstance(function, dict) or not function.get("name"):
            raise wrong(f"tools[{place}]", tool, 'an object {"type": "function", "function": {"name": ...}}')
    return [] if choice == "none" else tools


def _sent(message: ChatMessage) -> dict[str, Any]:
    sent: dict[str, Any] = {
        "role": ASSISTANT,
        "content": message.content if message.content or not message.calls else None,
    }
    if message.reasoning:
        sent["reasoning_content"] = message.reasoning
    if message.calls:
        sent["tool_calls"] = [
            {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
            for call in message.calls
        ]
    return sent


def _finish(reply: ChatReply) -> str:
    if reply.node.finish == "length":
        return "length"
    return "tool_calls" if reply.message.calls else "stop"


def _logprobs(reply: ChatReply) -> dict[str, Any]:
    """Return the log-probs of the sampled tokens, which are named by their ids, as SGLang and vLLM can do."""
    pairs = zip(reply.node.token_ids, reply.node.logprobs, strict=True)
    content: list[dict[str, Any]] = [
        {"token": f"token_id:{token}", "logprob": logprob, "bytes": None, "top_logprobs": []}
        for token, logprob in pairs
    ]
    return {"content": content, "refusal": None}


def _with_tokens(choice: dict[str, Any], reply: ChatReply, body: dict[str, Any]) -> dict[str, Any]:
    return {**choice, "token_ids": reply.node.token_ids} if flag(body, "return_token_ids") else choice


def _whole(
    kind: str, choices: list[dict[str, Any]], replies: Sequence[ChatReply], body: dict[str, Any], name: str
) -> dict[str, Any]:
    sampled, prompt = sum(len(reply.node.token_ids) for reply in replies), replies[0].prompt_tokens
    usage = {"prompt_tokens": prompt, "completion_tokens": sampled, "total_tokens": prompt + sampled}
    head = {"id": name, "object": kind, "created": int(time.time()), "model": str(body.get("model"))}
    return {**head, "choices": choices, "usage": usage}
