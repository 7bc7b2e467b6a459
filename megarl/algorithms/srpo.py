"""SRPO's rewards of a run: the scores of its global batches in order, with the state between them."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from megarl.algorithms.progress import ProgressReport, ProgressSettings, progress_scores, shuffled_embeddings
from megarl.algorithms.success_bank import SuccessBank

if TYPE_CHECKING:
    from torch import Tensor

#: Successes of a task in one step with which later rounds of its generation are compared.
_OF_A_STEP = 4096


class ProgressScorer:
    """The scorer of global batches in the order of the steps; equal on all ranks that get equal batches.

    Args:
        settings: the form of the scores, the size of the bank, and whether this is the control.
        seed: of the run; the control's permutations follow from it, the step and its round of generation.
    """

    def __init__(self, settings: ProgressSettings, seed: int) -> None:
        self._settings, self._seed = settings, seed
        self._bank = SuccessBank(settings.bank) if settings.bank else None
        self._step, self._round, self._earlier = -1, 0, SuccessBank(_OF_A_STEP)

    def score(self, embeddings: Tensor, success: Tensor, task: Sequence[Hashable], *, step: int) -> ProgressReport:
        """Return `progress_scores` of a batch. Its successes then become references: for later generation of the same
        step, and with a bank for later steps.

        Args:
            embeddings: float [B, E] of the global batch.
            success: bool [B].
            task: B names or numbers.
            step: training step, from 0; a step may be scored in several rounds, one after the other.
        """
        if step != self._step:
            self._step, self._round, self._earlier = step, 0, SuccessBank(_OF_A_STEP)
        if self._settings.shuffled:
            embeddings = shuffled_embeddings(embeddings, task, self._seed, step, self._round)
        bank = self._earlier if self._bank is None else self._bank
        report = progress_scores(embeddings, success, task, self._settings, bank=bank)
        bank.add(embeddings, success, task)
        self._round += 1
        return report

    def state(self) -> dict[str, Any]:
        """Return the state for a checkpoint: that of the bank, or nothing."""
        return {} if self._bank is None else self._bank.state()

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Restore `state`; one from a run without a bank leaves the bank empty, and a run without a bank needs none."""
        if self._bank is not None and state:
            self._bank.load_state(state)
