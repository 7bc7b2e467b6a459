"""Same host: the server maps the sender's buffer (shared memory, CUDA IPC) and copies from it into its parameters."""

from __future__ import annotations

import secrets
from collections.abc import Sequence

import torch
from torch import Tensor

from megarl.compat.sglang import LOADER
from megarl.compat.sglang_wire import bucket_payload, loader_payload, shared_buffer
from megarl.sync.plan import Bucket, Entry, SyncPlan
from megarl.sync.transports.base import LoaderCheck, Target, Transport


class TensorTransport(Transport):
    """One payload of handles per server rank; a rank that owns no part of an expert is not shown it."""

    same_host = True

    def __init__(self, plan: SyncPlan, device: torch.device, deadline_s: float) -> None:
        self.plan, self.device, self.deadline_s = plan, device, deadline_s
        self._loaders, self._sender = LoaderCheck(deadline_s), secrets.token_hex(8)
        self._update = ""
        self._ends = {id(buckets[-1]) for route in plan.routes for buckets in route.senders.values() if buckets}

    def start(self, version: int, targets: Sequence[Target]) -> None:
        """All senders of an update name it alike."""
        self._update = str(version)

    def buffer(self, nbytes: int) -> Tensor:
        """Memory that the server can map."""
        return shared_buffer(nbytes, self.device)

    def put(self, number: int, bucket: Bucket, parts: Sequence[Tensor]) -> None:
        """Wait until the device has written the buffer."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def deliver(self, target: Target, number: int, bucket: Bucket, flat: Tensor) -> None:
        """Returns when the server has copied everything it needs, so the buffer is free again."""
        ranks = self.plan.servers[target.number].tp
        needed = (
            [entry for entry in bucket.entries if self.plan.needed_by(target.number, rank, entry)]
            for rank in range(ranks)
        )
        ours = self._loaders.has(target.api, LOADER)
        payload = {
            "serialized_named_tensors": [self._handles(bucket, flat, entries, ours=ours) for entries in needed],
            "load_format": LOADER if ours else "flattened_bucket",
            "flush_cache": False,
        }
        target.api.call("/update_weights_from_tensor", payload, deadline_s=self.deadline_s, phase="bucket")

    def _handles(self, bucket: Bucket, flat: Tensor, entries: list[Entry], *, ours: bool) -> str:
        if not ours:
            return bucket_payload(flat, entries)
        tensors = [[entry.name, entry.shape, entry.dtype, entry.offset, entry.nbytes] for entry in entries]
        last = id(bucket) in self._ends
        return loader_payload(flat, {"tensors": tensors, "update": self._update, "sender": self._sender, "last": last})

    def drop(self, target: Target) -> None:
        """Under this address there may be another server the next time."""
        self._loaders.forget(target.api)
