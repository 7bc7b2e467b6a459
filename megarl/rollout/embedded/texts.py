"""The texts of running samples, to end them at stop strings."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from megarl.rollout.engine import FinishReason
from megarl.rollout.stop_strings import StopStrings, TurnText

#: Tokens, their log-probs, and the finish reason.
Sampled = tuple[list[int], list[float], FinishReason]


class RunningTexts:
    """The texts of running samples, by sample number. All ranks of a replica read the same tokens."""

    def __init__(self, strings: StopStrings) -> None:
        self._strings = strings
        self._texts: dict[int, TurnText] = {}
        self._ends: dict[int, int] = {}  # sample -> number of tokens after which it ends

    def begin(self, sample: int, begun: Sequence[int]) -> None:
        """Begin a sample whose turn already has the tokens `begun`."""
        self._texts[sample] = TurnText(self._strings, begun)
        self._ends.pop(sample, None)

    def ended(self, samples: Tensor, counts: Tensor, tokens: Tensor) -> list[int]:
        """Add the tokens sampled since the last call; return the rows whose text now contains a stop string.

        Args:
            samples, counts: int64 [rows], the sample of each row and its number of tokens.
            tokens: int64 [samples, tokens], the tokens of all samples.
        """
        numbers = samples.tolist()
        new = [count - self._texts[sample].length for sample, count in zip(numbers, counts.tolist(), strict=True)]
        most = max(new, default=0)
        columns = counts[:, None] - torch.arange(most, 0, -1, device=counts.device)
        recent = tokens[samples[:, None], columns.clamp(min=0)].tolist()
        rows = []
        for row, (sample, ids) in enumerate(zip(numbers, recent, strict=True)):
            text = self._texts[sample]
            if any(text.add(token) for token in ids[most - new[row] :]):
                self._ends[sample] = text.length
                rows.append(row)
        return rows

    def cut(self, sample: int, sampled: Sampled) -> Sampled:
        """Return a finished sample without the tokens after its stop string, if it has one, and forget its text."""
        del self._texts[sample]
        tokens, logprobs, reason = sampled
        end = self._ends.pop(sample, len(tokens) + 1)
        return (tokens, logprobs, reason) if end > len(tokens) else (tokens[:end], logprobs[:end], "stop")
