"""Endless, seeded, resumable loader whose global batches do not depend on how many ranks share them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, ClassVar, Protocol, runtime_checkable

import numpy as np

from megarl.data.batch import Batch
from megarl.data.read_ahead import Indexed, ReadAhead
from megarl.system.errors import DataError


class Described(Indexed, Protocol):
    """A data set that can describe its rows, which the console shows before training."""

    def describe(self) -> str:
        """Describe the data set (such as its number of prompts and tokens) in one line for the console."""
        ...


@runtime_checkable
class Mismatched(Protocol):
    """A data set that can add to each sample the response of another sample, as KTO needs."""

    def set_mismatched(self, batch: Batch, indices: Sequence[int], others: Sequence[int]) -> None:
        """Add to `batch`, which holds the samples at `indices`, the responses of the samples at `others`."""
        ...


class PromptLoader:
    """The iterator over this rank's share of each global batch.

    Epochs follow each other without a gap, each in an order drawn from (seed, epoch), and are cut into global batches
    of `batch_size`. So every sample is used exactly once per epoch, every batch is full, and no sample is dropped; a
    batch may hold the last samples of an epoch and the first of the next. Rank r of d takes samples r, r + d, r + 2 d,
    ... of each global batch, so that the first k samples of all ranks are the first k * d of the batch: a mini-batch
    holds the same samples whatever the number of ranks. The state contains the number of the next sample but nothing
    about ranks, so a run that resumes on a different number of ranks gets the same batches.

    With `workers`, threads read the next batch while the current one is used. The state never counts what was only
    read ahead.
    """

    #: Whether the next batch is known before the current one has been used.
    _knows_next: ClassVar[bool] = True

    def __init__(
        self,
        dataset: Indexed,
        batch_size: int,
        dp_rank: int = 0,
        dp_size: int = 1,
        seed: int = 0,
        shuffle: bool = True,
        *,
        workers: int = 0,
    ) -> None:
        """Start at the first epoch.

        Args:
            batch_size: samples of a batch over all ranks.
            workers: threads that read samples; 0: the caller's thread reads them.
        """
        if len(dataset) == 0 or batch_size < 1 or not 0 <= dp_rank < dp_size:
            raise ValueError(
                "a loader needs samples, a batch of at least 1 and a rank below the number of ranks, got "
                f"{len(dataset)} samples, a batch of {batch_size} and rank {dp_rank} of {dp_size}"
            )
        self.dataset, self.batch_size = dataset, batch_size
        self.dp_rank, self.dp_size = dp_rank, dp_size
        self.seed, self.shuffle = seed, shuffle
        self._epoch, self._position = 0, 0
        self._orders: dict[int, np.ndarray] = {}
        self._reads = ReadAhead(dataset, workers)

    @property
    def epoch(self) -> float:
        """Number of epochs drawn so far, including the fraction of the current epoch."""
        return self._epoch + self._position / len(self.dataset)

    def __iter__(self) -> Iterator[Batch]:
        return self

    def __next__(self) -> Batch:
        number, (pieces, order) = self.number, self._share()
        batch = self._reads.take(number, pieces)
        self.go_to(number + self.batch_size)
        if isinstance(self.dataset, Mismatched):
            places = slice(self.dp_rank, None, self.dp_size)
            self.dataset.set_mismatched(batch, order[places], others_before(order)[places])
        if self._knows_next and self._reads.is_on:
            self._reads.begin(self.number, self._share()[0])
        return batch

    def _share(self) -> tuple[list[tuple[int, list[int]]], list[int]]:
        """Return (epoch, dataset indices) pairs of this rank's share of the next global batch, and the indices of the
        whole batch in order."""
        share, order = [], list[int]()
        for epoch, indices in self._pieces():
            first = (self.dp_rank - len(order)) % self.dp_size
            share.append((epoch, indices[first :: self.dp_size].tolist()))
            order += indices.tolist()
        return share, order

    @property
    def number(self) -> int:
        """Number of the next sample, counted through all epochs."""
        return self._epoch * len(self.dataset) + self._position

    @property
    def used(self) -> int:
        """Number of samples drawn so far whose generation is over; this class counts every sample that was drawn."""
        return self.number

    def go_to(self, number: int) -> None:
        """Continue with sample `number`."""
        self._epoch, self._position = divmod(number, len(self.dataset))

    def at(self, number: int) -> Batch:
        """Return the sample with this number, counted from the first sample of the first epoch. The loader keeps its
        position."""
        return self._reads.take(("sample", number), self._pieces_at(number))

    def prepare(self, numbers: Sequence[int]) -> None:
        """Begin to read the samples with these numbers for later calls of `at`, if the loader has threads."""
        for number in numbers:
            self._reads.begin(("sample", number), self._pieces_at(number))

    def close(self) -> None:
        """End the threads that read; the loader returns no further batch."""
        self._reads.close()

    def state_dict(self) -> dict[str, Any]:
        """Return the loader's state as JSON values: the next sample (epoch and place in it), the order (seed, shuffle)
        and the fingerprint of the data."""
        return {
            "epoch": self._epoch,
            "position": self._position,
            "seed": self.seed,
            "shuffle": self.shuffle,
            "samples": len(self.dataset),
            "fingerprint": self.dataset.fingerprint,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue at `state`, whose seed and shuffle replace this loader's."""
        self.check_state(state)
        self._epoch, self._position = int(state["epoch"]), int(state["position"])
        self.seed, self.shuffle = int(state["seed"]), bool(state["shuffle"])
        self._orders = {}
        self._reads.forget()

    def check_state(self, state: dict[str, Any]) -> None:
        """Raise an error if this loader cannot continue at `state`."""
        refuse_other_data(self.state_dict(), state)

    def _pieces(self) -> Iterator[tuple[int, np.ndarray]]:
        """Yield (epoch, dataset indices) of the next global batch, one pair for each epoch that it has samples of."""
        epoch, first, left = self._epoch, self._position, self.batch_size
        while left > 0:
            indices = self._indices(epoch)[first : first + left]
            yield epoch, indices
            left -= len(indices)
            epoch, first = epoch + 1, 0

    def _pieces_at(self, number: int) -> list[tuple[int, list[int]]]:
        epoch, place = divmod(number, len(self.dataset))
        return [(epoch, [int(self._indices(epoch)[place])])]

    def _indices(self, epoch: int) -> np.ndarray:
        """Return the order of the samples in `epoch`; two orders are cached, for requests around the end of an
        epoch."""
        if not self.shuffle:
            return np.arange(len(self.dataset))
        if epoch not in self._orders:
            # SeedSequence rejects negative numbers.
            generator = np.random.Generator(np.random.PCG64([self.seed % 2**64, epoch]))
            last = list(self._orders.items())[-1:]
            self._orders = dict(last) | {epoch: generator.permutation(len(self.dataset))}
        return self._orders[epoch]


def refuse_other_data(state: dict[str, Any], other: dict[str, Any]) -> None:
    """Raise an error if a loader's `state` and the state `other` in a checkpoint belong to different data."""
    if any(state[name] != other[name] for name in ("samples", "fingerprint")):
        raise DataError(
            "the data is not what the checkpoint was trained on, so the run cannot continue at its place in the data",
            where="data.train_files",
            found=f"{state['samples']} samples ({str(state['fingerprint'])[:8]})",
            allowed=f"{other['samples']} samples ({str(other['fingerprint'])[:8]})",
            fix="restore the files and the prompt settings, or start again with trainer.resume: never",
        )


def others_before(order: Sequence[int]) -> list[int]:
    """Return, for each entry of `order`, the nearest earlier number that differs from it.

    The last entry counts as the one before the first. If all numbers are equal, return them unchanged.

    >>> others_before([3, 3, 5])
    [5, 5, 3]
    """
    others, other = list[int](), next((number for number in reversed(order) if number != order[0]), order[0])
    for place, number in enumerate(order):
        if place and order[place - 1] != number:
            other = order[place - 1]
        others.append(other)
    return others


def rounds(dataset: Indexed, batch_size: int | None, dp_rank: int = 0, dp_size: int = 1) -> Iterator[Batch]:
    """Yield this rank's share of each round of `batch_size` samples (None: all samples), in order, for validation.

    All ranks get the same number of rounds; in the last, shorter round a rank's share may be empty.
    """
    size = batch_size or len(dataset)
    for start in range(0, len(dataset), size):
        count = min(size, len(dataset) - start)
        low, high = (start + rank * count // dp_size for rank in (dp_rank, dp_rank + 1))
        batch = dataset.batch(list(range(low, high)))
        if isinstance(dataset, Mismatched):
            # Take the previous sample of the whole data set, so that metrics do not depend on the size of a round.
            dataset.set_mismatched(batch, range(low, high), [(i - 1) % len(dataset) for i in range(low, high)])
        yield batch
