"""The interface of a transport, which delivers buckets."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from megarl.sync.plan import Bucket
from megarl.sync.protocol import version_tag
from megarl.sync.receiver import Receiver, UpdateStep
from megarl.system.errors import ServerError


@dataclass(frozen=True)
class Target:
    """A receiver in one update.

    Attributes:
        receiver: the way to call it.
        version: the last one that it got as a whole, if any.
        run: name of the run, part of what it calls its versions.
    """

    receiver: Receiver
    version: int | None = None
    run: str = ""

    @property
    def number(self) -> int:
        """The number of this receiver in the plan."""
        return self.receiver.number

    @property
    def tag(self) -> str | None:
        """The receiver's name of its version, unless somebody else has loaded one since."""
        return None if self.version is None else version_tag(self.version, self.run)

    def holds_what_it_was_given(self, deadline_s: float) -> bool:
        """Ask the receiver whether it has the version that it got last; no, if it does not answer."""
        if self.version is None:
            return False
        try:
            return self.receiver.held_version(UpdateStep("its version", deadline_s)) == self.tag
        except ServerError:
            return False

    def error(self, phase: str, reason: str) -> ServerError:
        """Return the error to raise when the update of this receiver failed."""
        return ServerError(self.receiver.name, self.receiver.url, phase, reason)


class Transport:
    """The way of filled buckets to receivers. One per trainer rank; `put` and `deliver` run in the sender's threads.

    Attributes:
        session: buckets go to the receiver between begin and end of an update.
        same_host: the sender must run on the receiver's host.
        one_replica: one replica sends to all receivers.
        senders_per_stage: bound on the senders of one pipeline stage; None: none.
        device: where `buffer` is.
        sent_bytes: bytes sent since `start`, where they are not simply every bucket to every receiver.
        in_parts: an update may leave out tensors that receivers have already.
        live: `put` reads parameters where they lie; they are copied into the buffer only where they have to be.
    """

    session = True
    same_host = False
    one_replica = False
    senders_per_stage: int | None = None
    device = torch.device("cpu")
    in_parts = True
    live = False
    sent_bytes: int | None = None

    def buffer(self, nbytes: int) -> Tensor:
        """Return uint8 [nbytes] to fill buckets into."""
        return torch.empty(nbytes, dtype=torch.uint8, device=self.device)

    def broken(self) -> str | None:
        """Return the reason why no update can succeed any more, as far as this rank knows. Every rank is asked before
        an update."""
        return None

    def start(self, version: int, targets: Sequence[Target]) -> None:
        """Begin an update of `targets`, which are open for tensors."""

    def put(self, number: int, bucket: Bucket, parts: Sequence[Tensor]) -> None:
        """Do the work for this sender's bucket `number` that is done once, before any receiver gets it.

        Args:
            parts: uint8, the bytes of each entry: parts of the buffer, or parameters if the transport is `live`.
        """

    def deliver(self, target: Target, number: int, bucket: Bucket, flat: Tensor) -> None:
        """Hand the bucket to one receiver, which has taken it when this returns. Called for all in parallel.

        Args:
            flat: uint8 [nbytes], the buffer.

        Raises:
            ServerError: the receiver refused it, is gone, or did not take it before the deadline.
        """

    def publish(self) -> None:
        """Publish the version, once every sender has put all its buckets; called on the first rank only, before
        `commit`."""

    def commit(self, target: Target) -> None:
        """Commit the update: all buckets of all senders were delivered. The rank that leads this receiver's update
        calls it."""

    def folder_held(self) -> Path | None:
        """Return the folder from which a receiver with this version can read all of it again; None: there is none."""
        return None

    def drop(self, target: Target) -> None:
        """Free what belongs to a receiver that failed or is gone: another engine may come back at its address."""
        target.receiver.forget()

    def close(self) -> None:
        """Let go of everything."""
