"""From rows to token ids: templates, tokenizer, length limit. Without torch: a command does it before a run, too."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal, Protocol

from megarl.config.data import DataConfig
from megarl.data.rows import Row, check_text
from megarl.data.templates import prompt_formatter
from megarl.errors import DataError

Split = Literal["train", "val"]
Chat = Callable[[list[dict[str, str]], Row], str]
_TOKENISE_AT_ONCE = 4096


class Tokenizer(Protocol):
    """What is needed of transformers' tokenizers."""

    bos_token_id: Any
    unk_token_id: Any

    def __call__(self, text: Any, **settings: Any) -> Any:
        """`input_ids` of a text, or of each of a list."""


def render_prompts(config: DataConfig, chat: Chat | None, rows: Sequence[Row]) -> list[str]:
    """Text of each row's prompt: column, then data.format_prompt, then the chat template.

    data.format_prompt is applied to the text, or to the last user message of a list of messages.

    Args:
        chat: (messages, row) -> text; None: no chat template is in use.

    Raises:
        DataError: missing column or wrong type; the row is named.
    """
    render = prompt_formatter(config.format_prompt)
    texts = []
    for row in rows:
        content = row.column(config.prompt_key, "data.prompt_key")
        if isinstance(content, str) and chat is None:
            texts.append(render(content, row))
            continue
        messages = _messages(content, row, config.prompt_key)
        if chat is None:
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
        texts.append(chat(messages, row))
    return texts


def tokenize(tokenizer: Tokenizer, texts: Sequence[str], rows: Sequence[Row], *, special: bool) -> list[list[int]]:
    """Token ids of each text. `special` lets the tokenizer add what it adds by itself (for some a begin token).

    Raises:
        DataError: an empty result, or a piece that the tokenizer has no token for; the row is named.
    """
    for text, row in zip(texts, rows, strict=True):
        check_text(text, "the text", row)  # a template or a chat template may have made what the row did not hold
    ids: list[list[int]] = []
    for start in range(0, len(texts), _TOKENISE_AT_ONCE):
        some = list(texts[start : start + _TOKENISE_AT_ONCE])
        ids += tokenizer(some, add_special_tokens=special, return_attention_mask=False)["input_ids"]
    begin = tokenizer.bos_token_id
    for text, row, tokens in zip(texts, rows, ids, strict=True):
        if special and begin is not None and tokens[:2] == [begin, begin]:
            del tokens[0]  # the text already began with the begin token, as prompts made elsewhere often do
        if not tokens:
            raise DataError("the text has no tokens", where=row.where, found=text, fix="take the row out")
        if tokenizer.unk_token_id is not None and tokenizer.unk_token_id in tokens:
            raise DataError(
                f"the tokenizer has no token for {_unknown(tokenizer, text)!r}",
                where=row.where,
                found=text[:200],
                fix="add it to the tokenizer (model.tokenizer 'chars:...'), or take the row out",
            )
    return ids


def uses_chat(config: DataConfig, has_template: bool) -> bool:
    """True when prompts go through a chat template. `has_template`: the tokenizer brings one."""
    if config.override_chat_template is not None:
        return True
    return has_template if config.chat_template == "auto" else config.chat_template


def _messages(content: Any, row: Row, key: str) -> list[dict[str, str]]:
    if isinstance(content, str):
        return [{"role": "user", "content": content}]
    good = (
        isinstance(content, list)
        and len(content) > 0
        and all(
            isinstance(m, dict) and isinstance(m.get("role"), str) and isinstance(m.get("content"), str)
            for m in content
        )
    )
    if not good:
        raise DataError(
            f"wrong type in column {key!r}",
            where=row.where,
            found=content if len(repr(content)) < 200 else type(content).__name__,
            allowed='text, or chat messages [{"role": "user", "content": "..."}, ...]',
        )
    return list(content)


def _unknown(tokenizer: Tokenizer, text: str) -> str:
    """First character of `text` that has no token; all of it when no single one is to blame."""
    for character in text:
        if tokenizer.unk_token_id in tokenizer(character, add_special_tokens=False)["input_ids"]:
            return character
    return text[:80]


def within_limit(config: DataConfig, split: Split, rows: Sequence[Row], ids: Sequence[Sequence[int]]) -> list[int]:
    """Indices of the prompts of at most data.max_prompt_tokens.

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


def response_text(value: object, key: str, row: Row) -> str:
    """A response to learn, as text: all that is said in it."""
    return "".join(message["content"] for message in response_messages(value, key, row))


def response_messages(value: object, key: str, row: Row) -> list[dict[str, str]]:
    """A response to learn: text, an integer, or messages that begin and end with the assistant's.

    Raises:
        DataError: anything else.
    """
    if isinstance(value, str):
        return [{"role": "assistant", "content": value}]
    if isinstance(value, int) and not isinstance(value, bool):
        return [{"role": "assistant", "content": str(value)}]
    if isinstance(value, list):
        messages = _messages(value, row, key)
        if messages[0]["role"] == messages[-1]["role"] == "assistant":
            return messages
    raise DataError(
        f"wrong type in column {key!r}",
        where=row.where,
        found=value,
        allowed="text, an integer, or chat messages that begin and end with the assistant's",
    )
