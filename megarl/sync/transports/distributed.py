"""Transport for any hosts: a broadcast from the sender to the ranks of one receiver, over gloo or nccl.

Each pair of sender and receiver has its own process group. A receiver takes buckets from several senders in turn. If
many receivers shared a group, two of them could wait for different senders for ever, and the death of one receiver
would end the update of all.

The trainer's part of a collective runs in a separate thread during the call that makes the receiver do its part. Unlike
gloo, nccl neither fails nor returns when the receiver is gone. So the thread is never waited for beyond the deadline,
and the group of a failed receiver is aborted, which removes nccl's kernel from the device.

An nccl kernel occupies its multiprocessors until the other side joins, and a receiver serves its senders one after the
other. If a sender started more broadcasts than fit on its GPU, waiting kernels could fill the GPU, and the broadcast
that a receiver serves might never be scheduled. So a sender runs at most `_AT_ONCE` broadcasts at the same time.
"""

from __future__ import annotations

import datetime
import secrets
import socket
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import TypeVar
from urllib.parse import urlsplit

import torch
import torch.distributed as dist
from torch import Tensor

from megarl.sync.plan import Bucket
from megarl.sync.protocol import failure
from megarl.sync.receiver import Receiver, UpdateGroup, UpdateStep
from megarl.sync.shards.exchange import abort as abort_group
from megarl.sync.shards.exchange import join, leaving
from megarl.sync.transports.base import Transport
from megarl.system.errors import ServerError
from megarl.system.processes import address_towards

T = TypeVar("T")
_POLL_S = 0.001
# Broadcasts that a sender runs at the same time. On an A100 or H100, nccl uses at most 24 channels for a collective
# (its log shows "24 coll channels"). Each occupies a multiprocessor, of which an A100 has 108.
_AT_ONCE = 108 // 24
_GRACE_S = 1.0  # minimum time for the trainer's part of a broadcast to end after the receiver has answered


@dataclass
class _Link:
    name: str
    url: str
    group: dist.ProcessGroup
    store: dist.TCPStore  # the store must live as long as the group


class DistributedTransport(Transport):
    """Sends each bucket as a broadcast of one flat buffer, in a process group of one sender and one receiver.

    Args:
        address: address of this host for receivers; None: the address of the interface that reaches the receiver.
    """

    senders_per_stage: int | None = 1  # few, because every sender needs a connection to every receiver

    def __init__(self, device: torch.device, deadline_s: float, address: str | None = None) -> None:
        self.device, self.deadline_s, self.address = device, deadline_s, address
        self.backend = "nccl" if device.type == "cuda" else "gloo"
        self._links: dict[int, _Link] = {}
        self._room = threading.Semaphore(_AT_ONCE)

    def deliver(self, receiver: Receiver, number: int, bucket: Bucket, flat: Tensor) -> None:
        """Call the receiver with the description of the bucket, and broadcast the bucket at the same time."""
        with self._room:
            self._deliver(receiver, bucket, flat)

    def _deliver(self, receiver: Receiver, bucket: Bucket, flat: Tensor) -> None:
        link = self._links.get(receiver.number)
        if link is None or link.url != receiver.url:  # a restarted receiver has a new address
            self._leave(receiver.number)
            link = self._connect(receiver)
        group, name, step = link.group, link.name, UpdateStep("bucket", self.deadline_s)
        try:
            self._call_beside(
                receiver,
                step,
                lambda: receiver.take_broadcast(name, bucket.entries, step),
                lambda: broadcast_within(flat, group, self.deadline_s),
            )
        except ServerError:
            self._leave(receiver.number, abort=True)
            raise

    def drop(self, receiver: Receiver) -> None:
        """Leave the process group shared with a receiver that is gone."""
        self._leave(receiver.number, abort=True)
        super().drop(receiver)

    def _leave(self, number: int, *, abort: bool = False) -> None:
        link = self._links.pop(number, None)
        if link is not None and abort:
            abort_group(link.group)
        elif link is not None:
            with leaving:
                dist.destroy_process_group(link.group)

    def close(self) -> None:
        """Leave the process groups of all receivers."""
        for number in list(self._links):
            self._leave(number)

    def _connect(self, receiver: Receiver) -> _Link:
        """Create the group of this sender (rank 0) and the receiver's ranks (1 and higher)."""
        # A random name: a receiver keeps groups of dead trainers, and refuses a second group of the same name.
        name = f"megarl-{secrets.token_hex(8)}"
        size = 1 + receiver.layout.ranks
        timeout = datetime.timedelta(seconds=self.deadline_s)
        address, step = self.address, UpdateStep("group of the update", self.deadline_s)
        try:
            address = address or address_towards(urlsplit(receiver.url).hostname or "")
            listener = socket.create_server((address, 0))
            port = listener.getsockname()[1]
            store = dist.TCPStore(
                address, port, size, True, timeout, wait_for_workers=False, master_listen_fd=listener.detach()
            )
        except (OSError, RuntimeError) as error:
            interface = address or "an interface that reaches the server"
            raise failure(receiver, step.phase, f"cannot listen on {interface} (sync.address): {error}") from error
        meeting = UpdateGroup(name, address, port, size, self.backend)
        group = self._call_beside(
            receiver,
            step,
            lambda: receiver.join_group(meeting, step),
            lambda: join(store, name, size, 0, self.backend, self.deadline_s),
        )
        self._links[receiver.number] = link = _Link(name, receiver.url, group, store)
        return link

    def _call_beside(
        self, receiver: Receiver, step: UpdateStep, call: Callable[[], None], collective: Callable[[], T]
    ) -> T:
        """Call the receiver, and at the same time run the trainer's part of the collective in a daemon thread.

        If both fail, the receiver's error is raised.

        Raises:
            ServerError: the receiver rejected the call or is gone, or the trainer's part failed or was too slow.
        """
        end = time.monotonic() + self.deadline_s
        part: Future[T] = Future()

        def run() -> None:
            try:
                part.set_result(collective())
            except BaseException as error:
                part.set_exception(error)

        threading.Thread(target=run, name="broadcast", daemon=True).start()
        try:
            call()
            return part.result(max(end - time.monotonic(), _GRACE_S))
        except TimeoutError:
            reason = f"the trainer's part was not done within {self.deadline_s:g} s"
            raise failure(receiver, step.phase, reason) from None
        except (RuntimeError, OSError) as error:
            reason = f"the trainer's part failed: {str(error).partition(chr(10))[0]}"
            raise failure(receiver, step.phase, reason) from error


def broadcast_within(flat: Tensor, group: dist.ProcessGroup, deadline_s: float) -> None:
    """Send or receive `flat` from rank 0 of `group`; return when the device has finished.

    Raises:
        RuntimeError: the other side is gone, or the group's deadline passed (gloo).
        TimeoutError: nccl did not finish before the deadline; call `exchange.abort` to end it.
    """
    if flat.device.type != "cuda":
        dist.broadcast(flat, src=0, group=group)
        return
    torch.cuda.set_device(flat.device)  # a new thread begins on device 0
    end = time.monotonic() + deadline_s
    work = dist.broadcast(flat, src=0, group=group, async_op=True)
    while not work.is_completed():
        if time.monotonic() > end:
            raise TimeoutError
        time.sleep(_POLL_S)
    error = work.exception()  # nccl's wait() does not raise this error
    if error is not None:
        raise error
