"""Chat messages of a row: OpenAI's form, with content as text or in parts, and ShareGPT's `from` and `value`.

Read once into `{"role": ..., "content": text, ...}`. Other keys of a message (`tool_calls`, `reasoning_content`,
`name`) stay in it for the chat template, which writes them or is refused; null and empty ones are left out.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from megarl.data.row_images import MARK, is_image
from megarl.data.rows import MEDIA_FIX, Row
from megarl.system.errors import DataError, shortened

Message = dict[str, Any]
ASSISTANT = "assistant"
SYSTEM_ROLES = ("system", "developer")  # OpenAI has renamed it
#: Whether the assistant's message is learnt, 1 or 0: OpenAI's key. It is for training, and no template sees it.
WEIGHT = "weight"
#: The reference of a tool's answer to its call, which comes just before it: models are shown their order.
_OF_CALLS = ("tool_call_id", "name")
_SHAREGPT = {
    "human": "user",
    "gpt": ASSISTANT,
    "observation": "tool",
    **{role: role for role in ("system", "user", ASSISTANT, "tool")},
}
_FORM = 'text, or chat messages [{"role": "user", "content": "..."}, ...]'


def read_messages(value: Any, row: Row, column: str, *, images: bool = False) -> list[Message]:
    """Return the messages that `value`, of a row's column, holds; text is the user's.

    Args:
        images: parts that are images become `<image>`; else they are refused, as everywhere in the assistant's.

    Raises:
        DataError: it is neither, a message has no text, or a weight that is not 0 or 1; the row is named.
    """
    if isinstance(value, str):
        return [{"role": "user", "content": value}]
    if not isinstance(value, list) or not value or not all(isinstance(message, dict) for message in value):
        raise _wrong_type(value, row, column)
    return [_read(message, number, value, row, column, images) for number, message in enumerate(value, 1)]


def without_weight(messages: list[Message]) -> list[Message]:
    """Return the messages as a chat template sees them."""
    return [{key: value for key, value in message.items() if key != WEIGHT} for message in messages]


def extra_keys(message: Message) -> list[str]:
    """Return the keys that a chat template has to write, in addition to the content."""
    known = ("role", "content", WEIGHT, *(_OF_CALLS if message.get("role") == "tool" else ()))
    return [key for key in message if key not in known]


def is_learnt(message: Message) -> bool:
    """Tell whether the loss counts the assistant's message."""
    return bool(message.get(WEIGHT, 1))


def before_assistant(messages: list[Message]) -> list[Message]:
    """Return the messages before the assistant's first one: the prompt of a whole conversation."""
    first = next((i for i, message in enumerate(messages) if message["role"] == ASSISTANT), len(messages))
    return messages[:first]


def prompt_messages(value: Any, row: Row, column: str, *, whole: bool, images: bool = False) -> list[Message]:
    """Return the messages that the policy is shown.

    Args:
        value: value of the prompt's column.
        whole: the column holds conversations with the responses to learn; the prompt is what comes before them.
        images: as in `read_messages`.

    Raises:
        DataError: as `read_messages`; the assistant speaks last, or first.
    """
    messages = read_messages(value, row, column, images=images)
    if not whole and messages[-1]["role"] == ASSISTANT:
        raise DataError(
            f"the messages in column {column!r} end with the assistant's, so that the prompt holds the response",
            where=row.where,
            found=shortened(messages[-1]["content"]),
            allowed="a prompt that ends with the user's message, or a tool's",
            fix=f"for supervised fine-tuning set sft.response_key to {column!r}, too: the prompt is then what comes "
            "before the assistant's first message. For RL, take the assistant's last message out of the column",
        )
    prompt = before_assistant(messages) if whole else messages
    if not prompt:
        raise DataError(
            f"the conversation in column {column!r} begins with the assistant's message, so that there is no prompt",
            where=row.where,
            found=shortened(messages[0]["content"]),
            fix="take the row out, or put the user's message first",
        )
    return without_weight(prompt)


def response_of(row: Row, prompt_key: str, response_key: str, *, images: bool = False) -> list[Message]:
    """Return the response of a row to learn: messages of which the assistant's are learnt. See `response_messages`.

    Raises:
        DataError: as `response_messages` and `prompt_messages`; or both keys name a column of text.
    """
    value = row.column(response_key, "sft.response_key")
    whole = prompt_key == response_key
    if whole and not isinstance(value, list):
        raise DataError(
            f"data.prompt_key and sft.response_key are both {response_key!r}, and the column holds no conversation",
            where=row.where,
            found=type(value).__name__,
            allowed="chat messages that end with the assistant's",
            fix="set one of the two to another column",
        )
    if not isinstance(value, list):
        return response_messages(value, response_key, row)
    shown = prompt_messages(row.column(prompt_key, "data.prompt_key"), row, prompt_key, whole=whole, images=images)
    return response_messages(value, response_key, row, shown, images=images)


def response_messages(
    value: Any, key: str, row: Row, prompt: list[Message] | None = None, *, images: bool = False
) -> list[Message]:
    """Return a response to learn: text, an integer, or messages that begin and end with the assistant's.

    Args:
        value: value of the column `key`.
        key: the column, for messages.
        row: the row, likewise.
        prompt: messages of the row's prompt. A response that repeats them at its start is what comes after them, up to
            the assistant's last message.
        images: the prompt may hold images; what comes after it may not.

    Raises:
        DataError: anything else, or nothing in it is learnt.
    """
    if isinstance(value, str):
        return [{"role": ASSISTANT, "content": value}]
    if isinstance(value, int) and not isinstance(value, bool):
        return [{"role": ASSISTANT, "content": str(value)}]
    messages = read_messages(value, row, key, images=images) if isinstance(value, list) else []
    if prompt is not None and len(messages) > len(prompt) and without_weight(messages[: len(prompt)]) == prompt:
        last = max((i for i, message in enumerate(messages) if message["role"] == ASSISTANT), default=0)
        messages = messages[len(prompt) : last + 1]
    if images and any(MARK in message["content"] for message in messages):
        raise DataError(
            f"the response in column {key!r} holds an image, and only prompts may",
            where=row.where,
            fix="end the conversation before it, or take the row out",
        )
    before = before_assistant(messages)
    if before and before != messages:
        raise DataError(
            f"the response in column {key!r} begins with messages that are not the prompt's",
            where=row.where,
            found=[f"{message['role']}: {shortened(message['content'], 60)}" for message in before],
            allowed="messages that begin with the assistant's, or with all messages of the prompt",
            fix=f"set data.prompt_key to {key!r}, too, if it holds the whole conversation",
        )
    if not messages or messages[0]["role"] != ASSISTANT or messages[-1]["role"] != ASSISTANT:
        raise DataError(
            f"wrong type in column {key!r}, which holds a response to learn from",
            where=row.where,
            found="null" if value is None else value,
            allowed="text, an integer, or chat messages that begin and end with the assistant's",
            fix="write the response into the column, or take the row out; supervised fine-tuning and a cold start "
            "(sft.steps above 0) read the column of sft.response_key",
        )
    _refuse_unlearnt(messages, key, row)
    return messages


def _refuse_unlearnt(messages: list[Message], key: str, row: Row) -> None:
    """Refuse a response in which the assistant speaks twice in a row, or has nothing to learn."""
    roles = [message["role"] for message in messages]
    twice = next((i for i in range(1, len(roles)) if roles[i - 1 : i + 1] == [ASSISTANT, ASSISTANT]), None)
    if twice is not None:
        raise DataError(
            f"two messages of the assistant follow each other in column {key!r}, and a model says one at a time",
            where=row.where,
            found=[shortened(message["content"], 60) for message in messages[twice - 1 : twice + 1]],
            fix="join them into one message, or take the row out",
        )
    if not any(is_learnt(message) for message in messages if message["role"] == ASSISTANT):
        raise DataError(
            f"nothing in column {key!r} is learnt: every message of the assistant has weight 0",
            where=row.where,
            fix="take the row out",
        )


def _read(message: dict[str, Any], number: int, value: Any, row: Row, column: str, images: bool) -> Message:
    shared = "from" in message and "role" not in message
    role, content = (message.get("from"), message.get("value")) if shared else map(message.get, ("role", "content"))
    if shared and isinstance(role, str):
        if role not in _SHAREGPT:
            raise DataError(
                f"message {number} in column {column!r} is said by someone unknown",
                where=row.where,
                found=role,
                allowed=_SHAREGPT,
                fix="write the message with the keys role and content, or take the row out",
            )
        role = _SHAREGPT[role]
    names = ("from", "value") if shared else ("role", "content")
    more = {key: item for key, item in message.items() if key not in names and not _is_empty(item)}
    if isinstance(content, list):
        content = _joined(content, number, row, column, images and role != ASSISTANT)
    if content is None and role == ASSISTANT and more.keys() - {WEIGHT}:
        content = ""  # a call of a tool without words
    if not isinstance(role, str) or not isinstance(content, str):
        raise _wrong_type(value, row, column)
    _check_weight(more, role, number, row, column)
    if role != ASSISTANT:
        more.pop(WEIGHT, None)
    return {"role": role, "content": content, **more}


def _joined(parts: list[Any], number: int, row: Row, column: str, images: bool) -> str | None:
    """Return the text of content that comes in parts, one after the other; None where they are no parts."""
    texts = []
    for part in parts:
        if not isinstance(part, dict) or not isinstance(part.get("type"), str):
            return None
        if images and is_image(part):
            texts.append(MARK)
            continue
        if part["type"] != "text" or not isinstance(part.get("text"), str):
            raise DataError(
                f"message {number} in column {column!r} holds content that is no text",
                where=row.where,
                found=part["type"],
                allowed='parts of text: {"type": "text", "text": "..."}',
                fix=f"set data.image_key for a vision-language model that is to see it; else {MEDIA_FIX}"
                if is_image(part)
                else MEDIA_FIX,
            )
        texts.append(part["text"])
    return "".join(texts) if texts else None


def _check_weight(more: Message, role: str, number: int, row: Row, column: str) -> None:
    if WEIGHT not in more:
        return
    if more[WEIGHT] not in ((0, 1) if role == ASSISTANT else (0,)):
        raise DataError(
            f"message {number} in column {column!r} has a weight that says nothing",
            where=row.where,
            found=f"weight {more[WEIGHT]!r} of role {role!r}",
            allowed="0 or 1 of the assistant's messages, and 0 of others, which are not learnt",
            fix="take the weight out",
        )


def _is_empty(value: Any) -> bool:
    return value is None or (isinstance(value, str | list | dict) and not value)


def _wrong_type(value: Any, row: Row, column: str) -> DataError:
    return DataError(
        f"wrong type in column {column!r}",
        where=row.where,
        found=value if len(repr(value)) < 200 else type(value).__name__,
        allowed=_FORM,
    )


@dataclass(frozen=True)
class PromptColumn:
    """The column of rows that holds the prompts.

    Attributes:
        name: `data.prompt_key`.
        whole, images: as in `prompt_messages`.
    """

    name: str = "prompt"
    whole: bool = False
    images: bool = False

    def messages(self, row: Mapping[str, Any]) -> list[Message] | None:
        """Return the prompt's messages; None where it is text, or `row` has no more than its other columns."""
        own = Row(row, "row", 0)
        try:
            value = own.column(self.name, "data.prompt_key")
        except DataError:
            return None
        if not isinstance(value, list):
            return None
        return prompt_messages(value, own, self.name, whole=self.whole, images=self.images)
