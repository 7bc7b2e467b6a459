"""The terms of a memory estimate: an error names the largest terms, and the recipe keys that change them.

A term is rough if its size depends on how libraries work or on the samples (their lengths, the experts that they use).
Measured runs were within a factor of 1.5 of rough terms, so only the size divided by this factor counts as certain.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

ROUGH = 1.5


@dataclass(frozen=True)
class Term:
    """One item of a memory estimate."""

    what: str
    bytes: float
    keys: str  # the recipe keys that change the term
    least: float  # bytes that the term certainly takes
    shrinks: bool = False  # whether the term adapts to the free memory, down to `least`


def term(what: str, size: float, keys: str, *, rough: bool = False) -> Term:
    """Return a term of the memory estimate with `size` bytes; of a `rough` one only size / ROUGH counts as certain."""
    return Term(what, size, keys, size / ROUGH if rough else size)


@dataclass(frozen=True)
class Moment:
    """A moment of a step, such as an update or generation, and the memory in use then."""

    name: str
    terms: tuple[Term, ...]

    @property
    def bytes(self) -> float:
        """The estimated bytes of memory at this moment."""
        return sum(term.bytes for term in self.terms)

    @property
    def least(self) -> float:
        """The sum of the terms' minimum bytes (`Term.least`), which are in use at this moment in any case."""
        return sum(term.least for term in self.terms)

    def largest(self, count: int = 3) -> list[Term]:
        """Return the `count` terms that certainly take the most bytes (`least`), the largest first."""
        return sorted(self.terms, key=lambda term: -term.least)[:count]


def taken(part: Term, *, gpu: bool) -> float:
    """Return the bytes of a term for display: on a GPU the minimum of a term that adapts to the free memory, on a CPU
    its whole size."""
    return part.least if gpu and part.shrinks else part.bytes


def held(terms: Iterable[Term]) -> float:
    """Return the bytes of terms; of a term that adapts to the free memory (`Term.shrinks`) only its minimum."""
    return sum(part.least if part.shrinks else part.bytes for part in terms)
