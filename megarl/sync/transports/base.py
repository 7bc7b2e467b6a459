"""The interface of a transport, which delivers buckets to receivers."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from megarl.sync.plan import Bucket, Entry
from megarl.sync.receiver import Receiver


class Transport:
    """Delivers filled buckets to receivers. Each trainer rank has one; `put` and `deliver` run in sender threads.

    Attributes:
        session: whether buckets are sent between `Receiver.begin` and `Receiver.end`.
        same_host: whether the sender must run on the receiver's host.
        one_replica: whether one replica sends to all receivers.
        device: device of `buffer`.
        in_parts: whether an update may leave out tensors that receivers already have.
        live: whether `put` can read parameters in place, so that most are not copied into the buffer.
    """

    session = True
    same_host = False
    one_replica = False
    senders_per_stage: int | None = None  # largest number of senders per pipeline stage; None: no limit
    device = torch.device("cpu")
    in_parts = True
    live = False
    sent_bytes: int | None = None  # bytes sent since `start`; None: every bucket was sent to every receiver

    def buffer(self, nbytes: int) -> Tensor:
        """Return a uint8 [nbytes] buffer for buckets."""
        return torch.empty(nbytes, dtype=torch.uint8, device=self.device)

    def broken(self) -> str | None:
        """Return why no update can succeed any more, or None. Every rank calls this method before an update."""
        return None

    def start(self, version: int, receivers: Sequence[Receiver]) -> None:
        """Begin an update of `receivers`, which are already prepared to get tensors."""

    def put(self, number: int, bucket: Bucket, parts: Sequence[Tensor]) -> None:
        """Prepare bucket `number`, which the device has filled, for all receivers; `deliver` follows for each receiver.

        Args:
            parts: uint8, bytes of each tensor of the bucket: parts of the buffer, or parameters if the transport is
                `live`.
        """

    def deliver(self, receiver: Receiver, number: int, bucket: Bucket, flat: Tensor) -> None:
        """Deliver the bucket to one receiver; return when it has copied the bucket. Called for receivers in parallel.

        Args:
            flat: uint8 [nbytes], the buffer.

        Raises:
            ServerError: the receiver rejected the call, is gone, or was too slow.
        """

    def publish(self) -> None:
        """Publish the version after every sender has put all its buckets; called on the first rank, before `commit`."""

    def commit(self, receiver: Receiver) -> None:
        """Complete a receiver's update after all buckets are delivered; called on the receiver's lead rank."""

    def folder_held(self) -> Path | None:
        """Return the folder from which a receiver can load this version again; None if there is none."""
        return None

    def drop(self, receiver: Receiver) -> None:
        """Release all resources for a receiver that failed, because another engine may appear at its address."""
        receiver.forget()

    def close(self) -> None:
        """Release all resources."""


def entries_by_rank(receiver: Receiver, entries: Sequence[Entry]) -> list[list[Entry]]:
    """Return, for each rank of the receiver, the entries of a bucket that it holds completely or in part."""
    layout = receiver.layout
    return [[entry for entry in entries if layout.needs(rank, entry.source)] for rank in range(layout.ranks)]
