"""Chat messages of a row: OpenAI's form, with content as text or in parts, or ShareGPT's `from` and `value`.

They are converted to `{"role": ..., "content": text, ...}`. Other keys of a message (`tool_calls`, `reasoning_content`,
`name`) are kept for the chat template, which must write them; keys that are null or empty are removed.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from megarl.data.row_images import MARK, VIDEO_MARK, is_image
from megarl.data.rows import MEDIA_FIX, Row
from megarl.system.errors import DataError, shortened

Message = dict[str, Any]
ASSISTANT = "assistant"
SYSTEM_ROLES = ("system", "developer")  # OpenAI renamed "system" to "developer"
#: The recipe key of the column of responses in supervised fine-tuning.
SFT_RESPONSE = "sft.response_key"
#: OpenAI's key for whether an assistant's message is learnt, 1 or 0; chat templates do not see it.
WEIGHT = "weight"
#: Keys that tie a tool's answer to its call; the template need not write them, since the answer follows the call.
_OF_CALLS = ("tool_call_id", "name")
_SHAREGPT = {
    "human": "user",
    "gpt": ASSISTANT,
    "observation": "tool",
    **{role: role for role in ("system", "user", ASSISTANT, "tool")},
}
#: The `type` of a message part that stands for the row's next video in the column `data.video_key`.
_VIDEO = "video"
_FORM = 'text, or chat messages [{"role": "user", "content": "..."}, ...]'


def read_messages(value: Any, row: Row, column: str, *, images: bool = False, videos: bool = False) -> list[Message]:
    """Return the chat messages in `value`, the entry of `column` in `row`; plain text becomes one message of the user.

    Args:
        images: convert image parts to the text `<image>`; if false, an image part is an error, as it always is in the
            assistant's messages.
        videos: convert parts {"type": "video"} to the text `<video>`; the same errors as for images.
    """
    if isinstance(value, str):
        return [{"role": "user", "content": value}]
    if not isinstance(value, list) or not value or not all(isinstance(message, dict) for message in value):
        raise _wrong_type(value, row, column)
    return [_read(message, number, value, row, column, images, videos) for number, message in enumerate(value, 1)]


def without_weight(messages: list[Message]) -> list[Message]:
    """Return the messages without the key `weight`, as a chat template sees them."""
    return [{key: value for key, value in message.items() if key != WEIGHT} for message in messages]


def extra_keys(message: Message) -> list[str]:
    """Return the keys of a message that a chat template must write in addition to its role and content."""
    known = ("role", "content", WEIGHT, *(_OF_CALLS if message.get("role") == "tool" else ()))
    return [key for key in message if key not in known]


def is_learnt(message: Message) -> bool:
    """Return whether the assistant's message counts in the loss."""
    return bool(message.get(WEIGHT, 1))


def before_assistant(messages: list[Message]) -> list[Message]:
    """Return the messages before the assistant's first one: a conversation's prompt."""
    first = next((i for i, message in enumerate(messages) if message["role"] == ASSISTANT), len(messages))
    return messages[:first]


def prompt_messages(
    value: Any, row: Row, column: str, *, whole: bool, images: bool = False, videos: bool = False
) -> list[Message]:
    """Return the messages of the prompt, as the policy sees them.

    Args:
        value: value of the prompt's column.
        whole: the column holds conversations with the responses to learn; the prompt is the part before the responses.
        images, videos: convert image parts to `<image>`, video parts to `<video>`; if false, such parts are errors.
    """
    messages = read_messages(value, row, column, images=images, videos=videos)
    if not whole and messages[-1]["role"] == ASSISTANT:
        raise DataError(
            f"the messages in column {column!r} end with the assistant's, so that the prompt holds the response",
            where=row.where,
            found=shortened(messages[-1]["content"]),
            allowed="a prompt that ends with the user's message, or a tool's",
            fix=f"for supervised fine-tuning set sft.response_key to {column!r}, too: the prompt is then what comes "
            "before the assistant's first message. For RL, remove the assistant's last message from the column",
        )
    prompt = before_assistant(messages) if whole else messages
    if not prompt:
        raise DataError(
            f"the conversation in column {column!r} begins with the assistant's message, so that there is no prompt",
            where=row.where,
            found=shortened(messages[0]["content"]),
            fix="remove the row, or put the user's message first",
        )
    return without_weight(prompt)


def response_of(
    row: Row,
    prompt_key: str,
    response_key: str,
    *,
    images: bool = False,
    videos: bool = False,
    setting: str = SFT_RESPONSE,
) -> list[Message]:
    """Return a row's response as messages; the assistant's messages are trained on. See `response_messages`.

    Args:
        setting: the recipe key that names the column `response_key`, for error messages.
    """
    value = row.column(response_key, setting)
    whole = prompt_key == response_key
    if whole and not isinstance(value, list):
        raise DataError(
            f"data.prompt_key and {setting} are both {response_key!r}, and the column holds no conversation",
            where=row.where,
            found=type(value).__name__,
            allowed="chat messages that end with the assistant's",
            fix="set one of the two to another column",
        )
    if not isinstance(value, list):
        return response_messages(value, response_key, row, setting=setting)
    prompt = row.column(prompt_key, "data.prompt_key")
    shown = prompt_messages(prompt, row, prompt_key, whole=whole, images=images, videos=videos)
    return response_messages(value, response_key, row, shown, images=images, videos=videos, setting=setting)


def response_messages(
    value: Any,
    key: str,
    row: Row,
    prompt: list[Message] | None = None,
    *,
    images: bool = False,
    videos: bool = False,
    setting: str = SFT_RESPONSE,
) -> list[Message]:
    """Return a response: text or an integer as one message, or messages that begin and end with the assistant's.

    Args:
        value: entry of the column `key`.
        key: name of the column, for error messages.
        row: the row, for error messages.
        prompt: messages of the row's prompt. If the response begins with them, they are removed, and so are messages
            after the assistant's last one.
        images, videos: whether the prompt may contain images or videos; a response that contains any is an error.
        setting: the recipe key that names the column, for error messages.
    """
    if isinstance(value, str):
        return [{"role": ASSISTANT, "content": value}]
    if isinstance(value, int) and not isinstance(value, bool):
        return [{"role": ASSISTANT, "content": str(value)}]
    messages = list[Message]()
    if isinstance(value, list):
        messages = read_messages(value, row, key, images=images, videos=videos)
    if prompt is not None and len(messages) > len(prompt) and without_weight(messages[: len(prompt)]) == prompt:
        last = max((i for i, message in enumerate(messages) if message["role"] == ASSISTANT), default=0)
        messages = messages[len(prompt) : last + 1]
    marks = [*[(MARK, "an image")] * images, *[(VIDEO_MARK, "a video")] * videos]
    noun = next((noun for mark, noun in marks if any(mark in message["content"] for message in messages)), None)
    if noun is not None:
        raise DataError(
            f"the response in column {key!r} holds {noun}, which only prompts may contain",
            where=row.where,
            fix=f"end the conversation before the message with {noun}, or remove the row",
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
        supervised = setting == SFT_RESPONSE
        reader = "supervised fine-tuning and a cold start (sft.steps above 0) read" if supervised else "it is"
        raise DataError(
            f"column {key!r} does not hold a response to train on",
            where=row.where,
            found="null" if value is None else value,
            allowed="text, an integer, or chat messages that begin and end with the assistant's",
            fix=f"write the response into the column, or remove the row; {reader} the column of {setting}",
        )
    _refuse_unlearnt(messages, key, row)
    return messages


def _refuse_unlearnt(messages: list[Message], key: str, row: Row) -> None:
    """Raise an error if two assistant messages follow each other, or no assistant message is trained on."""
    roles = [message["role"] for message in messages]
    twice = next((i for i in range(1, len(roles)) if roles[i - 1 : i + 1] == [ASSISTANT, ASSISTANT]), None)
    if twice is not None:
        raise DataError(
            f"two messages of the assistant follow each other in column {key!r}; a model writes one at a time",
            where=row.where,
            found=[shortened(message["content"], 60) for message in messages[twice - 1 : twice + 1]],
            fix="join them into one message, or remove the row",
        )
    if not any(is_learnt(message) for message in messages if message["role"] == ASSISTANT):
        raise DataError(
            f"column {key!r} has no message to train on: every message of the assistant has weight 0",
            where=row.where,
            fix="remove the row",
        )


def _read(
    message: dict[str, Any], number: int, value: Any, row: Row, column: str, images: bool, videos: bool
) -> Message:
    shared = "from" in message and "role" not in message
    role, content = (message.get("from"), message.get("value")) if shared else map(message.get, ("role", "content"))
    if shared and isinstance(role, str):
        if role not in _SHAREGPT:
            raise DataError(
                f"message {number} in column {column!r} has an unknown sender",
                where=row.where,
                found=role,
                allowed=_SHAREGPT,
                fix="write the message with the keys role and content, or remove the row",
            )
        role = _SHAREGPT[role]
    names = ("from", "value") if shared else ("role", "content")
    more = {key: item for key, item in message.items() if key not in names and item not in (None, "", [], {})}
    if isinstance(content, list):
        content = _joined(content, number, row, column, images and role != ASSISTANT, videos and role != ASSISTANT)
    if content is None and role == ASSISTANT and more.keys() - {WEIGHT}:
        content = ""  # a tool call without text
    if not isinstance(role, str) or not isinstance(content, str):
        raise _wrong_type(value, row, column)
    if WEIGHT in more and more[WEIGHT] not in ((0, 1) if role == ASSISTANT else (0,)):
        raise DataError(
            f"message {number} in column {column!r} has an invalid weight",
            where=row.where,
            found=f"weight {more[WEIGHT]!r} of role {role!r}",
            allowed="0 or 1 for the assistant's messages, 0 for all others, which are never trained on",
            fix="remove the weight",
        )
    if role != ASSISTANT:
        more.pop(WEIGHT, None)
    return {"role": role, "content": content, **more}


def _joined(parts: list[Any], number: int, row: Row, column: str, images: bool, videos: bool) -> str | None:
    """Join the parts of a message's content into text; return None if the list does not consist of parts."""
    texts = []
    for part in parts:
        if not isinstance(part, dict) or not isinstance(part.get("type"), str):
            return None
        if images and is_image(part):
            texts.append(MARK)
            continue
        # a table stores each key in all parts, as null where the part does not have it
        more = [key for key, item in part.items() if key != "type" and item not in (None, "", [], {})]
        if videos and part["type"] == _VIDEO and not more:
            texts.append(VIDEO_MARK)  # the next video of data.video_key
            continue
        if part["type"] != "text" or not isinstance(part.get("text"), str):
            raise DataError(
                f"message {number} in column {column!r} has content that is not text",
                where=row.where,
                found=part if part["type"] == "text" else part["type"],
                allowed='parts of text: {"type": "text", "text": "..."}',
                fix=_fix_of(part, videos),
            )
        texts.append(part["text"])
    return "".join(texts) if texts else None


def _fix_of(part: dict[str, Any], videos: bool) -> str:
    """Return the fix of the error for a message part that is not text."""
    video = part["type"].startswith(_VIDEO)
    if video and videos:
        return f'put the video into the column of data.video_key, and leave {{"type": "{_VIDEO}"}} in the message'
    noun = "image" if is_image(part) else _VIDEO if video else None
    if noun is None:
        return MEDIA_FIX
    return f"set data.{noun}_key for a vision-language model that should see the {noun}; otherwise {MEDIA_FIX}"


def _wrong_type(value: Any, row: Row, column: str) -> DataError:
    return DataError(
        f"column {column!r} holds neither text nor valid chat messages",
        where=row.where,
        found="null" if value is None else value if len(repr(value)) < 200 else type(value).__name__,
        allowed=_FORM,
    )


@dataclass(frozen=True)
class PromptColumn:
    """The column of rows that contains the prompts."""

    name: str = "prompt"  # name of the column, `data.prompt_key`
    whole: bool = False  # whether the column holds conversations with the responses to learn
    images: bool = False  # whether prompts may contain images
    videos: bool = False  # whether prompts may contain videos

    def messages(self, row: Mapping[str, Any]) -> list[Message] | None:
        """Return the prompt's messages; None if the prompt is text, or the row lacks the column."""
        entry = Row(row, "row", 0)
        try:
            value = entry.column(self.name, "data.prompt_key")
        except DataError:
            return None
        if not isinstance(value, list):
            return None
        return prompt_messages(value, entry, self.name, whole=self.whole, images=self.images, videos=self.videos)
