"""How samples become sequences of the model: text, or policy calls of a robot (megarl/training/calls.py).

A form makes rows of samples, one for each sequence, and lays rows end to end. Which of their columns predict a token of
the response, and what else the model is to know of them, is all that the engine has to be told.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor

from megarl.data.batch import Batch, Jagged

if TYPE_CHECKING:
    from megarl.models.vla.vision import Seen


@dataclass(frozen=True)
class Laid:
    """Some rows, end to end: T columns, N response tokens.

    Attributes:
        lengths: columns of each row.
        tokens: int64 [T], input.
        predicts: int64 [T], which of the N response tokens each column predicts; -1 for none.
        targets: int64 [N].
        open_from: see `megarl.models.packing.PackedSequences`.
        seen: what a robot policy sees in them, with places among the T columns.
    """

    lengths: list[int]
    tokens: Tensor
    predicts: Tensor
    targets: Tensor
    open_from: Sequence[int] = ()
    seen: Seen | None = None


class Form(Protocol):
    """See above.

    Attributes:
        columns: first and one past the last token that log-probs are over; None: all of the vocabulary.
    """

    @property
    def columns(self) -> tuple[int, int] | None:
        """See above."""

    def rows(self, samples: Batch) -> Batch:
        """One row per sequence, with the response tokens of `samples` in their order."""

    def sample_columns(self, samples: Batch) -> list[list[int]]:
        """Columns of every sequence of each sample, prompt and all of the response: what is counted as work."""

    def lengths(self, batch: Batch) -> Tensor:
        """Columns of each row, int64 [B].

        Raises:
            ValueError: a row that cannot go through the model.
        """

    def lay(self, rows: Batch) -> Laid:
        """Lay these rows end to end; at least one."""

    def filler(self) -> Laid:
        """One row that counts for nothing and goes through every parameter: it keeps a rank in step with others."""


class TextForm:
    """A prompt of P and a response of R tokens is fed as P + R - 1 tokens: the last response token predicts nothing.

    Response token j is predicted at place P - 1 + j.
    """

    columns = None

    def rows(self, samples: Batch) -> Batch:
        """See `Form`; a sample is a sequence."""
        return samples

    def sample_columns(self, samples: Batch) -> list[list[int]]:
        """See `Form`."""
        lengths = samples["prompt_ids"].lengths + samples["response_ids"].lengths
        return [[length] for length in lengths.tolist()]

    def lengths(self, batch: Batch) -> Tensor:
        """See `Form`; a response needs a token to predict, and a prompt to predict it from."""
        prompts, responses = batch["prompt_ids"].lengths.cpu(), batch["response_ids"].lengths.cpu()
        if len(batch) and min(int(prompts.min()), int(responses.min())) < 1:
            bad = int(((prompts < 1) | (responses < 1)).nonzero()[0])
            raise ValueError(f"sample {bad} has {int(prompts[bad])} prompt and {int(responses[bad])} response tokens")
        return prompts + responses - 1

    def lay(self, rows: Batch) -> Laid:
        """See `Form`."""
        return self._lay(rows["prompt_ids"].to("cpu"), rows["response_ids"].to("cpu"))

    def filler(self) -> Laid:
        """One token, with one row."""
        one = Jagged.from_list([[0]], dtype=torch.int64)
        return self._lay(one, one)

    @staticmethod
    def _lay(prompts: Jagged, responses: Jagged) -> Laid:
        tokens, predicts, done = [], [], 0
        for prompt, response in zip(prompts.unbind(), responses.unbind(), strict=True):
            tokens += [prompt, response[:-1]]
            predicts += [
                torch.full((len(prompt) - 1,), -1, dtype=torch.int64),
                torch.arange(done, done + len(response)),
            ]
            done += len(response)
        lengths = (prompts.lengths + responses.lengths - 1).tolist()
        return Laid(lengths, torch.cat(tokens), torch.cat(predicts), responses.values)


TEXT = TextForm()
