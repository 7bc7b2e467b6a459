"""Preference pairs as data to train on: each is two samples of one group, the chosen response first."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from megarl.config.data import DataConfig
from megarl.config.training import PreferenceConfig
from megarl.data.batch import Batch
from megarl.data.labelled import LabelledDataset
from megarl.data.pairs import as_pairs
from megarl.data.prompts import read_split, tokens_text
from megarl.data.sft import SFTDataset
from megarl.errors import DataError, count

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from megarl.data.image_prompts import ImagePrompts
    from megarl.data.render import Split


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
        pairs = as_pairs(rows, config, settings)
        self.equal = len(rows) - len(pairs)
        if not pairs:
            raise DataError(
                "there is no pair: the two responses of every row are equal",
                where=f"data.{split}_files",
                found=len(rows),
            )
        keys = (settings.chosen_key, settings.rejected_key)
        self._chosen, self._rejected = (
            SFTDataset(config, tokenizer, key, split, stop_ids=stop_ids, images=images, rows=pairs) for key in keys
        )
        longest = torch.maximum(self._chosen.response_ids.lengths, self._rejected.response_ids.lengths)
        self._lengths = self._chosen.prompt_ids.lengths + longest
        limits = [limit for limit in (max_tokens, settings.max_tokens) if limit is not None]
        self._kept = self._that_fit(min(limits), config.overlong) if limits else list(range(len(self._lengths)))
        self.overlong = self._chosen.overlong + len(self._lengths) - len(self._kept)
        digest = hashlib.blake2b(digest_size=16)
        digest.update(f"{self._chosen.fingerprint} {self._rejected.fingerprint} {self._kept}".encode())
        self.fingerprint = digest.hexdigest()

    def __len__(self) -> int:
        return len(self._kept)

    def describe(self) -> str:
        """Return one line for the log: how many pairs, how long, how many dropped."""
        lengths = self._lengths[torch.tensor(self._kept)]
        parts = [f"{self.split}: {count(len(self), 'pair')} of at most {tokens_text(lengths)} a sequence"]
        if self.equal:
            parts.append(f"{self.equal} with equal responses dropped")
        if self.overlong:
            parts.append(f"{self.overlong} with a prompt or a sequence that is too long dropped")
        return "; ".join(parts)

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

    def _that_fit(self, limit: int, overlong: str) -> list[int]:
        """Return the indices of the pairs of at most `limit` tokens in each of their two sequences."""
        lengths = self._lengths.tolist()
        kept = [i for i, length in enumerate(lengths) if length <= limit]
        if kept and (len(kept) == len(lengths) or overlong == "filter"):
            return kept
        first = next(i for i, length in enumerate(lengths) if length > limit)
        raise DataError(
            f"prompt and response are too long ({len(lengths) - len(kept)} of {count(len(lengths), 'such pair')})",
            where=self._chosen.rows[first].where,
            found=f"{lengths[first]} tokens",
            allowed=f"{limit} tokens (the model's positions, or preference.max_tokens)",
            fix="set data.overlong: filter" if kept else "shorten the responses, or raise preference.max_tokens",
        )
