"""Data sets of preferences: pairs of a chosen and a rejected response, or responses labelled as desirable or not (KTO).

A pair becomes two samples of one group, the chosen response first.
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
    """Read the preference data of a split: pairs, or labelled examples for KTO; takes the arguments of PairDataset."""
    return (LabelledDataset if settings.labelled else PairDataset)(config, settings, *more, **keywords)


class PairDataset:
    """The preference pairs of a split, in file order, without overlong pairs and pairs of equal responses.

    Attributes:
        fingerprint: hash of all remaining pairs; resuming a checkpoint with other data is an error.
        equal: number of pairs dropped because both responses are the same.
        overlong: number of pairs dropped because the prompt or a sequence is too long.
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
            max_tokens: maximum tokens per sequence for the model; `preference.max_tokens` can lower it.
            stop_ids: tokens that end a turn, in addition to the tokenizer's end token.
            images: reads the images of prompts; None: rows have no images.
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
        """Return a log line with the number of pairs, their tokens, and how many were dropped."""
        lengths = self._lengths[torch.tensor(self._kept)]
        text = f"{self.split}: {count(len(self), 'pair')} of at most {tokens_text(lengths)} a sequence"
        text += dropped((self.equal, "with equal responses"), (self.overlong, _TOO_LONG))
        return text + self._chosen.notes() + self._rejected.notes()

    def batch(self, indices: Sequence[int], epoch: int = 0) -> Batch:
        """Return the pairs at `indices`, each as two samples, the chosen response first.

        The batch has the fields of SFTDataset.batch with one `uid` per pair, the column `sample_id`, and `margin` if
        the recipe names its column.
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
    """The KTO examples of a split, without overlong examples.

    Pairs become two examples each: all chosen responses come first, then all rejected ones.

    Attributes:
        labels: bool [examples], True for desirable responses.
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
        """Read, render and tokenise prompts and responses; arguments are those of PairDataset."""
        rows = as_examples(read_split(config, split), config, settings)
        key, limit = settings.completion_key, settings.limit(max_tokens)
        super().__init__(config, tokenizer, key, split, limit, stop_ids=stop_ids, images=images, rows=rows)
        self.split = split
        self.labels = torch.tensor([label_of(row, settings) for row in self.rows], dtype=torch.bool)
        self.fingerprint = fingerprint(self.labels, self.fingerprint)

    def describe(self) -> str:
        """Return a log line with the numbers of examples, desirable examples, tokens and dropped examples."""
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

    def set_mismatched(self, batch: Batch, indices: Sequence[int], others: Sequence[int]) -> None:
        """Add mismatched_ids and mismatched_mask to the batch: the response of another example after each prompt.

        A response is cut where prompt and response exceed `max_tokens`. If an example is paired with itself, its mask
        is 0.

        Args:
            batch: the examples at `indices`.
            others: for each example, the index of the example whose response it gets.
        """
        places = torch.tensor(others, dtype=torch.int64)
        responses, learnt = self.response_ids.select(places), self._learnt.select(places)
        counts = (places != torch.tensor(indices, dtype=torch.int64)).repeat_interleave(learnt.lengths)
        learnt = learnt.like(learnt.values & counts)
        if self.max_tokens is not None:
            room = (self.max_tokens - batch["prompt_ids"].lengths).tolist()
            responses, learnt = _cut(responses, room), _cut(learnt, room)
        batch.set("mismatched_ids", responses)
        batch.set("mismatched_mask", responses.like(learnt.values))


def _cut(rows: Jagged, limits: Sequence[int]) -> Jagged:
    """Cut row i to at most `limits[i]` entries."""
    return Jagged.from_list([row[:limit] for row, limit in zip(rows.unbind(), limits, strict=True)], dtype=rows.dtype)
