"""Embeddings of successes by task over several steps, a reference for a batch in which a task always fails."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from megarl.algorithms.lazy import torch
from megarl.algorithms.progress import valid_embeddings
from megarl.errors import UserError

if TYPE_CHECKING:
    from torch import Tensor


class SuccessBank:
    """The latest successes of each task, oldest first.

    Its content depends only on the added batches, in order: ranks that add the same global batches hold the same.

    Args:
        size: number of successes kept for each task, at least 1.

    >>> bank = SuccessBank(2)
    >>> bank.add(torch.tensor([[1.0], [2.0], [3.0], [4.0]]), torch.tensor([True, False, True, True]), ["a"] * 4)
    >>> bank.references("a", 1)
    tensor([[3.],
            [4.]])
    """

    def __init__(self, size: int) -> None:
        if size < 1:
            raise ValueError(f"a bank keeps at least one success of each task, got {size}")
        self._size = size
        self._held: dict[Hashable, Tensor] = {}

    def __len__(self) -> int:
        """Return the number of successes of all tasks."""
        return sum(map(len, self._held.values()))

    def references(self, task: Hashable, dims: int) -> Tensor | None:
        """Return the embeddings of a task's successes, float32 [n, dims], oldest first; None: it has none.

        Raises:
            UserError: its embeddings have another size.
        """
        self._check(dims)
        return self._held.get(task)

    def add(self, embeddings: Tensor, success: Tensor, task: Sequence[Hashable]) -> None:
        """Add the successes of a global batch with valid embeddings; the oldest beyond the size are dropped.

        Args:
            embeddings: float [B, E].
            success: bool [B].
            task: B names or numbers.

        Raises:
            UserError: the embeddings have another size than the stored ones.
        """
        taken = (success.cpu() & valid_embeddings(embeddings)).tolist()
        rows = embeddings.detach().float().cpu()
        self._check(rows.shape[1])
        places: dict[Hashable, list[int]] = {}
        for place, name in enumerate(task):
            if taken[place]:
                places.setdefault(name, []).append(place)
        for name, mine in places.items():
            before = self._held.get(name, rows[:0])
            self._held[name] = torch.cat([before, rows[mine]])[-self._size :].clone()

    def state(self) -> dict[str, Any]:
        """Return a checkpoint's state: `embedding` (float32 [N, E]), `task` (N names or numbers), oldest first."""
        held = list(self._held.values())
        names = [name for name, rows in self._held.items() for _ in range(len(rows))]
        return {"embedding": torch.cat(held) if held else torch.zeros(0, 0), "task": names}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Restore the content of `state`, of each task the latest that fit, and nothing else."""
        self._held = {}
        if state["task"]:
            self.add(state["embedding"], torch.ones(len(state["task"]), dtype=torch.bool), state["task"])

    def _check(self, dims: int) -> None:
        for name, rows in self._held.items():
            if rows.shape[1] != dims:
                raise UserError(
                    "the embeddings of this run have another size than those of its successes so far",
                    where=f"success bank, task {name!r}",
                    found=dims,
                    allowed=str(rows.shape[1]),
                    fix="keep the encoder that the run began with, or begin a new run",
                )
