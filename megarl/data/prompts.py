"""Prompts: rows rendered, tokenised once, checked against the length limit, and given out by index."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch

from megarl.config.data import DataConfig
from megarl.data.batch import Batch, Jagged
from megarl.data.rows import Row, check_text
from megarl.data.sources import load_rows
from megarl.data.templates import chat_renderer, prompt_formatter
from megarl.errors import ConfigError, DataError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Split = Literal["train", "val"]
_TOKENISE_AT_ONCE = 4096


class PromptDataset:
    """All prompts of a split, in the order of the files, less the overlong ones.

    Attributes:
        rows: the rows kept; `rows[i].where` says where prompt i came from.
        texts: what the tokenizer saw, after templates.
        prompt_ids: Jagged int64, one sequence per prompt.
        overlong: prompts dropped because they exceed data.max_prompt_tokens.
        fingerprint: hash of all prompts kept; a checkpoint refuses to continue on other data.
    """

    def __init__(self, config: DataConfig, tokenizer: PreTrainedTokenizerBase, split: Split = "train") -> None:
        """Read, render and tokenise.

        Raises:
            DataError: unreadable file, missing column, wrong type, overlong prompt (data.overlong: error), no prompts.
            ConfigError: no files for the split, broken template.
        """
        self.config, self.split = config, split
        sources = config.train_files if split == "train" else config.val_files
        if not sources:
            raise ConfigError("no data", where=f"data.{split}_files", found=[], fix="name at least one source")
        kwargs = {"split": split, **config.loader_kwargs}  # a function that takes `split` makes the rows of that split
        rows = [row for source in sources for row in load_rows(source, kwargs)]
        texts = render_prompts(config, tokenizer, rows)
        ids = tokenize(tokenizer, texts, rows, special=not _uses_chat(config))
        kept = self._within_limit(rows, ids)
        if split == "val" and config.max_val_samples is not None:
            kept = kept[: config.max_val_samples]
        self.overlong = sum(len(prompt) > config.max_prompt_tokens for prompt in ids)
        self.rows = [rows[i] for i in kept]
        self.texts = [texts[i] for i in kept]
        self.prompt_ids = Jagged.from_list([ids[i] for i in kept], dtype=torch.int64)
        self.answers = [
            row.column(config.answer_key, "data.answer_key") if config.answer_key else None for row in self.rows
        ]
        self.fingerprint = _fingerprint(self.prompt_ids)

    def __len__(self) -> int:
        return len(self.rows)

    def describe(self) -> str:
        """One line for the log: how many prompts, how long, how many dropped."""
        lengths = self.prompt_ids.lengths
        dropped = f"; {self.overlong} longer than {self.config.max_prompt_tokens} dropped" if self.overlong else ""
        return f"{self.split}: {len(self)} prompts of {int(lengths.min())}-{int(lengths.max())} tokens{dropped}"

    def batch(self, indices: Sequence[int], epoch: int = 0) -> Batch:
        """Prompts at `indices`: prompt_ids and the columns uid, prompt_text, answer, data_source, row.

        uid is `<split>-<epoch>-<index>`: the same prompt met again in a later epoch is another group.
        """
        picked = [self.rows[i] for i in indices]
        used = {self.config.prompt_key, self.config.answer_key, "data_source"}
        return Batch(
            {"prompt_ids": self.prompt_ids.select(torch.tensor(indices, dtype=torch.int64))},
            {
                "uid": [f"{self.split}-{epoch}-{i}" for i in indices],
                "prompt_text": [self.texts[i] for i in indices],
                "answer": [self.answers[i] for i in indices],
                "data_source": [_data_source(row) for row in picked],
                "row": [{name: value for name, value in row.items() if name not in used} for row in picked],
            },
        )

    def _within_limit(self, rows: list[Row], ids: list[list[int]]) -> list[int]:
        limit = self.config.max_prompt_tokens
        kept = [i for i, prompt in enumerate(ids) if len(prompt) <= limit]
        if len(kept) < len(ids) and self.config.overlong == "error":
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
                where=f"data.{self.split}_files",
                found=f"shortest prompt: {min(map(len, ids))} tokens",
                allowed=f"data.max_prompt_tokens: {limit}",
                fix="raise data.max_prompt_tokens",
            )
        return kept


def render_prompts(config: DataConfig, tokenizer: PreTrainedTokenizerBase, rows: Sequence[Row]) -> list[str]:
    """Text of each row's prompt: column, then data.format_prompt, then the chat template.

    data.format_prompt is applied to the text, or to the last user message of a list of messages.

    Raises:
        DataError: missing column or wrong type; the row is named.
    """
    render = prompt_formatter(config.format_prompt)
    chat = chat_renderer(tokenizer, config.override_chat_template) if _uses_chat(config) else None
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
                fix="set data.chat_template: true",
            )
        last = max((i for i, message in enumerate(messages) if message["role"] == "user"), default=None)
        if last is not None:
            messages[last] = {**messages[last], "content": render(messages[last]["content"], row)}
        texts.append(chat(messages, row))
    return texts


def tokenize(
    tokenizer: PreTrainedTokenizerBase, texts: Sequence[str], rows: Sequence[Row], *, special: bool
) -> list[list[int]]:
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


def _uses_chat(config: DataConfig) -> bool:
    return config.chat_template or config.override_chat_template is not None


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


def _unknown(tokenizer: PreTrainedTokenizerBase, text: str) -> str:
    """First character of `text` that has no token; all of it when no single one is to blame."""
    for character in text:
        if tokenizer.unk_token_id in tokenizer(character, add_special_tokens=False)["input_ids"]:
            return character
    return text[:80]


def _data_source(row: Row) -> str:
    """Column data_source, else `folder/file` without suffix, else the hub or function name.

    The file alone when its path names no folder (`test.jsonl`, `../test.jsonl`): the name is a part of metric names.
    """
    given = row.get("data_source")
    if isinstance(given, str) and given:
        return given
    path = Path(row.source)
    if not (path.suffix and path.is_file()):
        return row.source
    return path.stem if path.parent.name in ("", "..") else f"{path.parent.name}/{path.stem}"


def _fingerprint(prompts: Jagged) -> str:
    digest = hashlib.blake2b(digest_size=16)
    digest.update(prompts.offsets.numpy().tobytes())
    digest.update(prompts.values.numpy().tobytes())
    return digest.hexdigest()
