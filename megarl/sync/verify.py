"""The comparison of a receiver's weights with the trainer's, by checksums of all parameters.

The receiver gives a checksum for each of its own parameters, in which it has fused and split the tensors it was sent.
The trainer computes the same from tensors gathered one at a time by `iter_hf_tensors`, which shares nothing with the
plan or the buckets.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from megarl.errors import ServerError
from megarl.sync.receiver import Checksum, Checksums, Receiver, ReceiverLayout

PHASE = "verification"


def expected_checksums(
    tensors: Iterable[tuple[str, Tensor | None]], layouts: Sequence[ReceiverLayout], dtype: torch.dtype
) -> dict[ReceiverLayout, Checksums]:
    """Return the checksums that receivers must report that hold `tensors`, by layout. Runs through `tensors` once.

    Args:
        tensors: Hugging Face tensors in export order; None on ranks that only take part in the gathering.
        dtype: dtype of the wire.
    """
    found: dict[ReceiverLayout, list[dict[str, Checksum]]] = {at: [{} for _ in range(at.ranks)] for at in layouts}
    for name, tensor in tensors:
        if tensor is None:
            continue
        cast = tensor.to(dtype)
        for layout, ranks in found.items():
            for rank, sums in enumerate(ranks):
                for param, part, total in layout.parts(rank, name, cast):
                    if param not in sums:
                        sums[param] = layout.make_checksum(total * part.itemsize)
                    sums[param].update(part)
    return {at: [{p: s.hexdigest() for p, s in sums.items()} for sums in ranks] for at, ranks in found.items()}


def compare(receiver: Receiver, expected: Checksums, reported: Checksums) -> int:
    """Return the number of parameters that were compared.

    Raises:
        ServerError: a parameter differs or is missing; the message names the first ones.
    """
    if len(expected) != len(reported):
        raise _error(receiver, f"it has {len(reported)} ranks, {len(expected)} were expected")
    wrong = [
        f"{param} (rank {rank}: {theirs.get(param, 'missing')}, expected {value})"
        for rank, (ours, theirs) in enumerate(zip(expected, reported, strict=True))
        for param, value in ours.items()
        if theirs.get(param) != value
    ]
    if wrong:
        count = sum(len(part) for part in expected)
        raise _error(receiver, f"{len(wrong)} of {count} parameters differ from the trainer's: {', '.join(wrong[:3])}")
    return sum(len(part) for part in expected)


def _error(receiver: Receiver, reason: str) -> ServerError:
    return ServerError(receiver.name, receiver.url, PHASE, reason)
