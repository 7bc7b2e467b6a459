"""What every transport does with a bucket."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from megarl.rollout.sglang.api import ServerApi
from megarl.sync.plan import Bucket


@dataclass(frozen=True)
class Target:
    """A server as transports see it: its number in the plan, the way to call it, the version it holds if any."""

    number: int
    api: ServerApi
    version: int | None = None


class Transport(ABC):
    """Hands filled buckets to servers. One per trainer rank; `put` and `deliver` run in the courier's threads.

    Attributes:
        session: buckets go to the server between begin and end of an update.
        same_host: the sender must run on the server's host.
        one_replica: one replica sends for all servers.
        senders_per_stage: bound on the senders of one pipeline stage; None: none.
        device: where `buffer` is.
    """

    session = True
    same_host = False
    one_replica = False
    senders_per_stage: int | None = None
    device = torch.device("cpu")

    @abstractmethod
    def buffer(self, nbytes: int) -> Tensor:
        """uint8 [nbytes] to fill buckets into."""

    def start(self, version: int, targets: Sequence[Target]) -> None:  # noqa: B027 (most have nothing to do)
        """An update of `targets` begins; they are open for tensors."""

    def put(self, number: int, bucket: Bucket, flat: Tensor) -> None:  # noqa: B027
        """What is done once for this sender's bucket `number`, before any server gets it. `flat`: uint8 [nbytes]."""

    def deliver(self, target: Target, number: int, bucket: Bucket, flat: Tensor) -> None:  # noqa: B027
        """Hand the bucket to one server, which has taken it when this returns. Called for all servers in parallel.

        Raises:
            ServerError: the server refused it, is gone, or did not take it before the deadline.
        """

    def publish(self) -> None:  # noqa: B027
        """Every sender has put all its buckets; called on the first rank alone, before `commit`."""

    def commit(self, target: Target) -> None:  # noqa: B027
        """All buckets of all senders were delivered; called by the rank that leads this server's update."""

    def folder_held(self) -> Path | None:
        """Where a server that took this version can read all of it again; None: nowhere."""
        return None

    def drop(self, target: Target) -> None:  # noqa: B027
        """The server failed or is gone: let go of what belongs to it."""

    def close(self) -> None:  # noqa: B027
        """Let go of everything."""
