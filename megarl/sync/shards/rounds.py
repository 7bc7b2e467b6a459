"""Divides the bytes that trainer ranks send to a cell (servers that share a process group) into rounds, in which each
rank has bounded bytes and few peers."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

import numpy as np

from megarl.sync.shards.table import Array


@dataclass(frozen=True)
class RoundLimits:
    """Limits of rounds.

    Attributes:
        nbytes: maximum bytes that a rank sends or receives in a round, which is the size of a buffer.
        message: bytes below which a message is not cut; at most `nbytes` is used.
        peers: maximum number of ranks that a rank sends to, or receives from, in a round.
        cells: maximum number of cells (servers that share a process group).
    """

    nbytes: int = 256 << 20
    message: int = 4 << 20
    peers: int = 4
    cells: int = 8


def rounds_of(sender: Array, receiver: Array, nbytes: Array, limits: RoundLimits) -> tuple[Array, Array]:
    """Divide the bytes between each pair of ranks among rounds.

    Each round first serves the ranks with the most bytes left, so that all ranks end at about the same time.

    Args:
        sender, receiver: int64 [n], the pairs of ranks.
        nbytes: int64 [n], bytes of each pair.

    Returns:
        Round and bytes of each message: int64 [m] each, ordered by pair, then by round.
    """
    # with a least size above the size of a round, no message would fit
    limits = replace(limits, message=min(limits.message, limits.nbytes))
    left = nbytes.astype(np.int64).copy()
    _, sender = np.unique(sender, return_inverse=True)
    _, receiver = np.unique(receiver, return_inverse=True)
    chosen: list[tuple[int, int, int]] = []  # pair, round, bytes
    number = 0
    while left.any():
        out, into = np.bincount(sender, left), np.bincount(receiver, left)
        weight = np.maximum(out[sender], into[receiver])
        order = np.lexsort((receiver, sender, -left, -weight))
        order = order[left[order] > 0]
        rows = [values[order].tolist() for values in (sender, receiver, left)]
        ends = zip(order.tolist(), *rows, strict=True)
        for pair, size in _one_round(ends, int(np.count_nonzero(out)), int(np.count_nonzero(into)), limits):
            chosen.append((pair, number, size))
            left[pair] -= size
        number += 1
    _, rounds, sizes = np.array(sorted(chosen), np.int64).reshape(-1, 3).T
    return rounds, sizes


def _one_round(
    pairs: Iterable[tuple[int, int, int, int]], senders: int, receivers: int, limits: RoundLimits
) -> list[tuple[int, int]]:
    """Return (pair, bytes) of each message of one round.

    Args:
        pairs: (pair, sender, receiver, bytes left) of each pair, in the order in which the round serves them.
        senders, receivers: how many ranks have bytes left to send, and to receive.
    """
    room_out: dict[int, int] = {}
    room_in: dict[int, int] = {}
    peers_out: dict[int, int] = {}
    peers_in: dict[int, int] = {}
    messages = []
    for pair, source, target, rest in pairs:
        free_out, free_in = room_out.get(source, limits.nbytes), room_in.get(target, limits.nbytes)
        if not free_out or not free_in:
            continue
        size = min(rest, free_out, free_in)
        if size < min(rest, limits.message):
            continue
        # Leave a message of `limits.message` bytes for a later round, but send at least as many bytes now.
        if 0 < rest - size < limits.message:
            size = max(rest - limits.message, min(size, limits.message))
        messages.append((pair, size))
        peers_out[source] = peers_out.get(source, limits.peers) - 1
        peers_in[target] = peers_in.get(target, limits.peers) - 1
        room_out[source] = _room(free_out - size, peers_out[source], limits)
        room_in[target] = _room(free_in - size, peers_in[target], limits)
        senders -= not room_out[source]
        receivers -= not room_in[target]
        if not senders or not receivers:
            break
    return messages


def _room(left: int, peers: int, limits: RoundLimits) -> int:
    """Return the bytes that a rank can still send or receive in a round: 0 if `left` is too small for a message, or if
    the rank may have no more peers."""
    return left if peers and left >= limits.message else 0
