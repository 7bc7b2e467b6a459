"""Endless, seeded, resumable loader whose global batches do not depend on how many ranks share them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Protocol, runtime_checkable

import numpy as np

from megarl.data.batch import Batch
from megarl.system.errors import DataError


class Indexed(Protocol):
    """A data set that a loader takes rows from, by index."""

    fingerprint: str

    def __len__(self) -> int: ...

    def batch(self, indices: Sequence[int], epoch: int = 0) -> Batch:
        """Return the samples at `indices`, met in `epoch`."""
        ...


class Described(Indexed, Protocol):
    """A data set that a run announces before it trains."""

    def describe(self) -> str:
        """Return the rows, in one line for the console."""
        ...


@runtime_checkable
class Mismatched(Protocol):
    """A data set whose samples also come with the response of another one: of the last one before them (KTO)."""

    def set_mismatched(self, batch: Batch, own: Sequence[int], others: Sequence[int]) -> None:
        """Give each sample of `batch`, at `own`, the response of the one at its place of `others`, too."""
        ...


class PromptLoader:
    """The iterator over this rank's share of each global batch.

    The epochs are laid end to end, each in its own order drawn from (seed, epoch), and cut into global batches of
    `batch_size`. So every sample is met exactly once per epoch, every batch is full, and nothing is dropped: where an
    epoch does not divide into batches, one batch holds its last samples and the next epoch's first. Rank r of d takes
    samples r, r + d, r + 2 d, ... of each global batch, so that the first k samples of every rank are together the
    first k * d of the batch: a mini-batch holds the same samples whatever the number of ranks.

    The state names the next sample and no rank, so a run resumes on another number of ranks with the same batches.
    """

    def __init__(
        self, dataset: Indexed, batch_size: int, dp_rank: int = 0, dp_size: int = 1, seed: int = 0, shuffle: bool = True
    ) -> None:
        """Start at the first epoch. `batch_size` counts samples over all ranks.

        Raises:
            ValueError: an empty dataset, or sizes that make no sense.
        """
        if len(dataset) == 0 or batch_size < 1 or not 0 <= dp_rank < dp_size:
            raise ValueError(f"loader of {len(dataset)} samples, batch {batch_size}, rank {dp_rank} of {dp_size}")
        self.dataset, self.batch_size = dataset, batch_size
        self.dp_rank, self.dp_size = dp_rank, dp_size
        self.seed, self.shuffle = seed, shuffle
        self._epoch, self._position = 0, 0
        self._orders: dict[int, np.ndarray] = {}

    @property
    def epoch(self) -> float:
        """Epochs drawn so far, with the fraction of the current one."""
        return self._epoch + self._position / len(self.dataset)

    def __iter__(self) -> Iterator[Batch]:
        return self

    def __next__(self) -> Batch:
        parts, place, order = [], 0, list[int]()
        for epoch, some in self._pieces():
            order += some.tolist()
            first = (self.dp_rank - place) % self.dp_size
            parts.append(self.dataset.batch(some[first :: self.dp_size].tolist(), epoch))
            place += len(some)
        more, self._position = divmod(self._position + self.batch_size, len(self.dataset))
        self._epoch += more
        batch = Batch.concat(parts)
        if isinstance(self.dataset, Mismatched):
            places = slice(self.dp_rank, None, self.dp_size)
            self.dataset.set_mismatched(batch, order[places], others_before(order)[places])
        return batch

    @property
    def number(self) -> int:
        """The number of the next sample, counted over all epochs end to end."""
        return self._epoch * len(self.dataset) + self._position

    def go_to(self, number: int) -> None:
        """Let sample `number` be the next one."""
        self._epoch, self._position = divmod(number, len(self.dataset))

    def at(self, numbers: Sequence[int]) -> Batch:
        """Return the samples by their numbers; the next one stays what it is.

        Args:
            numbers: at least one.
        """
        parts = []
        for number in numbers:
            epoch, place = divmod(number, len(self.dataset))
            parts.append(self.dataset.batch([int(self._indices(epoch)[place])], epoch))
        return Batch.concat(parts)

    def state_dict(self) -> dict[str, Any]:
        """Return the JSON: the next sample (epoch, position in it), the order (seed, shuffle) and the data it belongs
        to."""
        return {
            "epoch": self._epoch,
            "position": self._position,
            "seed": self.seed,
            "shuffle": self.shuffle,
            "samples": len(self.dataset),
            "fingerprint": self.dataset.fingerprint,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue where `state` was taken; its seed and shuffle replace this loader's.

        Raises:
            DataError: as `check_state`.
        """
        self.check_state(state)
        self._epoch, self._position = int(state["epoch"]), int(state["position"])
        self.seed, self.shuffle = int(state["seed"]), bool(state["shuffle"])
        self._orders = {}

    def check_state(self, state: dict[str, Any]) -> None:
        """Refuse a state that this loader cannot continue.

        Raises:
            DataError: the state belongs to other data, where its position would mean other samples.
        """
        refuse_other_data(self.state_dict(), state)

    def _pieces(self) -> Iterator[tuple[int, np.ndarray]]:
        """Yield (epoch, dataset indices) of the next global batch, one piece per epoch it touches."""
        epoch, first, left = self._epoch, self._position, self.batch_size
        while left > 0:
            some = self._indices(epoch)[first : first + left]
            yield epoch, some
            left -= len(some)
            epoch, first = epoch + 1, 0

    def _indices(self, epoch: int) -> np.ndarray:
        """Order of the samples in `epoch`; two are kept, since prompts may be asked for around the end of one."""
        if not self.shuffle:
            return np.arange(len(self.dataset))
        if epoch not in self._orders:
            # SeedSequence takes no negative numbers.
            generator = np.random.Generator(np.random.PCG64([self.seed % 2**64, epoch]))
            last = list(self._orders.items())[-1:]
            self._orders = dict(last) | {epoch: generator.permutation(len(self.dataset))}
        return self._orders[epoch]


def refuse_other_data(mine: dict[str, Any], other: dict[str, Any]) -> None:
    """Refuse the state `other`, of a checkpoint, of a loader whose own state is `mine`.

    Raises:
        DataError: they belong to different data.
    """
    if any(mine[name] != other[name] for name in ("samples", "fingerprint")):
        raise DataError(
            "the data is not what the checkpoint was trained on, so the loader cannot continue in it",
            where="data.train_files",
            found=f"{mine['samples']} samples ({str(mine['fingerprint'])[:8]})",
            allowed=f"{other['samples']} samples ({str(other['fingerprint'])[:8]})",
            fix="restore the files and the prompt settings, or start again with trainer.resume: never",
        )


def others_before(order: Sequence[int]) -> list[int]:
    """Return for each place the last number before it that is another one, from the end on; itself where all are equal.

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
    """Yield one pass in order, for validation: this rank's share of each round of `batch_size` samples (null: all at
    once).

    All ranks see the same number of rounds; in the last, shorter one a rank's share may be empty.
    """
    size = batch_size or len(dataset)
    for start in range(0, len(dataset), size):
        count = min(size, len(dataset) - start)
        low, high = (start + rank * count // dp_size for rank in (dp_rank, dp_rank + 1))
        batch = dataset.batch(list(range(low, high)))
        if isinstance(dataset, Mismatched):
            # Of all of them, so that no number depends on the size of a round.
            dataset.set_mismatched(batch, range(low, high), [(i - 1) % len(dataset) for i in range(low, high)])
        yield batch
