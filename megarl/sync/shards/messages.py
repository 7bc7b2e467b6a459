"""Assigns parts of boxes to messages, and computes where each part begins in its message, and each message in its
buffers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from megarl.sync.shards.assign import ReceivingRank
from megarl.sync.shards.program import ALIGN, FanTable, MessageTable, RoundTable
from megarl.sync.shards.table import Array


@dataclass(frozen=True, eq=False)
class SentParts:
    """The parts of boxes (rectangular parts of tensors) that are sent: columns of int64 [n]. A message contains its
    parts in this order.

    Attributes:
        cell, phase, number: the part's round, see `RoundTable`.
        sender, receiver: trainer rank, and number of the server rank.
        fan: number of the group of ranks on a machine that exchange the stripes (shares) of a box of which this part is
            one; -1: only the receiver needs the part.
        nbytes: bytes on the wire.
        direct: bool [n], whether the part is sent and received without buffers.
        local: bool [n], whether the sender packs the part into the receiver's buffer, which is on its GPU.
    """

    cell: Array
    phase: Array
    number: Array
    sender: Array
    receiver: Array
    fan: Array
    nbytes: Array
    direct: Array
    local: Array


@dataclass(frozen=True, eq=False)
class Messages:
    """Rounds, messages, and gathers (exchanges of stripes between server ranks on one machine).

    Attributes:
        rounds, table, fans: tables of the rounds, messages and gathers.
        order: int64 [n], indices of the sent parts in the order of their messages.
        message, start: int64 [n], for each part in this order its message, and its first byte in the message.
        receiver: int64 [M], number of the server rank that receives each message.
    """

    rounds: RoundTable
    table: MessageTable
    fans: FanTable
    order: Array
    message: Array
    start: Array
    receiver: Array


def lay_out(sent: SentParts, receivers: Sequence[ReceivingRank], fans: Sequence[Sequence[int]]) -> Messages:
    """Return the messages of all rounds, with their places in the buffers of senders and receivers.

    Args:
        fans: for each group of server ranks on a machine that exchange stripes (shares of a part of a tensor), the
            numbers of these ranks.
    """
    keys = (sent.direct, sent.fan, sent.receiver, sent.sender, sent.cell, sent.number, sent.phase)
    order = np.lexsort(keys)
    direct, fan, receiver, sender, cell, number, phase = (key[order] for key in keys)
    new_round = _changes(phase, number, cell)
    round_of_part = np.cumsum(new_round) - 1
    new = _changes(round_of_part, sender, receiver, fan) | direct
    new[1:] |= direct[:-1]
    message, lead = np.cumsum(new) - 1, np.flatnonzero(new)
    nbytes = sent.nbytes[order]
    start = _starts(_aligned(nbytes), lead, message)
    last = np.append(lead[1:], len(order)) - 1
    size = start[last] + nbytes[last]
    rounds = RoundTable(*(values[new_round] for values in (phase, number, cell)))
    columns = _MessageColumns(
        round_of_part[lead], sender[lead], receiver[lead], size, direct[lead], sent.local[order][lead], fan[lead]
    )
    table, gathers = _in_buffers(columns, receivers, fans)
    return Messages(rounds, table, gathers, order, message, start, receiver[lead])


@dataclass(frozen=True, eq=False)
class _MessageColumns:
    round: Array
    sender: Array
    receiver: Array
    nbytes: Array
    direct: Array
    local: Array
    fan: Array


def _in_buffers(
    columns: _MessageColumns, receivers: Sequence[ReceivingRank], fans: Sequence[Sequence[int]]
) -> tuple[MessageTable, FanTable]:
    """Return the messages with their places in buffers, and the gathers (exchanges of stripes between server ranks)."""
    room = np.where(columns.direct, 0, _aligned(columns.nbytes))
    send_at = _running(np.where(columns.local, 0, room), columns.round, columns.sender)
    stripes = columns.fan >= 0
    receive_at = _running(np.where(stripes, 0, room), columns.round, columns.receiver)
    gathers = FanTable.empty()
    if stripes.any():
        inside = _running(np.where(stripes, room, 0), columns.round, columns.receiver)[stripes]
        key = columns.round[stripes] * len(fans) + columns.fan[stripes]
        groups, group = np.unique(key, return_inverse=True)
        stripe = np.zeros(len(groups), np.int64)
        np.maximum.at(stripe, group, inside + room[stripes])
        gathers, members = _gathers(groups, stripe, receivers, fans)
        # A receive buffer begins with the stripes of all ranks of its group, so all other messages come after these.
        key = gathers.round.astype(np.int64) * len(receivers) + members
        order = np.argsort(key)
        wanted = columns.round * len(receivers) + columns.receiver
        row = order[np.minimum(np.searchsorted(key[order], wanted), len(key) - 1)]
        width = np.array([len(fan) for fan in fans])[gathers.group]
        receive_at += np.where(key[row] == wanted, width[row] * gathers.stripe[row], 0)
        receive_at[stripes] = inside + gathers.at[row][stripes]
    who = np.array([(receiver.server, receiver.rank) for receiver in receivers], np.int64)
    server, rank = who[columns.receiver].T
    send_at = np.where(columns.direct | columns.local, -1, send_at)
    receive_at = np.where(columns.direct, -1, receive_at)
    return MessageTable(columns.round, columns.sender, server, rank, columns.nbytes, send_at, receive_at), gathers


def _gathers(
    groups: Array, stripe: Array, receivers: Sequence[ReceivingRank], fans: Sequence[Sequence[int]]
) -> tuple[FanTable, Array]:
    """Return the gathers (exchanges of stripes, shares of bytes, between server ranks on a machine), one row for each
    rank of each gather, and the number of the server rank of each row.

    Args:
        groups: round * len(fans) + group of each gather.
        stripe: bytes that each rank of a gather contributes.
        fans: the server ranks of each group.
    """
    rows = [
        (
            *(group // len(fans), group % len(fans), receivers[number].server, receivers[number].rank),
            *(place * size, size, number),
        )
        for group, size in zip(groups.tolist(), stripe.tolist(), strict=True)
        for place, number in enumerate(fans[group % len(fans)])
    ]
    *columns, members = np.array(rows, np.int64).reshape(-1, 7).T
    return FanTable(*columns), members


def _aligned(nbytes: Array) -> Array:
    return -(-nbytes // ALIGN) * ALIGN


def _changes(*columns: Array) -> Array:
    """Return for each row whether it differs from the row before it in any column: bool [n]."""
    new = np.ones(len(columns[0]), bool)
    new[1:] = np.any([column[1:] != column[:-1] for column in columns], axis=0)
    return new


def _starts(sizes: Array, lead: Array, group: Array) -> Array:
    """Return for each row the sum of the sizes of the rows before it in its group; group g begins at row `lead[g]`."""
    before = np.cumsum(sizes) - sizes
    return before - before[lead][group]


def _running(sizes: Array, round_: Array, rank: Array) -> Array:
    """Return for each message the sum of the sizes of earlier messages of the same rank in the same round."""
    order = np.lexsort((rank, round_))
    new = _changes(round_[order], rank[order])
    at = np.empty(len(sizes), np.int64)
    at[order] = _starts(sizes[order], np.flatnonzero(new), np.cumsum(new) - 1)
    return at
