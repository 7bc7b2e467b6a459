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
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field

import torch
from torch import Tensor

from megarl.sync.plan import Bucket
from megarl.sync.receiver import Receiver
from megarl.sync.source import Source
from megarl.sync.transports.base import Transport
from megarl.system.errors import ServerError


@dataclass
class SyncReport:
    """The result of one weight synchronisation, at its end equal on all ranks: seconds of the slowest, bytes of all.

    Attributes:
        updated: numbers of the receivers that now hold the version.
        failed: why each of the other receivers failed, by number.
        verified: number of parameters whose checksums were compared.
        to_probe: updated receivers that `sync.verify` selects; their outputs can be compared when they generate again.
    """

    version: int
    transport: str
    updated: list[int] = field(default_factory=list)
    failed: dict[int, str] = field(default_factory=dict)
    nbytes: int = 0
    seconds: float = 0.0
    gather_s: float = 0.0
    send_s: float = 0.0
    verified: int = 0
    to_probe: list[int] = field(default_factory=list)


class BucketSender:
    """Fills one of two buffers while a thread sends the other. Buffers are created at the first use and kept."""

    def __init__(self, source: Source, transport: Transport) -> None:
        self.source, self.transport = source, transport
        self._buffers: list[Tensor] = []

    @property
    def buffer_bytes(self) -> int:
        """Bytes of the sender's buffers for buckets, all together."""
        return sum(buffer.nbytes for buffer in self._buffers)

    def run(
        self, routes: Sequence[int], receivers: Sequence[Receiver], report: SyncReport, *, whole: bool = True
    ) -> None:
        """Fill and send this rank's buckets on `routes`; skip frozen buckets unless `whole`. Collective.

        Args:
            receivers: the receivers to which this rank sends, all on its route.
            report: gets the bytes, seconds and failures of this rank.
        """
        in_flight = deque[Future[None]]()
        source, transport = self.source, self.transport
        buckets = source.buckets if source.route in routes else ()
        senders = [sent for route in routes for sent in source.plan.routes[route].senders.values()]
        self._allocate(buckets)

        def send(number: int, bucket: Bucket, flat: Tensor, put: Future[None]) -> None:
            """Deliver a bucket to all receivers that have not failed, after the transport has prepared it."""
            start = time.perf_counter()
            put.result()
            healthy = [receiver for receiver in receivers if receiver.number not in report.failed]
            deliveries = [threads.submit(transport.deliver, receiver, number, bucket, flat) for receiver in healthy]
            wait(deliveries)
            for receiver, delivery in zip(healthy, deliveries, strict=True):
                try:
                    delivery.result()
                except ServerError as error:
                    report.failed[receiver.number] = str(error)
                    transport.drop(receiver)
            report.nbytes += bucket.nbytes * (len(healthy) or 1)
            report.send_s += time.perf_counter() - start

        with (
            ThreadPoolExecutor(1, "put") as putting,
            ThreadPoolExecutor(1, "send") as sending,
            ThreadPoolExecutor(max(len(receivers), 1)) as threads,
        ):
            for number in range(max(map(len, senders), default=0)):  # every rank takes part in every round
                bucket = buckets[number] if number < len(buckets) else None
                if bucket is not None and bucket.frozen and not whole:
                    bucket = None
                if len(in_flight) == len(self._buffers) and in_flight:
                    in_flight.popleft().result()
                flat = None if bucket is None else self._buffers[number % 2][: bucket.nbytes]
                start = time.perf_counter()
                source.fill(number, routes, flat, whole=whole)
                report.gather_s += time.perf_counter() - start
                if bucket is not None and flat is not None:
                    filled = torch.cuda.current_stream().record_event() if flat.is_cuda else None
                    put = putting.submit(self._put, number, bucket, flat, filled)
                    in_flight.append(sending.submit(send, number, bucket, flat, put))
            while in_flight:
                in_flight.popleft().result()
        if receivers and transport.sent_bytes is not None:
            report.nbytes = transport.sent_bytes

    def _put(self, number: int, bucket: Bucket, flat: Tensor, filled: torch.cuda.Event | None) -> None:
        """Wait until the device has filled a bucket, but not for its later work; then prepare the bucket."""
        if filled is not None:
            filled.synchronize()
        self.transport.put(number, bucket, self.source.parts(bucket, flat))

    def release(self) -> None:
        """Free the buffers."""
        self._buffers = []

    def _allocate(self, buckets: Sequence[Bucket]) -> None:
        """Allocate one buffer for buckets with even numbers and one for the others, each as large as needed."""
        sizes = [max(bucket.nbytes for bucket in buckets[first::2]) for first in range(min(len(buckets), 2))]
        if [len(buffer) for buffer in self._buffers] != sizes:
            self._buffers = []  # free the memory before the new ones are allocated
            self._buffers = [self.transport.buffer(size) for size in sizes]
