"""The tree of common prefixes against all pairs of a query and a key, one sequence after the other."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from megarl.data.prefix_tree import prefix_tree

ROWS = st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=12), min_size=1, max_size=9)


@settings(max_examples=38)
@given(rows=ROWS, shortest=st.integers(1, 4))
def test_columns_and_spans_are_those_of_the_sequences(rows, shortest):
    arrays = [np.array(row) for row in rows]
    tree = prefix_tree(arrays, shortest)
    tokens = np.concatenate([arrays[node.row][node.depth : node.depth + node.length] for node in tree.nodes])
    seen, counts = np.zeros((len(tokens), len(tokens)), dtype=bool), np.zeros(len(tokens), dtype=int)
    for row, columns in zip(arrays, tree.columns(), strict=True):
        assert tokens[columns].tolist() == row.tolist()
        assert tree.positions()[columns].tolist() == list(range(len(row)))
        counts[columns] += 1
        for place, column in enumerate(columns):
            seen[column, columns[: place + 1]] = True
    assert tree.multiplicity().tolist() == counts.tolist()
    starts, mask = tree.starts(), np.zeros_like(seen)
    for start, length in zip(starts, tree.lengths, strict=False):
        mask[start : start + length, start : start + length] = np.tri(length, dtype=bool)
    for span in tree.spans():
        assert span.end - span.start >= shortest
        mask[span.end : span.last, span.start : span.end] = True
    assert (mask == seen).all()


def test_sequences_in_any_order_have_one_tree():
    """The longest sequences come first; a whole sequence may be the prefix of another."""
    rows = [np.array(row) for row in ([1, 2], [1, 2, 3], [4], [1, 2, 3, 3, 3])]
    tree = prefix_tree(rows, 2)
    assert [(node.depth, node.length, node.parent) for node in tree.nodes] == [
        (0, 2, -1),
        (2, 3, 0),
        (2, 1, 0),
        (0, 1, -1),
    ]
    assert [tree.nodes[leaf].row for leaf in tree.leaves[1:]] == [1, 2, 3]
    assert tree.leaves[0] == 0
