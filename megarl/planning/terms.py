"""The terms of an estimate of memory: a refusal names what takes the most, and the key that changes it.

A term is rough when its size depends on how the libraries work or on what samples turn out to be (their lengths, the
experts that they meet): measured runs lay within a factor of 1.5 of it, and only what is left after that division is
held against a machine.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

ROUGH = 1.5


@dataclass(frozen=True)
class Term:
    """One use of memory.

    Attributes:
        keys: the settings that change it.
        least: bytes that it takes for certain.
        shrinks: it adapts to the room there is, down to `least`.
    """

    what: str
    bytes: float
    keys: str
    least: float
    shrinks: bool = False


def term(what: str, size: float, keys: str, *, rough: bool = False) -> Term:
    """Return a term of `size` bytes."""
    return Term(what, size, keys, size / ROUGH if rough else size)


@dataclass(frozen=True)
class Moment:
    """The memory that is held at the same time."""

    name: str
    terms: tuple[Term, ...]

    @property
    def bytes(self) -> float:
        """The estimate."""
        return sum(term.bytes for term in self.terms)

    @property
    def least(self) -> float:
        """The bytes that the moment certainly takes."""
        return sum(term.least for term in self.terms)

    def largest(self, count: int = 3) -> list[Term]:
        """Return the terms that weigh most in `least`."""
        return sorted(self.terms, key=lambda term: -term.least)[:count]


def taken(part: Term, *, gpu: bool) -> float:
    """Return the bytes of a term as they are shown: on a GPU the least of what adapts to the room there is; a run on a
    CPU takes all that it asks for, where the machine has it."""
    return part.least if gpu and part.shrinks else part.bytes


def held(terms: Iterable[Term]) -> float:
    """Return the bytes of terms, where what adapts to the room there is has its least."""
    return sum(part.least if part.shrinks else part.bytes for part in terms)
