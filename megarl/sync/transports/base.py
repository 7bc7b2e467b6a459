"""What every transport does with a bucket."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from megarl.rollout.sglang.api import ServerApi
from megarl.rollout.sglang.tags import version_tag
from megarl.sync.plan import Bucket


@dataclass(frozen=True)
class Target:
    """A server as transports see it.

    Attributes:
        number: in the plan.
        api: the way to call it.
        version: the last one that it got as a whole, if any.
        run: name of the run, part of what it calls its versions.
    """

    number: int
    api: ServerApi
    version: int | None = None
    run: str = ""

    @property
    def tag(self) -> str | None:
        """What it calls its version, unless somebody else has loaded it since."""
        return None if self.version is None else version_tag(self.version, self.run)


class LoaderCheck:
    """Which servers have megarl's loaders (compat/sglang_server/loaders): those that a run starts, and others that were
    started with them. Each address is asked once.
    """

    def __init__(self, deadline_s: float) -> None:
        self.deadline_s = deadline_s
        self.found: dict[tuple[str, str], bool] = {}

    def has(self, api: ServerApi, loader: str) -> bool:
        """Whether the server has this one.

        Raises:
            ServerError: it does not say.
        """
        if (api.url, loader) not in self.found:
            info = api.call("/server_info", deadline_s=self.deadline_s, phase="which loaders it has", method="GET")
            self.found[api.url, loader] = loader in (info.get("custom_weight_loader") or [])
        return self.found[api.url, loader]

    def refused(self, api: ServerApi, loader: str) -> None:
        """It has the loader, which does not work there."""
        self.found[api.url, loader] = False

    def forget(self, api: ServerApi) -> None:
        """There may be another server under this address."""
        self.found = {key: found for key, found in self.found.items() if key[0] != api.url}


class Transport(ABC):
    """Hands filled buckets to servers. One per trainer rank; `put` and `deliver` run in the courier's threads.

    Attributes:
        session: buckets go to the server between begin and end of an update.
        same_host: the sender must run on the server's host.
        one_replica: one replica sends for all servers.
        senders_per_stage: bound on the senders of one pipeline stage; None: none.
        device: where `buffer` is.
        sent_bytes: what went out since `start`, where that is not simply every bucket to every server.
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
        """What is done once for this sender's bucket `number`, before any server gets it.

        Args:
            parts: uint8, the bytes of each entry: parts of the buffer, or parameters if the transport is `live`.
        """

    def deliver(self, target: Target, number: int, bucket: Bucket, flat: Tensor) -> None:  # noqa: B027
        """Hand the bucket to one server, which has taken it when this returns. Called for all servers in parallel.

        Args:
            flat: uint8 [nbytes], the buffer.

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
