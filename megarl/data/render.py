"""The rendering of rows as token ids: templates, tokenizer, length limit. Without torch: a command does it before a
run, too."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Sequence
from typing import Any, Literal, Protocol

from megarl.config.data import DataConfig
from megarl.data.announcement import NO_TOOLS, Announcement
from megarl.data.continuation import to_continue
from megarl.data.messages import SYSTEM_ROLES, Message, prompt_messages
from megarl.data.rows import Row, check_text, refuse_media
from megarl.data.templates import ChatTemplate, chat_renderer, no_template_for_tools, prompt_formatter
from megarl.system.errors import ConfigError, DataError

Split = Literal["train", "val"]
Chat = Callable[[list[Message], Row], str]
#: (text of a prompt, its row) -> the text with the model's tokens of images
Mark = Callable[[str, Row], str]
_BETWEEN = f"\0{uuid.uuid4().hex}\0"  # no text of a row has it
_TOKENISE_AT_ONCE = 4096


class Tokenizer(Protocol):
    """The part of transformers' tokenizers that is used here."""

    bos_token_id: Any
    unk_token_id: Any

    def __call__(self, text: Any, **settings: Any) -> Any:
        """Return `input_ids` of a text, or of each text of a list."""


def render_prompts(
    config: DataConfig, chat: Chat | None, rows: Sequence[Row], *, whole: bool = False, mark: Mark | None = None
) -> list[str]:
    """Return the text of each row's prompt: column, then data.format_prompt, then the chat template.

    Args:
        chat: (messages, row) -> text; None: no chat template is in use.
        whole, mark: as in `given_prompts`.

    Raises:
        DataError, ConfigError: as `given_prompts`, or the chat template refuses the messages.
    """
    return written(given_prompts(config, rows, chat=chat is not None, whole=whole, mark=mark), chat, rows)


def written(prompts: Sequence[str | list[Message]], chat: Chat | None, rows: Sequence[Row]) -> list[str]:
    """Return the text of what `given_prompts` made of the rows: messages through the chat template, text as it is."""
    texts = []
    for prompt, row in zip(prompts, rows, strict=True):
        if not isinstance(prompt, str):
            assert chat is not None, "messages are given where a chat template is in use"
            prompt = chat(prompt, row)
        texts.append(prompt)
    return texts


def given_prompts(
    config: DataConfig, rows: Sequence[Row], *, chat: bool, whole: bool = False, mark: Mark | None = None
) -> list[str | list[Message]]:
    """Return each row's prompt before the chat template: messages, or text where none is in use.

    data.format_prompt is applied to the text, or to the last user message of a list of messages; data.system_prompt
    comes before messages of which none is the system's.

    Args:
        chat: a chat template is in use.
        whole: the column holds conversations with the responses to learn; prompts are what comes before them.
        mark: makes the model's tokens of `<image>`, in the text of a whole prompt.

    Raises:
        DataError: missing column, wrong type, columns of pictures; the row is named.
        ConfigError: settings of a chat template or a system prompt, and no template is in use.
    """
    if config.chat_template_kwargs and not chat:
        raise ConfigError(
            "no chat template is in use that could read this",
            where="data.chat_template_kwargs",
            found=config.chat_template_kwargs,
            fix="set data.chat_template: true, or remove it",
        )
    if config.system_prompt is not None and not chat:
        raise ConfigError(
            "no chat template is in use that could write a system message",
            where="data.system_prompt",
            found=config.system_prompt,
            fix="set data.chat_template: true, or write the text into data.format_prompt",
        )
    render = prompt_formatter(config.format_prompt)
    prompts: list[str | list[Message]] = []
    for row in rows:
        content = row.column(config.prompt_key, "data.prompt_key")
        refuse_media(row, _read_as_text(config, row), config.image_key)
        if isinstance(content, str) and not chat:
            text = render(content, row)
            prompts.append(text if mark is None else mark(text, row))
            continue
        messages = prompt_messages(content, row, config.prompt_key, whole=whole, images=config.image_key is not None)
        if not chat:
            raise DataError(
                f"column {config.prompt_key!r} holds chat messages, but no chat template is in use",
                where=row.where,
                fix="set data.chat_template: true"
                if config.chat_template is False
                else "the tokenizer has none: set data.override_chat_template",
            )
        last = max((i for i, message in enumerate(messages) if message["role"] == "user"), default=None)
        if last is not None:
            messages[last] = {**messages[last], "content": render(messages[last]["content"], row)}
        if config.system_prompt is not None and not any(message["role"] in SYSTEM_ROLES for message in messages):
            messages = [{"role": SYSTEM_ROLES[0], "content": config.system_prompt}, *messages]
        prompts.append(messages if mark is None else _marked(messages, mark, row))
    return prompts


def _marked(messages: list[Message], mark: Mark, row: Row) -> list[Message]:
    """Return the messages with the model's tokens of images: these belong to the messages in their order."""
    whole = _BETWEEN.join(message["content"] for message in messages)
    contents = mark(whole, row).split(_BETWEEN)
    return [{**message, "content": content} for message, content in zip(messages, contents, strict=True)]


def _read_as_text(config: DataConfig, row: Row) -> list[str]:
    """Return the columns of text that is read as text, even where it is the name of a picture."""
    read = (config.prompt_key, config.answer_key, "data_source")
    return [name for name in read if name is not None and isinstance(row.get(name), str)]


def tokenize(tokenizer: Tokenizer, texts: Sequence[str], rows: Sequence[Row], *, special: bool) -> list[list[int]]:
    """Return the token ids of each text. `special` lets the tokenizer add what it adds before a text (for some a begin
    token); an end token that it adds is left out, because the text goes on.

    Raises:
        DataError: an empty result, or a piece that the tokenizer has no token for; the row is named.
    """
    for text, row in zip(texts, rows, strict=True):
        check_text(text, "the text", row)  # a template or a chat template may have made what the row did not hold
    ids: list[list[int]] = []
    for start in range(0, len(texts), _TOKENISE_AT_ONCE):
        some = list(texts[start : start + _TOKENISE_AT_ONCE])
        ids += tokenizer(some, add_special_tokens=special, return_attention_mask=False)["input_ids"]
    if special:
        ids = to_continue(tokenizer, ids)
    for text, row, tokens in zip(texts, rows, ids, strict=True):
        if not tokens:
            raise DataError("the text has no tokens", where=row.where, found=text, fix=row.way_out)
        if tokenizer.unk_token_id is not None and tokenizer.unk_token_id in tokens:
            raise DataError(
                f"the tokenizer has no token for {_unknown(tokenizer, text)!r}",
                where=row.where,
                found=text[:200],
                fix=f"add it to the tokenizer (model.tokenizer 'chars:...'), or {row.way_out}",
            )
    return ids


def chat_of(config: DataConfig, tokenizer: Any, tools: Announcement = NO_TOOLS) -> ChatTemplate | None:
    """Return the chat template that prompts go through; None: they are plain text.

    Raises:
        ConfigError: as `chat_renderer`; or there are tools to present, and no chat template.
    """
    if not uses_chat(config, bool(tokenizer.chat_template)):
        if tools != NO_TOOLS:
            raise no_template_for_tools()
        return None
    return chat_renderer(tokenizer, config.override_chat_template, tools, config.chat_template_kwargs, config.date)


def uses_chat(config: DataConfig, has_template: bool) -> bool:
    """Tell whether prompts go through a chat template. `has_template`: the tokenizer has one."""
    if config.override_chat_template is not None:
        return True
    return has_template if config.chat_template == "auto" else config.chat_template


def _unknown(tokenizer: Tokenizer, text: str) -> str:
    """Return the first character of `text` that has no token; all of it when no single one is to blame."""
    for character in text:
        if tokenizer.unk_token_id in tokenizer(character, add_special_tokens=False)["input_ids"]:
            return character
    return text[:80]


def within_limit(config: DataConfig, split: Split, rows: Sequence[Row], ids: Sequence[Sequence[int]]) -> list[int]:
    """Return the indices of the prompts of at most data.max_prompt_tokens.

    Raises:
        DataError: a longer one with data.overlong: error, or no prompt is left.
    """
    limit = config.max_prompt_tokens
    kept = [i for i, prompt in enumerate(ids) if len(prompt) <= limit]
    if len(kept) < len(ids) and config.overlong == "error":
        first = next(i for i, prompt in enumerate(ids) if len(prompt) > limit)
        raise DataError(
            f"the prompt is longer than the limit ({len(ids) - len(kept)} such prompts in all)",
            where=rows[first].where,
            found=f"{len(ids[first])} tokens",
            allowed=f"data.max_prompt_tokens: {limit}",
            fix=f"raise it to {max(map(len, ids))}, or set data.overlong: filter",
        )
    if not kept:
        raise DataError(
            f"no prompt is left: all {len(ids)} are longer than the limit",
            where=f"data.{split}_files",
            found=f"shortest prompt: {min(map(len, ids))} tokens",
            allowed=f"data.max_prompt_tokens: {limit}",
            fix="raise data.max_prompt_tokens",
        )
    return kept
