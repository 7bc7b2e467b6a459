"""What a team handed over of some samples, as one batch in a file: fields under their nodes, `rollout/response_ids`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from megarl.dag.placement import Handover
    from megarl.data.batch import Batch


def joined(given: Mapping[str, Batch]) -> Batch:
    """One row per sample, with its names and all that was handed over of it.

    Args:
        given: by the keys of handovers, at least one; the same samples in the same order.
    """
    from megarl.data.batch import Batch
    from megarl.disaggregated.buffer.channel import NAMES

    board: Batch | None = None
    for key, samples in given.items():
        node, _, _ = key.partition(">")  # see `Handover.key`
        if board is None:
            board = Batch(columns={name: samples[name] for name in NAMES}, size=len(samples))
        for name in samples.names():
            if name not in NAMES:
                board.set(_place(node, name), samples[name])
    assert board is not None, "what is drawn is used by other teams"
    return board


def parted(board: Batch, handovers: Sequence[Handover]) -> dict[str, Batch]:
    """Of `joined` samples what goes with each of the handovers, by their keys."""
    from megarl.disaggregated.buffer.channel import NAMES

    bare = board.drop([name for name in board.names() if name not in NAMES])
    found = {}
    for one in handovers:
        found[one.key] = samples = bare.copy()
        for name in one.fields:
            if (place := _place(one.node, name)) in board:  # an optional one may not have been written
                samples.set(name, board[place])
    return found


def _place(node: str, name: str) -> str:
    return f"{node}/{name}"
