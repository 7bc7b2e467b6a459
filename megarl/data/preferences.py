"""Preferences as data to train on.

Pairs are two samples of one group, the chosen response first; labelled examples (KTO) are desirable or not.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from megarl.config.data import DataConfig
from megarl.config.training import PreferenceConfig
from megarl.data.batch import Batch, Jagged
from megarl.data.pairs import as_examples, differing_pairs, label_of
from megarl.data.prompts import dropped, fingerprint, read_split, tokens_text
from megarl.data.sft import SFTDataset, within_tokens
from megarl.system.errors import count

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from megarl.data.image_prompts import ImagePrompts
    from megarl.data.render import Split


_TOO_LONG = "with a prompt or a sequence that is too long"


def open_preferences(
    config: DataConfig, settings: PreferenceConfig, *more: Any, **keywords: Any
) -> PairDataset | LabelledDataset:
    """Return the pairs of a split, or the labelled examples of KTO; arguments are those of PairDataset."""
    return (LabelledDataset if settings.labelled else PairDataset)(config, settings, *more, **keywords)


class PairDataset:
    """All pairs of a split, in the order of the files, less those with equal responses and the overlong ones.

    Attributes:
        fingerprint: hash of all pairs kept; a checkpoint refuses to continue on other data.
        equal: pairs dropped because both responses are the same.
        overlong: pairs dropped because a sequence is too long.
    """

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
        """Read, render and tokenise both responses of each row.

        Args:
            max_tokens: the model's limit; `preference.max_tokens` lowers it.
            stop_ids: as in SFTDataset.
            images: as in PromptDataset.

        Raises:
            DataError: a row is no pair, is longer than it may be (data.overlong: error), or none is left.
            ConfigError: no files for the split.
        """
        self.split, self._margin_key = split, settings.margin_key
        rows = read_split(config, split)
        pairs = differing_pairs(rows, config, settings, split)
        self.equal = len(rows) - len(pairs)
        keys = (settings.chosen_key, settings.rejected_key)
        self._chosen, self._rejected = (
            SFTDataset(config, tokenizer, key, split, stop_ids=stop_ids, images=images, rows=pairs) for key in keys
        )
        both = (side.prompt_ids.lengths + side.response_ids.lengths for side in (self._chosen, self._rejected))
        self._lengths = torch.maximum(*both)
        limit, lengths = settings.limit(max_tokens), self._lengths.tolist()
        self._kept = within_tokens(limit, lengths, self._chosen.rows, config, "preference.max_tokens")
        self.overlong = self._chosen.overlong + len(self._lengths) - len(self._kept)
        self.fingerprint = fingerprint(f"{self._chosen.fingerprint} {self._rejected.fingerprint} {self._kept}")

    def __len__(self) -> int:
        return len(self._kept)

    def describe(self) -> str:
        """Return one line for the log: how many pairs, how long, how many dropped."""
        lengths = self._lengths[torch.tensor(self._kept)]
        text = f"{self.split}: {count(len(self), 'pair')} of at most {tokens_text(lengths)} a sequence"
        text += dropped((self.equal, "with equal responses"), (self.overlong, _TOO_LONG))
        return text + self._chosen.notes() + self._rejected.notes()

    def batch(self, indices: Sequence[int], epoch: int = 0) -> Batch:
        """Return the pairs at `indices`, each as two samples, the chosen response first.

        Fields are those of SFTDataset.batch, with `uid` shared by the two, `sample_id`, and `margin` where the recipe
        names its column.
        """
        places = [self._kept[i] for i in indices]
        both = Batch.concat([side.batch(places, epoch) for side in (self._chosen, self._rejected)])
        pairs = both.select([side * len(places) + i for i in range(len(places)) for side in (0, 1)])
        pairs.set("sample_id", [f"{uid}#{('chosen', 'rejected')[i % 2]}" for i, uid in enumerate(pairs["uid"])])
        if self._margin_key is not None:
            rows = [self._chosen.rows[i] for i in places for _ in (0, 1)]
            margins = [row.column(self._margin_key, "preference.margin_key") for row in rows]
            pairs.set("margin", torch.tensor(margins, dtype=torch.float32))
        return pairs


class LabelledDataset(SFTDataset):
    """All examples of a split, less the overlong ones; of files of pairs the chosen responses, then the rejected ones.

    Attributes:
        labels: bool [examples], which are desirable.
    """

    limit_key = "preference.max_tokens"

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
        key, limit = settings.completion_key, settings.limit(max_tokens)
        super().__init__(config, tokenizer, key, split, limit, stop_ids=stop_ids, images=images, rows=rows)
        self.split = split
        self.labels = torch.tensor([label_of(row, settings) for row in self.rows], dtype=torch.bool)
        self.fingerprint = fingerprint(self.labels, self.fingerprint)

    def describe(self) -> str:
        """Return one line for the log: how many examples, how many desirable, how long, how many dropped."""
        lengths = self.prompt_ids.lengths + self.response_ids.lengths
        text = f"{self.split}: {count(len(self), 'example')} of {tokens_text(lengths)}"
        text += f", {int(self.labels.sum())} desirable"
        return text + dropped((self.overlong + self.too_long, _TOO_LONG)) + self.notes()

    def batch(self, indices: Sequence[int], epoch: int = 0) -> Batch:
        """Return the examples at `indices`: SFTDataset's batch plus `sample_id` and `label`."""
        batch = super().batch(indices, epoch)
        batch.set("sample_id", [f"{uid}#0" for uid in batch["uid"]])
        batch.set("label", self.labels[torch.tensor(indices, dtype=torch.int64)])
        return batch

    def set_mismatched(self, batch: Batch, own: Sequence[int], others: Sequence[int]) -> None:
        """Give each sample of `batch`, the examples at `own`, the response of the example in its place of `others`.

        Of a response that is too long after this prompt it gets the beginning.

        Nothing counts of an example's own response, which it gets where there is no other example.
        """
        places = torch.tensor(others, dtype=torch.int64)
        responses, learnt = self.response_ids.select(places), self._learnt.select(places)
        counts = (places != torch.tensor(own, dtype=torch.int64)).repeat_interleave(learnt.lengths)
        learnt = learnt.like(learnt.values & counts)
        if self.max_tokens is not None:
            room = (self.max_tokens - batch["prompt_ids"].lengths).tolist()
            responses, learnt = _cut(responses, room), _cut(learnt, room)
        batch.set("mismatched_ids", responses)
        batch.set("mismatched_mask", responses.like(learnt.values))


def _cut(rows: Jagged, limits: Sequence[int]) -> Jagged:
    """Return the beginning of each row, at most so many numbers."""
    return Jagged.from_list([row[:limit] for row, limit in zip(rows.unbind(), limits, strict=True)], dtype=rows.dtype)
