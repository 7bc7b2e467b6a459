"""Responses labelled as desirable or not as data to train on (KTO)."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from megarl.config.data import DataConfig
from megarl.config.training import PreferenceConfig
from megarl.data.batch import Batch, Jagged
from megarl.data.pairs import as_examples, label_of
from megarl.data.prompts import read_split, tokens_text
from megarl.data.sft import SFTDataset
from megarl.errors import count

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from megarl.data.image_prompts import ImagePrompts
    from megarl.data.render import Split


class LabelledDataset(SFTDataset):
    """All examples of a split, less the overlong ones; of files of pairs the chosen responses, then the rejected ones.

    Attributes:
        labels: bool [examples], which are desirable.
    """

    _limit = "the model's positions, or preference.max_tokens"

    def __init__(
        self,
        config: DataConfig,
        settings: PreferenceConfig,
        tokenizer: PreTrainedTokenizerBase,
        split: Split = "train",
        max_tokens: int | None = None,
        stop_ids: Sequence[int] = (),
        images: ImagePrompts | None = None,
    ) -> None:
        """Read, render and tokenise prompts and responses; arguments are those of PairDataset.

        Raises:
            DataError: a row is neither an example nor a pair, is longer than it may be (data.overlong: error), or none
                is left.
            ConfigError: no files for the split.
        """
        rows = as_examples(read_split(config, split), config, settings)
        limits = [limit for limit in (max_tokens, settings.max_tokens) if limit is not None]
        super().__init__(
            config,
            tokenizer,
            settings.completion_key,
            split,
            min(limits, default=None),
            stop_ids=stop_ids,
            images=images,
            rows=rows,
        )
        self.split = split
        self.labels = torch.tensor([label_of(row, settings) for row in self.rows], dtype=torch.bool)
        digest = hashlib.blake2b(self.labels.numpy().tobytes(), digest_size=16)
        digest.update(self.fingerprint.encode())
        self.fingerprint = digest.hexdigest()

    def describe(self) -> str:
        """Return one line for the log: how many examples, how many desirable, how long, how many dropped."""
        lengths = self.prompt_ids.lengths + self.response_ids.lengths
        text = f"{self.split}: {count(len(self), 'example')} of {tokens_text(lengths)}"
        text += f", {int(self.labels.sum())} desirable"
        dropped = self.overlong + self.too_long
        return text + (f"; {dropped} with a prompt or a sequence that is too long dropped" if dropped else "")

    def batch(self, indices: Sequence[int], epoch: int = 0) -> Batch:
        """Return the examples at `indices`: SFTDataset's batch plus `sample_id` and `label`."""
        batch = super().batch(indices, epoch)
        batch.set("sample_id", [f"{uid}#0" for uid in batch["uid"]])
        batch.set("label", self.labels[torch.tensor(indices, dtype=torch.int64)])
        return batch

    def set_mismatched(self, batch: Batch, others: Sequence[int]) -> None:
        """Give each sample of `batch` the response of the example in its place of `others`, too; of one that is too
        long after this prompt the beginning."""
        places = torch.tensor(others, dtype=torch.int64)
        responses, learnt = self.response_ids.select(places), self._learnt.select(places)
        if self.max_tokens is not None:
            room = (self.max_tokens - batch["prompt_ids"].lengths).tolist()
            responses, learnt = _cut(responses, room), _cut(learnt, room)
        batch.set("mismatched_ids", responses)
        batch.set("mismatched_mask", responses.like(learnt.values))


def _cut(rows: Jagged, limits: Sequence[int]) -> Jagged:
    """Return the beginning of each row, at most so many numbers."""
    return Jagged.from_list([row[:limit] for row, limit in zip(rows.unbind(), limits, strict=True)], dtype=rows.dtype)
