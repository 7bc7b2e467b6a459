"""The key of a turn is that of the observation before it: its tokens and images, and nothing that came earlier."""

from __future__ import annotations

import torch

from megarl.data.batch import Batch, Jagged
from megarl.runtime.stages.turns import turn_keys


def ragged(rows: list[list[int]]) -> Jagged:
    return Jagged.from_list(rows, dtype=torch.int64)


def keys_of(**more: Jagged) -> list[list[int]]:
    """Prompt 5 6 | turns of one or two tokens, with observations 8 9, 7, 8 9 | an empty turn of a failed episode."""
    samples = Batch(
        {
            "prompt_ids": ragged([[5, 6], [5, 6], [5]]),
            "response_ids": ragged([[1, 8, 9, 2, 2, 7, 3, 8, 9, 4], [3, 3, 7, 4], [2]]),
            "turn_starts": ragged([[0, 3, 6, 9], [0, 3], [1]]),
            "turn_ends": ragged([[1, 5, 7, 10], [2, 4], [1]]),
            **more,
        }
    )
    return [row.tolist() for row in turn_keys(None, samples)["turn_keys"].unbind()]


def test_equal_observations_have_equal_keys():
    first, second, failed = keys_of()
    (a, b, c, d), (e, f) = [first[t] for t in (0, 3, 6, 9)], [second[t] for t in (0, 3)]
    assert (a, b, c) == (e, d, f)
    assert len({a, b, c, 0}) == 4
    assert [t for t, key in enumerate(first) if key] == [0, 3, 6, 9]
    assert failed == [0]


def test_images_are_part_of_the_observation():
    """An image in the prompt, and one in the observation 8 9, which differs in its second appearance."""
    rows = [[[0, 1, 1], [3, 1, 1], [9, 1, 1]], [[0, 1, 1]], []]
    grids = Jagged.from_list([torch.tensor(row, dtype=torch.int64).view(-1, 3) for row in rows])
    first, second, _ = keys_of(image_grids=grids, image_digests=ragged([[11, 12, 13], [11], []]))
    assert first[0] == second[0]
    assert first[3] != first[9]
