"""Rounds of a synchronisation on one rank: a pipeline of three stages, gathering, preparing and sending.

main thread     | gather 0 | gather 1   | wait for buffer 0 | gather 2     ...
putting thread             | put 0  | put 1               | ..
sending thread                      | send 0              | send 1            | send 2
                buffer 0 ........................... buffer 1 ......... buffer 0
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field

from torch import Tensor

from megarl.sync.plan import Bucket
from megarl.sync.source import Source
from megarl.sync.transports.base import Target, Transport
from megarl.system.errors import ServerError


@dataclass
class Sent:
    """The result of a synchronisation on this rank; `failed` maps a receiver's number to the reason."""

    nbytes: int = 0
    gather_s: float = 0.0
    send_s: float = 0.0
    failed: dict[int, str] = field(default_factory=dict)


@dataclass(frozen=True)
class _Load:
    """A bucket in flight, and the transport's preparation of it."""

    number: int
    bucket: Bucket
    flat: Tensor
    put: Future[None]


class BucketSender:
    """Fills two buffers in turns, and sends them in a thread. Buffers are created at the first use and kept."""

    def __init__(self, source: Source, transport: Transport) -> None:
        self.source, self.transport = source, transport
        self._buffers: list[Tensor] = []

    @property
    def buffer_bytes(self) -> int:
        """Bytes of the buffers."""
        return sum(buffer.nbytes for buffer in self._buffers)

    def run(self, routes: Sequence[int], targets: Sequence[Target], *, whole: bool = True) -> Sent:
        """Send this rank's buckets to `targets`, which are all on its route; frozen buckets only if `whole`.
        Collective."""
        sent, waiting = Sent(), deque[Future[None]]()
        route = self.source.my_route()
        buckets = self.source.buckets() if route is not None and route in routes else ()
        self._allocate(buckets)
        with (
            ThreadPoolExecutor(1, "put") as putting,
            ThreadPoolExecutor(1, "send") as sending,
            ThreadPoolExecutor(max(len(targets), 1)) as receivers,
        ):
            for number in range(self.source.rounds(routes)):
                bucket = buckets[number] if number < len(buckets) else None
                if bucket is not None and bucket.frozen and not whole:
                    bucket = None
                if len(waiting) == len(self._buffers) and waiting:
                    waiting.popleft().result()
                flat = None if bucket is None else self._buffers[number % 2][: bucket.nbytes]
                start = time.perf_counter()
                self.source.fill(number, routes, flat, whole=whole)
                sent.gather_s += time.perf_counter() - start
                if bucket is not None and flat is not None:
                    put = putting.submit(self.transport.put, number, bucket, self.source.parts(bucket, flat))
                    load = _Load(number, bucket, flat, put)
                    waiting.append(sending.submit(self._send, load, targets, receivers, sent))
            while waiting:
                waiting.popleft().result()
        if targets and self.transport.sent_bytes is not None:
            sent.nbytes = self.transport.sent_bytes
        return sent

    def release(self) -> None:
        """Free the buffers."""
        self._buffers = []

    def _allocate(self, buckets: Sequence[Bucket]) -> None:
        """Allocate one buffer for buckets with even numbers and one for the others, each as large as needed."""
        sizes = [max(bucket.nbytes for bucket in buckets[first::2]) for first in range(min(len(buckets), 2))]
        if [len(buffer) for buffer in self._buffers] != sizes:
            self._buffers = []  # free the memory before the new ones are allocated
            self._buffers = [self.transport.buffer(size) for size in sizes]

    def _send(self, load: _Load, targets: Sequence[Target], receivers: ThreadPoolExecutor, sent: Sent) -> None:
        start = time.perf_counter()
        load.put.result()
        healthy = [target for target in targets if target.number not in sent.failed]
        reasons = list(receivers.map(lambda target: self._deliver(target, load), healthy))
        for target, why in zip(healthy, reasons, strict=True):
            if why is not None:
                sent.failed[target.number] = why
                self.transport.drop(target)
        sent.nbytes += load.bucket.nbytes * (len(healthy) or 1)
        sent.send_s += time.perf_counter() - start

    def _deliver(self, target: Target, load: _Load) -> str | None:
        """Deliver the bucket; return None, or the reason why the receiver did not take it."""
        try:
            self.transport.deliver(target, load.number, load.bucket, load.flat)
        except ServerError as error:
            return str(error)
        return None
