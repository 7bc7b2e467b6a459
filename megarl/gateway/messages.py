"""Chat messages in one form, whatever API they arrived by, and when two of them are the same.

    wire (OpenAI, Anthropic) -> ChatMessage -> matched with the record, or written by the chat template

A client sends back what it was sent, but not letter for letter: JSON is spelled again, thoughts are left out, and
empty fields become null. These differences do not count. Every other difference does, white space included.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from megarl.data.row_images import without_images

if TYPE_CHECKING:
    from megarl.data.image_set import ImageSet

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
class ChatImage:
    """An image in a message.

    Attributes:
        place: number of characters of the message's text before it.
        file: bytes of the image file.
        where: its place in the request, for errors.
        pixels: the image as the model reads it; None: it has not been read.
    """

    place: int
    file: bytes = field(repr=False)
    where: str
    pixels: ImageSet | None = None

    @property
    def key(self) -> tuple[int, Any]:
        """A value that is equal for images at the same place that look the same to the model."""
        return self.place, self.file if self.pixels is None else self.pixels.digests


@dataclass(frozen=True)
class ChatMessage:
    """One message of a conversation.

    Attributes:
        role: system, user, assistant or tool.
        content: its text, without its images.
        reasoning: the assistant's thoughts.
        call_id: for a tool's message, the id of the call that it answers; else empty.
        images: the images of a user's or tool's message, by rising place.
    """

    role: str
    content: str = ""
    reasoning: str = ""
    calls: tuple[ToolCall, ...] = ()
    call_id: str = ""
    images: tuple[ChatImage, ...] = ()

    def is_replayed_by(self, other: ChatMessage) -> bool:
        """Return whether `other`, from a later request, is this message sent back; it may lack the thoughts."""
        return (
            (self.role, self.content) == (other.role, other.content)
            and other.reasoning in ("", self.reasoning)
            and [call.key for call in self.calls] == [call.key for call in other.calls]
            and [image.key for image in self.images] == [image.key for image in other.images]
        )

    def with_text_before(self, text: str) -> ChatMessage:
        """Return the message with a text before its own."""
        moved = tuple(replace(image, place=image.place + len(text)) for image in self.images)
        return replace(self, content=text + self.content, images=moved)

    @property
    def parts(self) -> list[dict[str, Any]]:
        """The text and the images as parts, `{"type": "text", "text": ...}` and `{"type": "image", "image": ...}`."""
        parts, begin = list[dict[str, Any]](), 0
        for image in self.images:
            parts += [
                {"type": "text", "text": self.content[begin : image.place]},
                {"type": "image", "image": image.pixels},
            ]
            begin = image.place
        return [*parts, {"type": "text", "text": self.content[begin:]}]

    def for_template(self) -> dict[str, Any]:
        """Return the message as chat templates take it, with the calls' arguments as objects; with images its content
        is a list of `parts`."""
        message: dict[str, Any] = {"role": self.role, "content": self.parts if self.images else self.content}
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

    def without_pixels(self) -> dict[str, Any]:
        """Return the message as `for_template` does, with nothing of its images but their places."""
        written = self.for_template()
        return {**written, "content": without_images(self.parts)} if self.images else written


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
            folded.append(message.with_text_before("".join(f"{text}\n\n" for text in late)))
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
