"""Supervised examples from the same rows: prompt, response and end token, with the loss on the response only."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from megarl.config.data import DataConfig
from megarl.data.batch import Batch, Jagged
from megarl.data.prompts import PromptDataset, Split, tokenize
from megarl.data.sources import Row
from megarl.errors import DataError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class SFTDataset(PromptDataset):
    """Prompts with the response to learn.

    Prompt and response are tokenised apart, as they are in RL, so that a model meets the same prompt tokens in both.
    """

    def __init__(
        self,
        config: DataConfig,
        tokenizer: PreTrainedTokenizerBase,
        response_key: str = "answer",
        split: Split = "train",
    ) -> None:
        """Read, render and tokenise both columns; see PromptDataset for what is refused.

        Raises:
            DataError: the response column is missing, or holds neither text nor a whole number; the row is named.
        """
        super().__init__(config, tokenizer, split)
        self.responses = [
            _response(row.column(response_key, "sft.response_key"), response_key, row) for row in self.rows
        ]
        ids = tokenize(tokenizer, self.responses, self.rows, special=False)
        self.response_ids = Jagged.from_list([[*tokens, tokenizer.eos_token_id] for tokens in ids], dtype=torch.int64)
        digest = hashlib.blake2b(self.response_ids.values.numpy().tobytes(), digest_size=16)
        digest.update(self.response_ids.offsets.numpy().tobytes() + self.fingerprint.encode())
        self.fingerprint = digest.hexdigest()

    def batch(self, indices: Sequence[int], epoch: int = 0) -> Batch:
        """Examples at `indices`: PromptDataset's batch plus response_ids, response_mask (all 1, end token included),
        and the column response_text."""
        batch = super().batch(indices, epoch)
        responses = self.response_ids.select(torch.tensor(indices, dtype=torch.int64))
        batch.set("response_ids", responses)
        batch.set("response_mask", responses.like(torch.ones(len(responses.values), dtype=torch.bool)))
        batch.set("response_text", [self.responses[i] for i in indices])
        return batch


def _response(value: object, key: str, row: Row) -> str:
    if isinstance(value, str):
        return value
    if isinstance(value, int) and not isinstance(value, bool):
        return str(value)
    raise DataError(
        f"wrong type in column {key!r}",
        where=row.where,
        found=value,
        allowed="text or a whole number",
    )
