"""Agents with the packages of OpenAI and Anthropic. What they received is the file that their row names.

Each imports the package that it uses: both together take three CPU-seconds.
"""

from __future__ import annotations

import json
import os
from typing import Any

import pytest

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}
TOOL = {"name": "add", "description": "Add.", "parameters": SCHEMA}


def by_openai(task: dict[str, Any]) -> None:
    """A call of a tool, its result, a stream, two samples, refusals, a plain text."""
    import openai

    client, received = openai.OpenAI(), []

    def keep(choice: Any) -> Any:
        received.append([choice.token_ids, [entry.logprob for entry in choice.logprobs.content]])
        return choice.message

    tools: list[Any] = [{"type": "function", "function": TOOL}]
    more: dict[str, Any] = {"model": "policy", "logprobs": True, "extra_body": {"return_token_ids": True}}
    messages: list[Any] = [{"role": "system", "content": "you are kind"}, {"role": "user", "content": "1+2?"}]
    first = keep(client.chat.completions.create(messages=messages, tools=tools, **more).choices[0])
    [call] = first.tool_calls
    assert (call.function.name, json.loads(call.function.arguments)) == ("add", {"a": 1})
    messages += [first.model_dump(), {"role": "tool", "tool_call_id": call.id, "content": "3"}]

    text, last, usage = "", None, None
    options = {"include_usage": True}
    for chunk in client.chat.completions.create(
        messages=messages, tools=tools, stream=True, stream_options=options, **more
    ):
        usage = chunk.usage
        for choice in chunk.choices:
            text, last = text + (choice.delta.content or ""), choice
    assert usage.completion_tokens == len(last.token_ids)
    received.append([last.token_ids, [entry.logprob for entry in last.logprobs.content]])
    assert last.finish_reason == "stop"
    messages += [{"role": "assistant", "content": text}, {"role": "user", "content": "and"}]

    both = client.chat.completions.create(messages=messages, tools=tools, n=2, temperature=0.1, **more)
    assert [keep(choice).content for choice in both.choices] == ["no", "kind"]
    messages += [{"role": "assistant", "content": "kind"}, {"role": "user", "content": "so"}]
    keep(client.chat.completions.create(messages=messages, tools=tools, stop=["is"], **more).choices[0])

    with pytest.raises(openai.BadRequestError, match="logit_bias"):
        client.chat.completions.create(messages=messages, logit_bias={"5": 1}, **more)
    with pytest.raises(openai.NotFoundError, match="model_not_found"):
        client.chat.completions.create(messages=messages, **{**more, "model": "gpt-9"})
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(messages=[{"role": "user", "content": "add " * 900}], **more)
    assert caught.value.code == "context_length_exceeded"
    with pytest.raises(openai.AuthenticationError):
        client.with_options(api_key="wrong").models.list()
    assert [model.id for model in client.models.list()] == ["policy"]
    done = client.completions.create(model="policy", prompt="hello", extra_body={"return_token_ids": True})
    received.append([done.choices[0].token_ids, None])
    _write(task, received)


def by_responses(task: dict[str, Any]) -> None:
    """A call of a tool, and its result in a stream."""
    import openai

    client, received = openai.OpenAI(), []
    tools: list[Any] = [{"type": "function", **TOOL}]
    more: dict[str, Any] = {"model": "policy", "tools": tools, "instructions": "you are kind"}
    first = client.responses.create(input="1+2?", **more)
    [call] = first.output
    assert (call.name, call.arguments) == ("add", '{"a": 1}')
    received.append(first.usage.output_tokens)
    items = [
        {"role": "user", "content": "1+2?"},
        *[item.model_dump() for item in first.output],
        {"type": "function_call_output", "call_id": call.call_id, "output": "3"},
    ]
    with client.responses.stream(input=items, **more) as stream:
        for _ in stream:
            pass
        second = stream.get_final_response()
    assert second.output_text == "yes it is"
    received.append(second.usage.output_tokens)
    items += [*[item.model_dump() for item in second.output], {"role": "user", "content": "why"}]
    received.append(client.responses.create(input=items, **more).usage.output_tokens)
    _write(task, received)


def by_anthropic(task: dict[str, Any]) -> None:
    """Thoughts and a call of a tool, its result in a stream; the key as a token, as a key, and in the path."""
    import anthropic

    client, received = anthropic.Anthropic(), []
    tools: list[Any] = [{"name": "add", "description": "Add.", "input_schema": SCHEMA}]
    more: dict[str, Any] = {"model": "policy", "system": "you are kind", "tools": tools, "max_tokens": 200}
    messages: list[Any] = [{"role": "user", "content": "1+2?"}]
    count = client.messages.count_tokens(messages=messages, **{k: v for k, v in more.items() if k != "max_tokens"})
    first = client.messages.create(messages=messages, **more)
    assert [block.type for block in first.content] == ["thinking", "tool_use"]
    assert (first.stop_reason, first.content[1].input) == ("tool_use", {"a": 1})
    assert count.input_tokens == first.usage.input_tokens
    received.append(first.usage.output_tokens)
    result = {"type": "tool_result", "tool_use_id": first.content[1].id, "content": [{"type": "text", "text": "3"}]}
    messages += [
        {"role": "assistant", "content": [block.model_dump() for block in first.content]},
        {"role": "user", "content": [result]},
    ]
    key = os.environ["ANTHROPIC_AUTH_TOKEN"]
    by_path = anthropic.Anthropic(base_url=f"{os.environ['ANTHROPIC_BASE_URL']}/s/{key}", auth_token=None, api_key="x")
    with by_path.messages.stream(messages=messages, **more) as stream:
        text = "".join(stream.text_stream)
        second = stream.get_final_message()
    assert (text, second.content[0].text, second.stop_reason) == ("yes it is", "yes it is", "end_turn")
    received.append(second.usage.output_tokens)
    messages += [{"role": "assistant", "content": text}, {"role": "user", "content": "why"}]
    by_key = anthropic.Anthropic(auth_token=None, api_key=key, default_headers={"x-api-key": key})
    third = by_key.messages.create(messages=messages, stop_sequences=["answer"], **more)
    assert (third.stop_reason, third.stop_sequence, third.content[0].text) == ("stop_sequence", "answer", "the ")
    received.append(third.usage.output_tokens)
    with pytest.raises(anthropic.BadRequestError, match="tool_choice"):
        client.messages.create(messages=messages, tool_choice={"type": "any"}, **more)
    with pytest.raises(anthropic.NotFoundError):
        client.messages.create(messages=messages, **{**more, "model": "claude"})
    _write(task, received)


def adds_by_openai(task: dict[str, Any]) -> None:
    """A call of a tool, its result in a stream, and a question that the model was not taught, asked twice."""
    import openai

    client, received = openai.OpenAI(), []
    tools: list[Any] = [{"type": "function", "function": TOOL}]
    more: dict[str, Any] = {"model": "policy", "tools": tools, "logprobs": True}
    more["extra_body"] = {"return_token_ids": True}
    messages: list[Any] = [{"role": "system", "content": "you are kind"}, {"role": "user", "content": "1+2?"}]

    def keep(choice: Any) -> None:
        received.append([choice.token_ids, [entry.logprob for entry in choice.logprobs.content]])

    first = client.chat.completions.create(messages=messages, **more).choices[0]
    keep(first)
    [call] = first.message.tool_calls
    result = {"role": "tool", "tool_call_id": call.id, "content": "3"}
    messages += [first.message.model_dump(exclude_none=True), result]
    text = ""
    for chunk in client.chat.completions.create(messages=messages, stream=True, **more):
        last, text = chunk.choices[0], text + (chunk.choices[0].delta.content or "")
    keep(last)
    messages += [{"role": "assistant", "content": text}, {"role": "user", "content": "why"}]
    for _ in range(2):
        keep(client.chat.completions.create(messages=messages, **more).choices[0])
    _write(task, received)


def adds_by_anthropic(task: dict[str, Any]) -> None:
    """The same; the number of tokens and the text of each reply is received."""
    import anthropic

    client, received = anthropic.Anthropic(), []
    tools: list[Any] = [{"name": "add", "description": "Add.", "input_schema": SCHEMA}]
    more: dict[str, Any] = {"model": "policy", "system": "you are kind", "tools": tools, "max_tokens": 200}
    messages: list[Any] = [{"role": "user", "content": "1+2?"}]
    first = client.messages.create(messages=messages, **more)
    [use] = first.content
    received.append([first.usage.output_tokens, use.name])
    result = {"type": "tool_result", "tool_use_id": use.id, "content": "3"}
    messages += [{"role": "assistant", "content": [use.model_dump()]}, {"role": "user", "content": [result]}]
    with client.messages.stream(messages=messages, **more) as stream:
        second = stream.get_final_message()
    received.append([second.usage.output_tokens, second.content[0].text])
    messages += [{"role": "assistant", "content": second.content[0].text}, {"role": "user", "content": "why"}]
    for _ in range(2):
        reply = client.messages.create(messages=messages, **more)
        received.append([reply.usage.output_tokens, reply.content[-1].text])
    _write(task, received)


def talks(task: dict[str, Any]) -> None:
    """Rounds of talk with a model that says anything; the last reply is asked for twice."""
    import openai

    client, received = openai.OpenAI(), []
    more: dict[str, Any] = {"model": "policy", "logprobs": True, "extra_body": {"return_token_ids": True}}
    messages: list[Any] = [{"role": "user", "content": task["row"]["prompt"]}]
    for question in ("yes", "no", ""):
        for _ in range(1 if question else 2):
            choice = client.chat.completions.create(messages=messages, **more).choices[0]
            received.append([choice.token_ids, [entry.logprob for entry in choice.logprobs.content]])
        messages += [choice.message.model_dump(exclude_none=True), {"role": "user", "content": question}]
    _write(task, received)


def looks(task: dict[str, Any]) -> None:
    """Two images by each API, of which the second one follows the first reply; and images that are refused."""
    import anthropic
    import openai

    first, second = task["row"]["images"]
    client, received = openai.OpenAI(), []
    more: dict[str, Any] = {"model": "policy", "logprobs": True, "extra_body": {"return_token_ids": True}}

    def shown(url: str) -> dict[str, Any]:
        return {"type": "image_url", "image_url": {"url": url, "detail": "low"}}

    messages: list[Any] = [{"role": "user", "content": [{"type": "text", "text": "yes "}, shown(first)]}]
    for number in range(3):
        choice = client.chat.completions.create(messages=messages, **more).choices[0]
        received.append([choice.token_ids, [entry.logprob for entry in choice.logprobs.content]])
        if not number:
            messages.append(choice.message.model_dump(exclude_none=True))
            messages.append({"role": "user", "content": [shown(second), {"type": "text", "text": "no <|image_pad|>"}]})

    claude, system = anthropic.Anthropic(), "you are kind"
    blocks = [
        {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": url.partition(",")[2]}}
        for url in (first, second)
    ]
    talk: list[Any] = [{"role": "user", "content": [blocks[0], {"type": "text", "text": "so"}]}]
    count = claude.messages.count_tokens(model="policy", messages=talk, system=system)
    reply = claude.messages.create(model="policy", messages=talk, system=system, max_tokens=200)
    assert count.input_tokens == reply.usage.input_tokens
    talk += [{"role": "assistant", "content": reply.content}, {"role": "user", "content": [blocks[1]]}]
    claude.messages.create(model="policy", messages=talk, system=system, max_tokens=200)

    item = {"role": "user", "content": [{"type": "input_image", "image_url": first}]}
    reply = client.responses.create(model="policy", input=[item])
    result = {"type": "function_call_output", "call_id": "1", "output": [{"type": "input_image", "image_url": second}]}
    client.responses.create(model="policy", input=[item, *reply.output, result])

    refused = {
        "https://example.com/a.png": r"messages\[0\].content\[0\].image_url: found 'https.*not fetched",
        "data:image/png;base64,a": r"messages\[0\].content\[0\].image_url: found 'a'",
        "data:image/png;base64,QUJD": r"messages\[0\].content\[0\]: the file is not an image",
        first[: len("data:image/png;base64,") + 400]: r"messages\[0\].content\[0\]: the image cannot be read",
    }
    for url, words in refused.items():
        with pytest.raises(openai.BadRequestError, match=words):
            client.chat.completions.create(model="policy", messages=[{"role": "user", "content": [shown(url)]}])
    with pytest.raises(openai.BadRequestError, match=r"content\[3\]: found 4 images; data.limit_images .* allows 3"):
        client.chat.completions.create(model="policy", messages=[{"role": "user", "content": [shown(first)] * 4}])
    with pytest.raises(openai.BadRequestError, match=r"only messages of users"):
        client.chat.completions.create(model="policy", messages=[{"role": "system", "content": [shown(first)]}])
    _write(task, received)


def _write(task: dict[str, Any], received: list[Any]) -> None:
    with open(task["row"]["file"], "w") as file:
        json.dump(received, file)
    with open(os.environ["MEGARL_RESULT"], "w") as file:
        file.write("1")
