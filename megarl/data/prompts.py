"""Prompts: rows rendered, tokenised once, checked against the length limit, and looked up by index."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from megarl.config.data import DataConfig
from megarl.data.announcement import NO_TOOLS, Announcement
from megarl.data.batch import Batch, Jagged
from megarl.data.image_prompts import ImagePrompts
from megarl.data.render import Split, chat_of, given_prompts, tokenize, within_limit, written
from megarl.data.row_images import without_images
from megarl.data.rows import Row, hidden_columns, reference_of
from megarl.data.sources import load_rows
from megarl.data.split import split_rows
from megarl.system.errors import ConfigError, count

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class PromptDataset:
    """All prompts of a split, in the order of the files, less the overlong ones.

    Attributes:
        rows: the rows kept; `rows[i].where` says where prompt i came from.
        texts: the tokenizer's input, after templates.
        given: the chat template's input, messages; the text where none is in use.
        prompt_ids: Jagged int64, one sequence per prompt.
        overlong: prompts dropped because they exceed data.max_prompt_tokens.
        fingerprint: hash of all prompts kept; a checkpoint refuses to continue on other data.
    """

    def __init__(
        self,
        config: DataConfig,
        tokenizer: PreTrainedTokenizerBase,
        split: Split = "train",
        tools: Announcement = NO_TOOLS,
        *,
        whole: bool = False,
        answered: bool = True,
        images: ImagePrompts | None = None,
        rows: Sequence[Row] | None = None,
    ) -> None:
        """Read, render and tokenise.

        Args:
            rows: of the split, where they have been read; None: those of its files.
            tools: the environment's tools, which every prompt presents.
            whole: the prompt's column holds conversations with the responses to learn; prompts are what comes before.
            answered: something reads reference answers; else rows may have none.
            images: the way to the images of a vision-language model's prompts.

        Raises:
            DataError: unreadable file, missing column, wrong type, overlong prompt (data.overlong: error), no prompts.
            ConfigError: no files for the split, broken template.
        """
        self.config, self.split = config, split
        rows = read_split(config, split) if rows is None else rows
        has_template = bool(tokenizer.chat_template)
        self.chat = chat_of(config, tokenizer, tools)
        self._images = images
        mark = None if images is None else images.marked
        given = given_prompts(config, rows, chat=self.chat is not None, whole=whole, mark=mark)
        texts = written(given, self.chat, rows)
        ids = tokenize(tokenizer, texts, rows, special=self.chat is None)
        if images is not None:
            ids = [images.expanded(prompt, row) for prompt, row in zip(ids, rows, strict=True)]
        kept = within_limit(config, split, rows, ids)
        if split == "val" and config.max_val_samples is not None:
            kept = kept[: config.max_val_samples]
        self._template = (
            " in the chat template" if self.chat else " without the tokenizer's chat template" * has_template
        )
        self.overlong = sum(len(prompt) > config.max_prompt_tokens for prompt in ids)
        self.rows = [rows[i] for i in kept]
        self.texts = [texts[i] for i in kept]
        self.given = [given[i] for i in kept]
        self.prompt_ids = Jagged.from_list([ids[i] for i in kept], dtype=torch.int64)
        self.answers = [reference_of(row, config.answer_key, demanded=answered) for row in self.rows]
        self.fingerprint = fingerprint(self.prompt_ids.offsets, self.prompt_ids.values)
        hidden = (hidden_columns(row, config.prompt_key, config.answer_key) for row in self.rows)
        self._hidden = list(dict.fromkeys(name for names in hidden for name in names))

    def __len__(self) -> int:
        return len(self.rows)

    def describe(self) -> str:
        """Return one line for the log: how many prompts, how long, whether a chat template was used, how many
        dropped."""
        prompts = f"{count(len(self), 'prompt')} of {tokens_text(self.prompt_ids.lengths)}"
        text = f"{self.split}: {prompts}{self._template}"
        text += dropped((self.overlong, f"longer than {self.config.max_prompt_tokens}"))
        return text + f"; rewards find the columns {', '.join(self._hidden)} in sample['row']" * bool(self._hidden)

    def batch(self, indices: Sequence[int], epoch: int = 0) -> Batch:
        """Return the prompts at `indices`: prompt_ids, images, columns uid, prompt_text, answer, data_source, row.

        `row` has the row's columns less those that the others hold already: the prompt's stays where templates changed
        it, and any column under another name.
        uid is `<split>-<epoch>-<index>`: the same prompt met again in a later epoch is another group.
        """
        picked = [self.rows[i] for i in indices]
        prompts = self.prompt_ids.select(torch.tensor(indices, dtype=torch.int64))
        return Batch(
            {"prompt_ids": prompts, **({} if self._images is None else self._images.fields(picked, prompts.unbind()))},
            {
                "uid": [f"{self.split}-{epoch}-{i}" for i in indices],
                "prompt_text": [self.texts[i] for i in indices],
                "answer": [self.answers[i] for i in indices],
                "data_source": [_data_source(row) for row in picked],
                "row": [self._other_columns(i) for i in indices],
            },
        )

    def _other_columns(self, index: int) -> dict[str, Any]:
        row = self.rows[index]
        held = {
            "answer": self.config.answer_key == "answer",
            "data_source": row.get("data_source") == _data_source(row),
        }
        if self._images is not None:
            held[self._images.key.partition(".")[0]] = True  # its values cannot be sent
        held["prompt"] = self.config.prompt_key == "prompt" and row["prompt"] == self.texts[index]
        columns = {name: value for name, value in row.items() if not held.get(name, False)}
        prompt = self.config.prompt_key.partition(".")[0]
        if self._images is not None and prompt in columns:
            columns[prompt] = without_images(columns[prompt])
        return columns


def read_split(config: DataConfig, split: Split) -> list[Row]:
    """Return the rows of a split.

    Raises:
        DataError: an unreadable file; `data.val_split` leaves the split without rows.
        ConfigError: no files for the split.
    """
    sources = config.train_files if split == "train" else config.held_out
    if not sources:
        raise ConfigError("no data", where=f"data.{split}_files", found=[], fix="name at least one source")
    files = split if config.val_split is None else "train"
    kwargs = {"split": files, **config.loader_kwargs}  # a function that takes `split` makes the rows of that split
    rows = [row for source in sources for row in load_rows(source, kwargs)]
    return rows if config.val_split is None else split_rows(rows, config, split)


def _data_source(row: Row) -> str:
    """Return the column data_source, else `folder/file` without suffix, else the hub or function name.

    Only the file when its path names no folder (`test.jsonl`, `../test.jsonl`): the name is a part of metric names.
    """
    given = row.get("data_source")
    if isinstance(given, str) and given:
        return given
    path = Path(row.source)
    if not (path.suffix and path.is_file()):
        return row.source
    return path.stem if path.parent.name in ("", "..") else f"{path.parent.name}/{path.stem}"


def fingerprint(*parts: Tensor | str) -> str:
    """Return a hash of tensors and texts."""
    digest = hashlib.blake2b(digest_size=16)
    for part in parts:
        digest.update(part.encode() if isinstance(part, str) else part.numpy().tobytes())
    return digest.hexdigest()


def dropped(*counts: tuple[int, str]) -> str:
    """Return the end of a line for the log: how many rows were dropped, and why, where there are any."""
    return "".join(f"; {number} {why} dropped" for number, why in counts if number)


def tokens_text(lengths: Tensor) -> str:
    """Return the lengths of sequences as text: `6 tokens`, or `3-9 tokens`. `lengths` [B] integers, not empty."""
    least, most = int(lengths.min()), int(lengths.max())
    return count(most, "token") if least == most else f"{least}-{most} tokens"
