"""Transport on one host: the receiver maps the sender's buffer (shared memory, CUDA IPC) and copies from it."""

from __future__ import annotations

import secrets
from collections.abc import Sequence

import torch
from torch import Tensor

from megarl.sync.plan import Bucket, SyncPlan
from megarl.sync.receiver import Receiver, SharedUse, UpdateStep
from megarl.sync.shared import handle_of, shared_buffer
from megarl.sync.transports.base import Transport, entries_by_rank


class TensorTransport(Transport):
    """Sends each rank of a receiver a handle of the sender's buffer and a list of the tensors that the rank needs; the
    rank, which is on the same host, copies them from the buffer."""

    same_host = True

    def __init__(self, plan: SyncPlan, device: torch.device, deadline_s: float) -> None:
        self.device, self.deadline_s = device, deadline_s
        self._sender = secrets.token_hex(8)
        self._update = ""
        self._ends = {id(buckets[-1]) for route in plan.routes for buckets in route.senders.values() if buckets}

    def start(self, version: int, receivers: Sequence[Receiver]) -> None:
        """Begin an update: its name, the same for all senders, is `version`."""
        self._update = str(version)

    def buffer(self, nbytes: int) -> Tensor:
        """Return a buffer that the receiver can map."""
        return shared_buffer(nbytes, self.device)

    def deliver(self, receiver: Receiver, number: int, bucket: Bucket, flat: Tensor) -> None:
        """Send handles of the buffer to the receiver and return when it has copied its tensors from the buffer."""
        entries = entries_by_rank(receiver, bucket.entries)
        use = SharedUse(self._update, self._sender, last=id(bucket) in self._ends)
        handles = [handle_of(flat) for _ in entries]
        receiver.take_shared(handles, entries, use, UpdateStep("bucket", self.deadline_s))
