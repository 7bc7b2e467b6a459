"""Render rows of data to token ids: templates, tokenizer, length limit. Needs no torch, for use before a run."""

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
#: (text of a prompt, its row) -> the text with `<image>` replaced by the model's image tokens
Mark = Callable[[str, Row], str]
_BETWEEN = f"\0{uuid.uuid4().hex}\0"  # a separator that cannot occur in a row's text
_TOKENISE_AT_ONCE = 4096


class Tokenizer(Protocol):
    """The part of transformers' tokenizer interface that this module uses."""

    bos_token_id: Any
    unk_token_id: Any

    def __call__(self, text: Any, **settings: Any) -> Any:
        """Return a mapping whose `input_ids` are the token ids of a text, or of each text of a list."""


def render_prompts(
    config: DataConfig, chat: Chat | None, rows: Sequence[Row], *, whole: bool = False, mark: Mark | None = None
) -> list[str]:
    """Return each row's prompt as text: the prompt column after data.format_prompt and the chat template.

    Args:
        chat: (messages, row) -> text; None: no chat template is used.
        whole: the column has whole conversations, responses included; a prompt is the part before the responses.
        mark: replaces `<image>` by the model's image tokens, in the text of a whole prompt.
    """
    return written(given_prompts(config, rows, chat=chat is not None, whole=whole, mark=mark), chat, rows)


def written(prompts: Sequence[str | list[Message]], chat: Chat | None, rows: Sequence[Row]) -> list[str]:
    """Return prompts as text: the chat template renders messages; prompts that are text already stay as they are."""
    texts = []
    for prompt, row in zip(prompts, rows, strict=True):
        if not isinstance(prompt, str):
            assert chat is not None, "given_prompts returns messages only for a chat template"
            prompt = chat(prompt, row)
        texts.append(prompt)
    return texts


def given_prompts(
    config: DataConfig, rows: Sequence[Row], *, chat: bool, whole: bool = False, mark: Mark | None = None
) -> list[str | list[Message]]:
    """Return each row's prompt before the chat template: messages, or text if no chat template is used.

    data.format_prompt is applied to the text, or to the last user message. data.system_prompt becomes the first
    message if the row has no system message.

    Args:
        chat: whether a chat template is used.
        whole: the column has whole conversations, responses included; a prompt is the part before the responses.
        mark: replaces `<image>` by the model's image tokens, in the text of a whole prompt.
    """
    if config.chat_template_kwargs and not chat:
        raise ConfigError(
            "no chat template is used, so nothing reads these variables",
            where="data.chat_template_kwargs",
            found=config.chat_template_kwargs,
            fix="set data.chat_template: true, or remove the variables",
        )
    if config.system_prompt is not None and not chat:
        raise ConfigError(
            "no chat template is used, so no system message can be written",
            where="data.system_prompt",
            found=config.system_prompt,
            fix="set data.chat_template: true, or write the text into data.format_prompt",
        )
    render = prompt_formatter(config.format_prompt)
    # these columns are text, even if a value is the name of an image file
    texts = (config.prompt_key, config.answer_key, "data_source")
    shown = [key.partition(".")[0] for key in (config.image_key, config.video_key) if key is not None]
    prompts: list[str | list[Message]] = []
    for row in rows:
        content = row.column(config.prompt_key, "data.prompt_key")
        refuse_media(row, [name for name in texts if name and isinstance(row.get(name), str)], shown)
        if isinstance(content, str) and not chat:
            text = render(content, row)
            prompts.append(text if mark is None else mark(text, row))
            continue
        images, videos = config.image_key is not None, config.video_key is not None
        messages = prompt_messages(content, row, config.prompt_key, whole=whole, images=images, videos=videos)
        if not chat:
            raise DataError(
                f"column {config.prompt_key!r} has chat messages, but no chat template is used",
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
        if mark is not None:  # all messages together must have one `<image>` per image of the row
            contents = mark(_BETWEEN.join(message["content"] for message in messages), row).split(_BETWEEN)
            messages = [{**message, "content": text} for message, text in zip(messages, contents, strict=True)]
        prompts.append(messages)
    return prompts


def tokenize(tokenizer: Tokenizer, texts: Sequence[str], rows: Sequence[Row], *, special: bool) -> list[list[int]]:
    """Return the token ids of each text.

    Args:
        rows: the row of each text, for error messages.
        special: whether the tokenizer adds its begin token. An end token that it adds is removed, since the response
            follows.
    """
    for text, row in zip(texts, rows, strict=True):
        check_text(text, "the text", row)  # templates may have added text that the row does not have
    ids: list[list[int]] = []
    for start in range(0, len(texts), _TOKENISE_AT_ONCE):
        part = list(texts[start : start + _TOKENISE_AT_ONCE])
        ids += tokenizer(part, add_special_tokens=special, return_attention_mask=False)["input_ids"]
    if special:
        ids = to_continue(tokenizer, ids)
    for text, row, tokens in zip(texts, rows, ids, strict=True):
        if not tokens:
            raise DataError("the text has no tokens", where=row.where, found=text, fix=row.column_fix)
        if tokenizer.unk_token_id is not None and tokenizer.unk_token_id in tokens:
            unknown = (c for c in text if tokenizer.unk_token_id in tokenizer(c, add_special_tokens=False)["input_ids"])
            raise DataError(
                f"the tokenizer has no token for {next(unknown, text[:80])!r}",
                where=row.where,
                found=text[:200],
                fix=f"add it to the tokenizer (model.tokenizer 'chars:...'), or {row.column_fix}",
            )
    return ids


def chat_of(config: DataConfig, tokenizer: Any, tools: Announcement = NO_TOOLS) -> ChatTemplate | None:
    """Return the chat template that writes prompts; None: prompts are plain text."""
    if not uses_chat(config, bool(tokenizer.chat_template)):
        if tools != NO_TOOLS:
            raise no_template_for_tools()
        return None
    return chat_renderer(tokenizer, config.override_chat_template, tools, config.chat_template_kwargs, config.date)


def uses_chat(config: DataConfig, has_template: bool) -> bool:
    """Return whether a chat template writes prompts; `has_template`: whether the tokenizer has one."""
    if config.override_chat_template is not None:
        return True
    return has_template if config.chat_template == "auto" else config.chat_template


def within_limit(config: DataConfig, split: Split, rows: Sequence[Row], ids: Sequence[Sequence[int]]) -> list[int]:
    """Return the indices of the prompts with at most data.max_prompt_tokens tokens.

    Raises:
        DataError: no prompt is left, or a prompt is longer and data.overlong is `error`.
    """
    limit = config.max_prompt_tokens
    fitting = [i for i, prompt in enumerate(ids) if len(prompt) <= limit]
    if len(fitting) < len(ids) and config.overlong == "error":
        first = next(i for i, prompt in enumerate(ids) if len(prompt) > limit)
        raise DataError(
            f"the prompt is longer than the limit ({len(ids) - len(fitting)} such prompts in all)",
            where=rows[first].where,
            found=f"{len(ids[first])} tokens",
            allowed=f"data.max_prompt_tokens: {limit}",
            fix=f"raise the limit to {max(map(len, ids))}" + (", or set data.overlong: filter" if fitting else ""),
        )
    if not fitting:
        raise DataError(
            f"no prompt is left: all {len(ids)} are longer than the limit",
            where=f"data.{split}_files",
            found=f"shortest prompt: {min(map(len, ids))} tokens",
            allowed=f"data.max_prompt_tokens: {limit}",
            fix="raise data.max_prompt_tokens",
        )
    return fitting
