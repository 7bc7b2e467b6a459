"""An agent that answers products with a calculator; of megarl it uses only the function that multiplies.

OPENAI_BASE_URL=... OPENAI_API_KEY=... MEGARL_TASK=task.json python calculator_agent.py
"""

from __future__ import annotations

import json
import os
import urllib.error
import urllib.request
from typing import Any

from megarl.recipes.calculator import multiply

_TOOL = {
    "type": "function",
    "function": {
        "name": "multiply",
        "description": "Multiply two whole numbers.",
        "parameters": {
            "type": "object",
            "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
            "required": ["a", "b"],
        },
    },
}
_MOST_CALLS = 3


def play(task: dict[str, Any]) -> None:
    """Talk to the model until it answers without the calculator. The recipe's reward scores this answer."""
    messages = [{"role": "user", "content": task["row"]["prompt"]}]
    for _ in range(_MOST_CALLS):
        try:
            reply = _complete(messages)
        except urllib.error.HTTPError as error:
            if json.load(error)["error"].get("code") == "context_length_exceeded":
                return
            raise
        calls = reply.get("tool_calls") or []
        if not calls:
            return
        messages.append(reply)
        messages += [
            {"role": "tool", "tool_call_id": call["id"], "content": _result(call["function"])} for call in calls
        ]


def _complete(messages: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the assistant's message after these messages."""
    request = urllib.request.Request(
        f"{os.environ['OPENAI_BASE_URL']}/chat/completions",
        json.dumps({"model": "policy", "messages": messages, "tools": [_TOOL]}).encode(),
        {"Authorization": f"Bearer {os.environ['OPENAI_API_KEY']}", "Content-Type": "application/json"},
    )
    with urllib.request.urlopen(request) as response:
        message: dict[str, Any] = json.load(response)["choices"][0]["message"]
    return message


def _result(function: dict[str, str]) -> str:
    """Return the calculator's result, or what is wrong with the call."""
    arguments = json.loads(function["arguments"])
    if function["name"] != "multiply":
        return f"error: there is no function {function['name']!r}"
    if sorted(arguments) != ["a", "b"] or not all(type(value) is int for value in arguments.values()):
        return "error: multiply has two whole numbers, a and b"
    return str(multiply(**arguments))


if __name__ == "__main__":
    with open(os.environ["MEGARL_TASK"], encoding="utf-8") as file:
        play(json.load(file))
