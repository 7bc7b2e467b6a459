"""What a stage callable declares: the batch fields it reads and the ones it writes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

F = TypeVar("F", bound=Callable[..., Any])

#: What the prompt loader puts on every batch that enters a graph.
LOADER_FIELDS = ("prompt_ids", "uid", "prompt_text", "answer", "data_source", "row")


@dataclass(frozen=True)
class Contract:
    """Names of batch fields a stage needs, and names it adds or replaces."""

    reads: tuple[str, ...] = ()
    writes: tuple[str, ...] = ()


def stage(*, reads: Sequence[str], writes: Sequence[str]) -> Callable[[F], F]:
    """Declare what a stage callable reads and writes; the callable itself stays as it is.

    >>> @stage(reads=["score"], writes=["advantages"])
    ... def advantage(worker, batch): ...
    >>> contract_of(advantage)
    Contract(reads=('score',), writes=('advantages',))
    """
    contract = Contract(tuple(reads), tuple(writes))

    def declare(func: F) -> F:
        func.__stage__ = contract  # type: ignore[attr-defined]
        return func

    return declare


def contract_of(func: Callable[..., Any]) -> Contract:
    """The declared contract of a callable; an empty one when nothing was declared."""
    return getattr(func, "__stage__", Contract())
