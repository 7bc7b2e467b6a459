"""The tree of the prefixes that sequences share, laid out so that every prefix is computed once.

Nodes are runs of tokens: an inner node is shared by all sequences of its subtree, a leaf belongs to one. Nodes lie one
after the other in depth-first order, so the columns of a subtree are contiguous:

    prompt, answer 1, answer 2     ->     node 0 = [0, P), its subtree = [0, t)
                                          node 1 = [P, P + R1), node 2 = [P + R1, t)
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

SHORTEST = 16
"""Tokens of the shortest shared prefix: a shorter one costs more in small products than it saves."""


class PrefixNode(NamedTuple):
    """Tokens [depth, depth + length) of the sequence `row`; `parent` is the node before them, -1 for none."""

    row: int
    depth: int
    length: int
    parent: int


class SharedSpan(NamedTuple):
    """The columns of an inner node of a prefix tree, [start, end), and of its descendants, [end, last)."""

    start: int
    end: int
    last: int


@dataclass(frozen=True)
class PrefixTree:
    """Nodes in depth-first order, none empty, and the last node of each sequence."""

    nodes: tuple[PrefixNode, ...]
    leaves: tuple[int, ...]

    @property
    def lengths(self) -> list[int]:
        """Number of tokens of each node."""
        return [node.length for node in self.nodes]

    def starts(self) -> list[int]:
        """Return the first column of each node, and at the end the number of all columns."""
        return [0, *itertools.accumulate(self.lengths)]

    def spans(self) -> tuple[SharedSpan, ...]:
        """Return the columns of every inner node and of its descendants, in depth-first order."""
        starts = self.starts()
        last = starts[1:]
        for number in reversed(range(len(self.nodes))):
            parent = self.nodes[number].parent
            if parent >= 0:
                last[parent] = max(last[parent], last[number])
        spans = (SharedSpan(starts[number], starts[number + 1], last[number]) for number in range(len(self.nodes)))
        return tuple(span for span in spans if span.last > span.end)

    def positions(self) -> np.ndarray:
        """Return the position of each column in its sequences, int64 [T]."""
        return np.concatenate([np.arange(node.depth, node.depth + node.length) for node in self.nodes])

    def multiplicity(self) -> np.ndarray:
        """Return the number of sequences that have each column, int64 [T]."""
        counts = np.zeros(len(self.nodes), dtype=np.int64)
        for leaf in self.leaves:
            for number in self._path(leaf):
                counts[number] += 1
        return counts.repeat(self.lengths)

    def columns(self) -> list[np.ndarray]:
        """Return, for each sequence, the columns of the packed stream that hold its tokens in order, int64."""
        starts = self.starts()
        return [
            np.concatenate([np.arange(starts[number], starts[number + 1]) for number in [*self._path(leaf)][::-1]])
            for leaf in self.leaves
        ]

    def _path(self, node: int) -> Iterator[int]:
        """Yield a node and its ancestors, the root last."""
        while node >= 0:
            yield node
            node = self.nodes[node].parent


def prefix_tree(rows: Sequence[np.ndarray], shortest: int = SHORTEST) -> PrefixTree:
    """Return the tree of the common prefixes of at least `shortest` tokens.

    Args:
        rows: integers from 0 on, one array of at least one number per sequence; equal numbers are equal inputs.

    >>> for node in prefix_tree([np.array([1, 2, 3]), np.array([1, 2, 4, 5])], 2).nodes:
    ...     print(node)
    PrefixNode(row=1, depth=0, length=2, parent=-1)
    PrefixNode(row=1, depth=2, length=2, parent=0)
    PrefixNode(row=0, depth=2, length=1, parent=0)
    """
    # big-endian numbers sort like their bytes
    order = sorted(range(len(rows)), key=lambda row: np.asarray(rows[row], dtype=">i8").tobytes())
    common = [0, *common_tokens([rows[row] for row in order])]
    longest = lambda part: max(len(rows[row]) for row in order[part.start : part.stop])  # noqa: E731
    nodes, leaves = list[PrefixNode](), [-1] * len(rows)
    # stack of subtrees to visit: (range in `order`, tokens before the subtree, node above it or -1)
    waiting = [(range(len(rows)), 0, -1)]
    while waiting:
        part, depth, parent = waiting.pop()
        row = max((order[place] for place in part), key=lambda row: (len(rows[row]), -row))
        inner = len(part) > 1
        end = min(common[part.start + 1 : part.stop]) if inner else len(rows[row])
        if end > depth and (not inner or end - depth >= shortest):
            nodes.append(PrefixNode(row, depth, end - depth, parent))
            depth, parent = end, len(nodes) - 1
        if not inner:
            leaves[row] = parent
            continue
        cuts = [place for place in part[1:] if common[place] == end]
        children = [range(a, b) for a, b in itertools.pairwise([part.start, *cuts, part.stop])]
        # Sort children by length, because attention computes neighbours of equal length in one batch.
        waiting += [(child, depth, parent) for child in sorted(children, key=longest)]
    return PrefixTree(tuple(nodes), tuple(leaves))


def common_tokens(rows: Sequence[np.ndarray]) -> Iterator[int]:
    """Yield, for each sequence after the first, the number of tokens that it shares with the beginning of the one
    before it.
    """
    for before, row in itertools.pairwise(rows):
        least = min(len(before), len(row))
        different = np.flatnonzero(before[:least] != row[:least])
        yield int(different[0]) if len(different) else least
