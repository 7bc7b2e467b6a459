"""The transfers of an update as tables, which trainer ranks and server ranks execute.

    round 0 of phase 0, cell 0          a round is one NCCL group (`batch_isend_irecv`) of the cell's communicator
      message trainer 3 -> server 1, rank 2      one send and one receive of `nbytes` bytes, from buffer to buffer
        link: a box of a tensor                  its bytes begin at `start` in the message
          target: where the box is unpacked      one; several in a fan-out round

A box is a rectangular part of a tensor. A cell is a set of servers that share one communicator with the trainer ranks
that send to them.

A rank runs the rounds in which it has messages, in the order of the rows of `rounds`, and the messages of a round in
the order of the rows of `messages`. So two ranks send and receive their messages in the same order. Rounds are ordered
by (phase, number, cell). No rank may change this order, so that all ranks of the first unfinished round have started
it, and it ends.

Buffers: in every round a rank that sends packs its messages into one buffer at `send_at`, and a rank that receives has
one buffer with its messages at `receive_at`. Links start at multiples of `ALIGN` bytes; bytes between two links have no
meaning. A link's elements are in the row-major order of its box, in the dtype of the tensor on the wire.

A `direct` message has one link, which is contiguous in the parameters of both ranks and has the same dtype there: it is
sent and received without buffers (`send_at`, `receive_at` are -1).

If a server rank runs on the GPU of a trainer rank, this trainer rank is its proxy: it receives the server rank's
messages into the receive buffer, from which the server rank copies. It packs what it holds itself into this buffer, too
(only `send_at` is -1).

In a fan-out round several ranks of a machine store the same boxes, and each receives a stripe (a share) of their bytes.
Then these ranks, a group, gather the stripes: the receive buffer of each begins with all stripes of the group, and rank
`rank` of `server` has received the bytes [at, at + stripe), which it sends to the other ranks of the group
(`FanTable`). Each rank unpacks its targets, which may lie in any stripe. Messages that only one rank needs lie after
the stripes in its buffer.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import numpy as np

from megarl.sync.shards.boxes import DIMS
from megarl.sync.shards.table import Array, ColumnTable, TableSet

ALIGN = 16


@dataclass(frozen=True, eq=False)
class RoundTable(ColumnTable):
    """Rounds in the order in which they run.

    Attributes:
        phase: int32 [R], phase of the update; in one phase, no trainer rank sends to two cells.
        number: int32 [R], number of the round in its phase and cell.
        cell: int32 [R], number of the communicator of some servers and the trainer ranks that send to them.
    """

    phase: Annotated[Array, "i4"]
    number: Annotated[Array, "i4"]
    cell: Annotated[Array, "i4"]


@dataclass(frozen=True, eq=False)
class MessageTable(ColumnTable):
    """Messages in the order of their rounds.

    Attributes:
        round: int32 [M], row of the round in `RoundTable`.
        sender: int32 [M], rank of the trainer.
        server: int32 [M], number of the server that receives.
        receiver: int32 [M], rank of this server.
        nbytes: int64 [M], bytes.
        send_at: int64 [M], first byte in the sender's buffer of this round; -1: sent without buffers, or not at all,
            because the sender packs it into the receiver's buffer.
        receive_at: int64 [M], first byte in the receiver's buffer of this round; -1: received without buffers.
    """

    round: Annotated[Array, "i4"]
    sender: Annotated[Array, "i4"]
    server: Annotated[Array, "i4"]
    receiver: Annotated[Array, "i4"]
    nbytes: Annotated[Array, "i8"]
    send_at: Annotated[Array, "i8"]
    receive_at: Annotated[Array, "i8"]


@dataclass(frozen=True, eq=False)
class LinkTable(ColumnTable):
    """Links: the boxes (rectangular parts of tensors) in messages, in the order of the messages, and where the sender
    stores each.

    Attributes:
        message: int32 [L], row of the message in `MessageTable`.
        start: int64 [L], first byte in the message.
        nbytes: int64 [L], bytes on the wire.
        tensor: int32 [L], row of the tensor in `TensorTable`.
        lo: int64 [L, DIMS], the box: first index in each dimension of the tensor.
        hi: int64 [L, DIMS], index after the last one.
        parameter, offset, strides: the box in the sender's memory: int32 [L], int64 [L], int64 [L, DIMS], see
            `BoxTable`.
    """

    message: Annotated[Array, "i4"]
    start: Annotated[Array, "i8"]
    nbytes: Annotated[Array, "i8"]
    tensor: Annotated[Array, "i4"]
    lo: Annotated[Array, "i8", DIMS]
    hi: Annotated[Array, "i8", DIMS]
    parameter: Annotated[Array, "i4"]
    offset: Annotated[Array, "i8"]
    strides: Annotated[Array, "i8", DIMS]


@dataclass(frozen=True, eq=False)
class TargetTable(ColumnTable):
    """Where received links (boxes in messages) are unpacked: one row for each link and each server rank that stores it.

    Attributes:
        link: int32 [U], row of the link in `LinkTable`.
        server: int32 [U], number of the server whose rank unpacks it.
        rank: int32 [U], the rank of this server.
        parameter, offset, strides: the box in this rank's memory: int32 [U], int64 [U], int64 [U, DIMS], see
            `BoxTable`.
    """

    link: Annotated[Array, "i4"]
    server: Annotated[Array, "i4"]
    rank: Annotated[Array, "i4"]
    parameter: Annotated[Array, "i4"]
    offset: Annotated[Array, "i8"]
    strides: Annotated[Array, "i8", DIMS]


@dataclass(frozen=True, eq=False)
class FanTable(ColumnTable):
    """Gathers: in a fan-out round, each of some ranks on one machine receives a stripe (a share of the boxes that all
    of them store), and sends it to the others. One row for each rank and round.

    Attributes:
        round: int32 [F], row of the round in `RoundTable`.
        group: int32 [F]; ranks with the same number exchange stripes, in the order of the rows.
        server: int32 [F], number of the server.
        rank: int32 [F], rank of this server.
        at: int64 [F], first byte of the rank's stripe in the buffer.
        stripe: int64 [F], bytes of the stripe, equal for all ranks of a group.
    """

    round: Annotated[Array, "i4"]
    group: Annotated[Array, "i4"]
    server: Annotated[Array, "i4"]
    rank: Annotated[Array, "i4"]
    at: Annotated[Array, "i8"]
    stripe: Annotated[Array, "i8"]


@dataclass(frozen=True, eq=False)
class TransferProgram(TableSet):
    """All transfers of an update, or those of one rank, in the order in which they run."""

    rounds: RoundTable
    messages: MessageTable
    links: LinkTable
    targets: TargetTable
    fans: FanTable

    def of_sender(self, rank: int) -> TransferProgram:
        """Return the transfers in which trainer rank `rank` sends."""
        return self._of_messages(self.messages.sender == rank, np.zeros(len(self.fans), bool))

    def of_receiver(self, server: int, rank: int) -> TransferProgram:
        """Return the transfers of what a rank of a server receives or stores, also of what other ranks of its machine
        receive first and pass on to it."""
        targets, messages, fans = self.targets, self.messages, self.fans
        own_targets = (targets.server == server) & (targets.rank == rank)
        keep = (messages.server == server) & (messages.receiver == rank)
        keep[self.links.message[targets.link[own_targets]]] = True
        member = (fans.server == server) & (fans.rank == rank)
        groups = np.unique(fans.round[member].astype(np.int64) << 32 | fans.group[member])
        return self._of_messages(keep, np.isin(fans.round.astype(np.int64) << 32 | fans.group, groups), own_targets)

    def _of_messages(self, keep: Array, fans: Array, targets: Array | None = None) -> TransferProgram:
        """Return the transfers of some messages and gathers (exchanges of stripes between server ranks).

        Args:
            keep: bool [M], the messages to keep.
            fans: bool [F], the rows of `FanTable` to keep.
            targets: bool [U], which targets of these messages to keep; None: all.
        """
        links = keep[self.links.message]
        unpacked = links[self.targets.link]
        unpacked = unpacked if targets is None else unpacked & targets
        rounds = np.zeros(len(self.rounds), bool)
        rounds[self.messages.round[keep]] = True
        rounds[self.fans.round[fans]] = True
        messages, sent, parts = self.messages.take(keep), self.links.take(links), self.targets.take(unpacked)
        gathers = self.fans.take(fans)
        return TransferProgram(
            self.rounds.take(rounds),
            messages.replace(round=_renumbered(rounds)[messages.round]),
            sent.replace(message=_renumbered(keep)[sent.message]),
            parts.replace(link=_renumbered(links)[parts.link]),
            gathers.replace(round=_renumbered(rounds)[gathers.round]),
        )

    @property
    def memory_bytes(self) -> int:
        """Bytes of all tables in memory."""
        return sum(values.nbytes for values in self.arrays().values())


def _renumbered(keep: Array) -> Array:
    """Return the new number of each row after the rows with `keep` (bool) False have been removed."""
    return np.cumsum(keep) - 1
