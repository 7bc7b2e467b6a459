"""The data set of prompts: rows are rendered and tokenised once, filtered by length, and looked up by index."""

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
    """The prompts of a split, in file order, without overlong prompts.

    Attributes:
        rows: the row of each prompt; `rows[i].where` is the place it was read from.
        texts: each prompt as text after templates, as the tokenizer gets it.
        given: each prompt before the chat template: messages, or text if no chat template is used.
        prompt_ids: Jagged int64, one sequence per prompt.
        overlong: number of prompts dropped because they exceed data.max_prompt_tokens.
        fingerprint: hash of all remaining prompts; resuming a checkpoint with other data is an error.
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
        keeps_given: bool = False,
    ) -> None:
        """Read, render and tokenise the rows.

        Args:
            rows: the rows of the split if they have been read already; None: read them from the split's files.
            tools: the environment's tools, which every prompt lists.
            whole: the prompt column has whole conversations, responses included; a prompt is the part before the
                responses.
            answered: the run reads reference answers, so every row needs one.
            images: reads the images of a vision-language model's prompts; None: prompts have no images.
            keeps_given: whether the rows of batches have the prompt without chat template and image tokens, for
                programs that send it to a chat endpoint.
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
        indices = within_limit(config, split, rows, ids)
        if split == "val" and config.max_val_samples is not None:
            indices = indices[: config.max_val_samples]
        self._template = (
            " in the chat template" if self.chat else " without the tokenizer's chat template" * has_template
        )
        self.overlong = sum(len(prompt) > config.max_prompt_tokens for prompt in ids)
        self.rows = [rows[i] for i in indices]
        self.texts = [texts[i] for i in indices]
        self.given = [given[i] for i in indices]
        self._sent: list[Any] | None = None
        if keeps_given:
            sent = given_prompts(config, self.rows, chat=self.chat is not None, whole=whole)
            self._sent = [p[0]["content"] if isinstance(p, list) and len(p) == 1 else p for p in sent]
        self.prompt_ids = Jagged.from_list([ids[i] for i in indices], dtype=torch.int64)
        self.answers = [reference_of(row, config.answer_key, demanded=answered) for row in self.rows]
        self.fingerprint = fingerprint(self.prompt_ids.offsets, self.prompt_ids.values)
        hidden = (hidden_columns(row, config.prompt_key, config.answer_key) for row in self.rows)
        self._hidden = list(dict.fromkeys(name for names in hidden for name in names))

    def __len__(self) -> int:
        return len(self.rows)

    def describe(self) -> str:
        """Return a log line with the number of prompts, their tokens, the template's use, and dropped prompts."""
        prompts = f"{count(len(self), 'prompt')} of {tokens_text(self.prompt_ids.lengths)}"
        text = f"{self.split}: {prompts}{self._template}"
        text += dropped((self.overlong, f"longer than {self.config.max_prompt_tokens}"))
        return text + f"; rewards read the columns {', '.join(self._hidden)} from sample['row']" * bool(self._hidden)

    def batch(self, indices: Sequence[int], epoch: int = 0) -> Batch:
        """Return the prompts at `indices`: prompt_ids, images, columns uid, prompt_text, answer, data_source, row.

        `row` has the columns of the data row that no other column of the batch repeats; it has the prompt if templates
        changed the prompt, or with `keeps_given`, then as text, or as messages if it has several. uid is
        `<split>-<epoch>-<index>`, so that a prompt forms a new group in each epoch.
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
        left_out = {
            "answer": self.config.answer_key == "answer",
            "data_source": row.get("data_source") == _data_source(row),
        }
        if self._images is not None:
            left_out[self._images.key.partition(".")[0]] = True  # the batch has the images as fields
            if self._images.videos is not None:
                left_out[self._images.videos.key.partition(".")[0]] = True
        left_out["prompt"] = self.config.prompt_key == "prompt" and row["prompt"] == self.texts[index]
        columns = {name: value for name, value in row.items() if not left_out.get(name, False)}
        prompt = self.config.prompt_key.partition(".")[0]
        if self._images is not None and prompt in columns:
            columns[prompt] = without_images(columns[prompt])
        return columns if self._sent is None else {**columns, "prompt": self._sent[index]}


def read_split(config: DataConfig, split: Split) -> list[Row]:
    """Read the rows of a split from its files, or by `data.val_split` from the training files."""
    sources = config.train_files if split == "train" else config.held_out
    if not sources:
        raise ConfigError(
            "the recipe names no data",
            where=f"data.{split}_files",
            found=[],
            fix="name at least one source" + ("" if split == "train" else ", or set data.val_split"),
        )
    files = split if config.val_split is None else "train"
    kwargs = {"split": files, **config.loader_kwargs}  # for pkg.mod:fn sources, whose rows may depend on the split
    rows = [row for source in sources for row in load_rows(source, kwargs)]
    return rows if config.val_split is None else split_rows(rows, config, split)


def _data_source(row: Row) -> str:
    """Return the name of the row's data set for metrics: column data_source, else its file, hub or function name.

    A file is named `folder/file` without suffix, or `file` if its path has no folder (`test.jsonl`, `../test.jsonl`).
    """
    given = row.get("data_source")
    if isinstance(given, str) and given:
        return given
    path = Path(row.source)
    if not (path.suffix and path.is_file()):
        return row.source
    return path.stem if path.parent.name in ("", "..") else f"{path.parent.name}/{path.stem}"


def fingerprint(*parts: Tensor | str) -> str:
    """Return a hash of tensors and texts as hexadecimal digits."""
    digest = hashlib.blake2b(digest_size=16)
    for part in parts:
        digest.update(part.encode() if isinstance(part, str) else part.numpy().tobytes())
    return digest.hexdigest()


def dropped(*counts: tuple[int, str]) -> str:
    """Return the end of a log line, such as `; 3 longer than 512 dropped`, from counts and reasons; counts of 0 are
    left out."""
    return "".join(f"; {number} {why} dropped" for number, why in counts if number)


def tokens_text(lengths: Tensor) -> str:
    """Return the lengths of sequences as text: `6 tokens`, or `3-9 tokens`. `lengths` [B] integers, not empty."""
    least, most = int(lengths.min()), int(lengths.max())
    return count(most, "token") if least == most else f"{least}-{most} tokens"
