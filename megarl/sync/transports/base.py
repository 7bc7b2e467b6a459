"""What every transport does with a bucket."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from megarl.errors import ServerError
from megarl.sync.plan import Bucket
from megarl.sync.protocol import version_tag
from megarl.sync.receiver import Receiver


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
        """In the plan."""
        return self.receiver.number

    @property
    def tag(self) -> str | None:
        """What it calls its version, unless somebody else has loaded it since."""
        return None if self.version is None else version_tag(self.version, self.run)

    def error(self, phase: str, reason: str) -> ServerError:
        """What to raise when the update of this receiver failed."""
        return ServerError(self.receiver.name, self.receiver.url, phase, reason)


class Transport(ABC):
    """Hands filled buckets to receivers. One per trainer rank; `put` and `deliver` run in the sender's threads.

    Attributes:
        session: buckets go to the receiver between begin and end of an update.
        same_host: the sender must run on the receiver's host.
        one_replica: one replica sends to all receivers.
        senders_per_stage: bound on the senders of one pipeline stage; None: none.
        device: where `buffer` is.
        sent_bytes: what went out since `start`, where that is not simply every bucket to every receiver.
        live: `put` reads parameters where they lie; they are copied into the buffer only where they have to be.
    """

    session = True
    same_host = False
    one_replica = False
    senders_per_stage: int | None = None
    device = torch.device("cpu")
    live = False
    sent_bytes: int | None = None

    @abstractmethod
    def buffer(self, nbytes: int) -> Tensor:
        """uint8 [nbytes] to fill buckets into."""

    def broken(self) -> str | None:
        """Why no update can succeed any more, as far as this rank knows. Every rank is asked before an update."""
        return None

    def start(self, version: int, targets: Sequence[Target]) -> None:  # noqa: B027 (most have nothing to do)
        """An update of `targets` begins; they are open for tensors."""

    def put(self, number: int, bucket: Bucket, parts: Sequence[Tensor]) -> None:  # noqa: B027
        """What is done once for this sender's bucket `number`, before any receiver gets it.

        Args:
            parts: uint8, the bytes of each entry: parts of the buffer, or parameters if the transport is `live`.
        """

    def deliver(self, target: Target, number: int, bucket: Bucket, flat: Tensor) -> None:  # noqa: B027
        """Hand the bucket to one receiver, which has taken it when this returns. Called for all in parallel.

        Args:
            flat: uint8 [nbytes], the buffer.

        Raises:
            ServerError: the receiver refused it, is gone, or did not take it before the deadline.
        """

    def publish(self) -> None:  # noqa: B027
        """Every sender has put all its buckets; called on the first rank only, before `commit`."""

    def commit(self, target: Target) -> None:  # noqa: B027
        """All buckets of all senders were delivered; called by the rank that leads this receiver's update."""

    def folder_held(self) -> Path | None:
        """Where a receiver that took this version can read all of it again; None: nowhere."""
        return None

    def drop(self, target: Target) -> None:  # noqa: B027
        """The receiver failed or is gone: let go of what belongs to it."""

    def close(self) -> None:  # noqa: B027
        """Let go of everything."""
