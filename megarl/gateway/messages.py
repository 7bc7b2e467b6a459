"""Chat messages in one form, whatever API they arrived by, and when two of them are the same.

    wire (OpenAI, Anthropic) -> ChatMessage -> matched with the record, or written by the chat template

A client sends back what it was sent, but not letter for letter: JSON is spelled again, thoughts are left out, and
empty fields become null. These differences do not count. Every other difference does, white space included.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

SYSTEM, USER, ASSISTANT, TOOL = "system", "user", "assistant", "tool"


@dataclass(frozen=True)
class ToolCall:
    """A call in an assistant's message; `arguments` is JSON text as it was sent."""

    id: str
    name: str
    arguments: str

    @property
    def parsed(self) -> Any:
        """The arguments as a JSON value; the text itself if it is not JSON, or has a key twice in one object."""
        try:
            return json.loads(self.arguments, object_pairs_hook=_no_twice, parse_constant=_no_twice)
        except (ValueError, RecursionError):
            return self.arguments

    @property
    def key(self) -> str:
        """A text that is equal for calls that differ only in id and in how the arguments are spelled."""
        value = self.parsed
        spelled = self.arguments if isinstance(value, str) else json.dumps(value, sort_keys=True)
        return f"{self.name}\0{spelled}"


@dataclass(frozen=True)
class ChatMessage:
    """One message of a conversation.

    Attributes:
        role: system, user, assistant or tool.
        reasoning: the assistant's thoughts.
        call_id: for a tool's message, the id of the call that it answers; else empty.
    """

    role: str
    content: str = ""
    reasoning: str = ""
    calls: tuple[ToolCall, ...] = ()
    call_id: str = ""

    def is_replayed_by(self, other: ChatMessage) -> bool:
        """Return whether `other`, from a later request, is this message sent back; it may lack the thoughts."""
        return (
            (self.role, self.content) == (other.role, other.content)
            and other.reasoning in ("", self.reasoning)
            and [call.key for call in self.calls] == [call.key for call in other.calls]
        )

    def for_template(self) -> dict[str, Any]:
        """Return the message as chat templates take it, with the calls' arguments as objects."""
        message: dict[str, Any] = {"role": self.role, "content": self.content}
        if self.reasoning:
            message["reasoning_content"] = self.reasoning
        if self.calls:
            message["tool_calls"] = [
                {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.parsed}}
                for call in self.calls
            ]
        if self.call_id:
            message["tool_call_id"] = self.call_id
        return message


def are_replayed(sent: Sequence[ChatMessage], given: Sequence[ChatMessage]) -> bool:
    """Return whether `given` begins with the messages `sent`."""
    return len(sent) <= len(given) and all(map(ChatMessage.is_replayed_by, sent, given))


def systems_of(messages: Sequence[ChatMessage]) -> list[str]:
    """Return the texts of the system messages."""
    return [message.content for message in messages if message.role == SYSTEM]


def fold_systems(messages: Sequence[ChatMessage]) -> list[ChatMessage]:
    """Put the text of system messages after the first message into the next user message, for templates that accept
    them only at the start. Without a next user message one is added.
    """
    folded: list[ChatMessage] = []
    late: list[str] = []
    for place, message in enumerate(messages):
        if message.role == SYSTEM and place:
            late.append(message.content)
        elif message.role == USER and late:
            folded.append(replace(message, content="\n\n".join([*late, message.content])))
            late = []
        else:
            folded.append(message)
    return [*folded, ChatMessage(USER, "\n\n".join(late))] if late else folded


def _no_twice(pairs: list[tuple[str, Any]] | str) -> dict[str, Any]:
    """Return the pairs of a JSON object as a dict. Raise ValueError for a repeated key, and for the text of a constant
    such as NaN: `json.loads` calls this function for both."""
    value = {} if isinstance(pairs, str) else dict(pairs)
    if len(value) < len(pairs):
        raise ValueError(f"not valid JSON (a repeated key, NaN or an infinity): {pairs}")
    return value
