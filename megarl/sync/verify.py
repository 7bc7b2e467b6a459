"""Comparison of a receiver's weights with the trainer's, by checksums of all parameters.

The receiver returns a checksum of each of its own parameters, which fuse and split the tensors that were sent. The
trainer computes the same from tensors gathered one at a time by `iter_on_all_ranks`, independently of plan and buckets.
Each pipeline stage gathers its own tensors, at the same time as the others. Every rank of the stage has them on its
device, and computes the checksums of its share of the parameters.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Sequence

import torch
from torch import Tensor

from megarl.sync.checksum import Checksum
from megarl.sync.protocol import failure
from megarl.sync.receiver import Checksums, Receiver, ReceiverLayout
from megarl.system.comm import WorkerGroup

PHASE = "verification"


def expected_checksums(
    tensors: Iterable[tuple[str, Tensor]],
    layouts: Sequence[ReceiverLayout],
    dtype: torch.dtype,
    world: WorkerGroup,
    float32: Container[str] = (),
    stage: WorkerGroup | None = None,
) -> dict[ReceiverLayout, Checksums]:
    """Return the checksums that receivers must report if they have these `tensors`, by their layout. Collective over
    `world`.

    Args:
        tensors: whole Hugging Face tensors in export order, equal on every rank of `stage`; consumed once.
        layouts: layouts of the receivers, without duplicates.
        dtype: dtype in which tensors are sent, except those that `float32` names.
        world: all ranks of the trainer; each computes checksums on the device of its tensors.
        stage: the ranks that have the same `tensors`; None: all.
    """
    stage = stage or world
    # Number of each (layout, rank, parameter), equal on all ranks of the stage; rank `number % size` hashes it.
    turns: dict[tuple[int, int, str], int] = {}
    sums: list[list[dict[str, Checksum]]] = [[{} for _ in range(at.ranks)] for at in layouts]
    for name, tensor in tensors:
        cast = tensor.to(torch.float32 if name in float32 else dtype)
        for number, layout in enumerate(layouts):
            for rank, checksums in enumerate(sums[number]):
                for param, part, total in layout.parts(rank, name, cast):
                    if turns.setdefault((number, rank, param), len(turns)) % stage.size == stage.rank:
                        if param not in checksums:
                            checksums[param] = layout.make_checksum(total * part.itemsize)
                        checksums[param].update(part)
    digests = [[{param: checksum.hexdigest() for param, checksum in part.items()} for part in at] for at in sums]
    everyone = world.all_gather_json(digests)
    return {
        layout: [dict(pair for theirs in everyone for pair in theirs[number][r].items()) for r in range(layout.ranks)]
        for number, layout in enumerate(layouts)
    }


def compare(receiver: Receiver, expected: Checksums, reported: Checksums) -> int:
    """Check a receiver's checksums and return the number of parameters compared.

    Raises:
        ServerError: a parameter differs or is missing; the message names the first ones.
    """
    if len(expected) != len(reported):
        raise failure(receiver, PHASE, f"it reported checksums of {len(reported)} ranks, expected {len(expected)}")
    wrong = [
        f"{param} (rank {rank}: {theirs.get(param, 'missing')}, expected {value})"
        for rank, (ours, theirs) in enumerate(zip(expected, reported, strict=True))
        for param, value in ours.items()
        if theirs.get(param) != value
    ]
    count = sum(len(part) for part in expected)
    if wrong:
        reason = f"{len(wrong)} of {count} parameters differ from the trainer's: {', '.join(wrong[:3])}"
        raise failure(receiver, PHASE, reason)
    return count
