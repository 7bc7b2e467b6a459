"""The layout of samples as sequences of the model: text, or policy calls of a robot
(megarl/robots/models/vla/sequences.py).

A layout makes rows of samples, one for each sequence, and packs rows end to end. It tells the engine which columns
predict a token of the response, and what else the model needs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from megarl.data.batch import Batch, Jagged


@dataclass(frozen=True)
class PackedRows:
    """The rows that were packed end to end: T columns, N response tokens.

    Attributes:
        lengths: columns of each row.
        tokens: int64 [T], input.
        predicts: int64 [T], which of the N response tokens each column predicts; -1 for none.
        targets: int64 [N].
        open_from: see `megarl.models.packing.PackedSequences`.
        seen: what a policy sees, with places among the T columns.
        positions: int64 [3, T], of models whose positions have three numbers; None: the places in each row.
    """

    lengths: list[int]
    tokens: Tensor
    predicts: Tensor
    targets: Tensor
    open_from: Sequence[int] = ()
    seen: Any = None
    positions: Tensor | None = None


class SequenceLayout(Protocol):
    """The way from samples to packed rows.

    Attributes:
        columns: first and one past the last token that log-probs are over; None: all of the vocabulary.
    """

    @property
    def columns(self) -> tuple[int, int] | None:
        """Return the first and one past the last token that log-probs are over; None: all of the vocabulary."""

    def rows(self, samples: Batch) -> Batch:
        """Return one row per sequence, with the response tokens of `samples` in their order."""

    def sample_columns(self, samples: Batch) -> list[list[int]]:
        """Return the columns of every sequence of each sample, prompt and whole response: they are counted as work."""

    def lengths(self, batch: Batch) -> Tensor:
        """Return the columns of each row, int64 [B].

        Raises:
            ValueError: a row that cannot go through the model.
        """

    def patches(self, batch: Batch) -> Sequence[Mapping[int, int]]:
        """Return the patches of each image of each row, by the image's digest, where they are not columns; empty: no
        row has any."""

    def pack(self, rows: Batch) -> PackedRows:
        """Pack these rows end to end; at least one."""

    def filler(self) -> PackedRows:
        """Return one row without effect that goes through every parameter: it keeps a rank in step with the others."""


class TextLayout:
    """The layout of text: P prompt and R response tokens become P + R - 1, since the last one predicts nothing.

    Response token j is predicted at place P - 1 + j.
    """

    columns = None

    def rows(self, samples: Batch) -> Batch:
        """Return the samples themselves: a sample is a sequence."""
        return samples

    def sample_columns(self, samples: Batch) -> list[list[int]]:
        """See `SequenceLayout`."""
        lengths = samples["prompt_ids"].lengths + samples["response_ids"].lengths
        return [[length] for length in lengths.tolist()]

    def lengths(self, batch: Batch) -> Tensor:
        """See `SequenceLayout`; a response needs a token to predict, and a prompt to predict it from."""
        prompts, responses = batch["prompt_ids"].lengths.cpu(), batch["response_ids"].lengths.cpu()
        if len(batch) and min(int(prompts.min()), int(responses.min())) < 1:
            bad = int(((prompts < 1) | (responses < 1)).nonzero()[0])
            raise ValueError(f"sample {bad} has {int(prompts[bad])} prompt and {int(responses[bad])} response tokens")
        return prompts + responses - 1

    def patches(self, batch: Batch) -> Sequence[Mapping[int, int]]:
        """See `SequenceLayout`."""
        return ()

    def pack(self, rows: Batch) -> PackedRows:
        """See `SequenceLayout`."""
        return self._pack(rows["prompt_ids"].to("cpu"), rows["response_ids"].to("cpu"))

    def filler(self) -> PackedRows:
        """Return a prompt of one token with a response of one token."""
        one = Jagged.from_list([[0]], dtype=torch.int64)
        return self._pack(one, one)

    @staticmethod
    def _pack(prompts: Jagged, responses: Jagged) -> PackedRows:
        tokens, predicts, done = [], [], 0
        for prompt, response in zip(prompts.unbind(), responses.unbind(), strict=True):
            tokens += [prompt, response[:-1]]
            predicts += [
                torch.full((len(prompt) - 1,), -1, dtype=torch.int64),
                torch.arange(done, done + len(response)),
            ]
            done += len(response)
        lengths = (prompts.lengths + responses.lengths - 1).tolist()
        return PackedRows(lengths, torch.cat(tokens), torch.cat(predicts), responses.values)


TEXT = TextLayout()
