"""Receives the trainer's weights, between two generations, for an embedded engine in separate processes.

    inbox = WeightInbox(chunks, key, group)              on every rank of the engine; `address` goes to the trainer
    with inbox.generating(600.0) as version:             waits while weights come; collective over the engine
        engine.weight_version = version                  (`version=4`: waits for exactly this version)
        completions = engine.generate(...)

    trainer's ranks --(JSON messages; bytes by shared memory, broadcast or files)--> threads of the inbox --> parameters

The engine may have any parallel layout; every rank receives all tensors and copies the parts that it holds. An engine
starts without weights, and an engine whose update failed stays paused until a complete update arrives. The trainer's
end is receiver.py.
"""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import socket
import threading
import time
import traceback
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megarl.models.policy import PolicyModel
from megarl.models.weights.fill import coordinate
from megarl.models.weights.receive import WeightWriter
from megarl.sync.checksum import make_checksum
from megarl.sync.messages import Refused, answer
from megarl.sync.plan import FP8_SCALE
from megarl.sync.protocol import read_tag
from megarl.sync.shards.exchange import abort, join
from megarl.sync.shared import open_handle
from megarl.sync.source import dequantize_blocks
from megarl.sync.transports.distributed import broadcast_within
from megarl.system.comm import WorkerGroup
from megarl.system.errors import WorkerError

PEER = "engine"  # name of this side in authentication proofs and messages


class WeightInbox:
    """Receives weights on one rank of the engine, in threads that serve the trainer's connections.

    Args:
        chunks: this process's part of the model; its parameters are overwritten.
        key: secret by which trainers authenticate.
        group: the ranks of the engine.
        host: address to listen on, reachable by trainers.

    Attributes:
        address: host and port.
        version: tag of the weights (`read_tag`); empty: no weights yet.
        update: number of the current or last update; writes of an earlier update are rejected.
        rank: rank of this process in the engine.
    """

    def __init__(self, chunks: Sequence[PolicyModel], key: str, group: WorkerGroup, host: str = "127.0.0.1") -> None:
        self._group, self._writer = group, WeightWriter(chunks)
        self._dtype, self._device = chunks[0].config.params_dtype, next(chunks[0].parameters()).device
        self._coordinate = coordinate(chunks)
        self._missing = set(self._writer.held)
        self._changed = threading.Condition()
        self._writing = threading.Lock()
        self._running, self._paused, self._open = 0, True, False
        self.update, self.rank = 0, group.rank
        self._whole = False  # whether all parameters are of `version`; False: some may be of the next one
        self.version = ""
        self._listener = socket.create_server((host, 0))
        self.address: tuple[str, int] = (host, self._listener.getsockname()[1])
        threading.Thread(target=answer, args=(self._listener, self._opened, key, PEER), daemon=True).start()

    @contextlib.contextmanager
    def generating(self, deadline_s: float, version: int | None = None) -> Iterator[int]:
        """Wait for weights, and allow no write to the parameters inside the block. Collective over the engine.

        Args:
            deadline_s: seconds to wait for weights, independent of the deadline of the engine's group.
            version: weight version to wait for; None: any.

        Yields:
            The weight version.

        Raises:
            WorkerError: on every rank, if complete weights (of `version`) did not arrive within `deadline_s`; at once
                if the engine holds newer weights, because `version` will not come back.
        """
        # The first rank decides when generation starts: trainers pause it first and resume it last, so while it is not
        # paused, no other rank is.
        entered, why = False, None
        at_a_time = self._group.deadline_s / 2 if self._group.size > 1 else deadline_s
        try:
            end = time.monotonic() + deadline_s
            while True:
                if self._group.rank == 0:
                    entered, why = self._enter(min(end - time.monotonic(), at_a_time), version)
                waits = not entered and not self._is_past(version) and time.monotonic() < end
                waits, why = self._group.broadcast_json([waits, why])
                if not waits:
                    break
            if self._group.rank != 0 and why is None:
                entered, why = self._enter(at_a_time, version)
            whys = [text for text in self._group.all_gather_json(why) if text is not None]
            if whys:
                wanted = "complete weights" if version is None else f"weights of version {version}"
                raise WorkerError(f"the engines did not receive {wanted} (limit: {deadline_s:g} s): {whys[0]}")
            yield read_tag(self.version)[0]
        finally:
            if entered:
                with self._changed:
                    self._running -= 1
                    self._changed.notify_all()

    def close(self) -> None:
        """Accept no new connections."""
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()

    def _enter(self, deadline_s: float, version: int | None) -> tuple[bool, str | None]:
        """Wait until generation may begin here; return whether it began, and if not, the reason."""
        with self._changed:
            settled = self._changed.wait_for(
                lambda: not self._paused and (self._holds(version) or self._is_past(version)), max(deadline_s, 0.0)
            )
            if not settled or self._is_past(version):
                weights = f"weights {self.version}" if self._whole else "no complete weights"
                state = "is paused" if self._paused else "is not paused"
                return False, f"rank {self._group.rank} of {self._group.name} {state} and holds {weights}"
            self._running += 1
        return True, None

    def _holds(self, version: int | None) -> bool:
        return version is None or (self._whole and read_tag(self.version)[0] == version)

    def _is_past(self, version: int | None) -> bool:
        """Return whether this rank completely holds weights newer than `version`."""
        return version is not None and self._whole and read_tag(self.version)[0] > version

    @contextlib.contextmanager
    def _opened(self) -> Iterator[Any]:
        """Yield the message handler of one trainer rank's connection; leave its process groups afterwards."""
        conversation = _Conversation(self)
        try:
            yield conversation.handle
        finally:
            conversation.leave_groups()

    # -- steps of an update; called by threads of connections ---------------------------------------------------------

    def layout(self) -> dict[str, Any]:
        """Return this rank's parallel coordinates, and the dtype and device of its parameters."""
        kind = {"dtype": str(self._dtype).removeprefix("torch."), "on_gpu": self._device.type == "cuda"}
        return {"at": dataclasses.astuple(self._coordinate)} | kind

    def pause(self, deadline_s: float) -> None:
        """Stop new generations and wait up to `deadline_s` seconds until no generation runs."""
        with self._changed:
            before, self._paused = self._paused, True
            self.update += 1
            if not self._changed.wait_for(lambda: self._running == 0, deadline_s):
                self._paused = before
                self._changed.notify_all()
                raise Refused(f"the engine is still generating after {deadline_s:g} s; raise sync.timeout_s")

    def begin(self) -> None:
        """Begin an update. It ends an update that a dead trainer left open, whose partial weights are invalid."""
        self._need(self._paused, "the engine is not paused; send pause before begin")
        with self._writing:
            if not self._whole:
                self.version, self._missing = "", set(self._writer.held)
            self.update, self._open = self.update + 1, True

    def end(self) -> None:
        """End the update; further tensors are rejected."""
        self._need(self._open, "no update is open; send begin before end")
        self._open = False

    def set_version(self, version: str) -> None:
        """Mark the parameters as complete weights of `version`; refuse this if some tensors were never sent."""
        if self._missing:
            raise Refused(
                f"the update lacks {len(self._missing)} tensors, for example {min(self._missing)}; send all tensors "
                "before set_version"
            )
        self.version, self._whole = version, True

    def held_version(self) -> dict[str, str]:
        """Return an answer with the tag of the weights that the engine holds."""
        return {"version": self.version}

    def resume(self) -> None:
        """Allow generation again."""
        self._need(self._whole, "the engine holds no complete weights; send a whole update first")
        with self._changed:
            self._paused = False
            self._changed.notify_all()

    def take_flat(self, flat: Tensor, tensors: Sequence[Sequence[Any]], update: int) -> None:
        """Write whole tensors from a flat uint8 buffer; `tensors`: (name, shape, dtype, first byte, bytes) of each.

        FP8 values must come with their scales in the same call; they are dequantised to float32 and then written.
        """
        with self._on_device():
            self._need_open(update)
            parts = {
                name: flat[start : start + nbytes].view(getattr(torch, dtype)).view(shape)
                for name, shape, dtype, start, nbytes in tensors
            }
            for name, part in parts.items():
                if name not in self._writer.shapes and name.endswith(FP8_SCALE):
                    continue
                if part.dtype == torch.float8_e4m3fn:
                    self._need(name + FP8_SCALE in parts, f"FP8 values came without their scales: {name}")
                    part = dequantize_blocks(part, parts[name + FP8_SCALE])
                self._writer.write(name, part)
                self._missing.discard(name)

    def take_changes(self, flat: Tensor, header: Sequence[Sequence[Any]], update: int) -> None:
        """Write the changed elements of some tensors. `flat`, uint8, has the distance of each element from the one
        before it, then their values; `header` lists (name, shape, dtype, number of changed elements).
        """
        steps, values = flat, flat[sum(count for *_, count in header) :]
        with self._on_device():
            self._need_open(update)
            for name, shape, dtype, count in header:
                kind = getattr(torch, dtype)
                elements = values[: count * kind.itemsize].clone().view(kind)  # a view could be misaligned
                positions = steps[:count].to(torch.int64).cumsum(0) - 1
                self._writer.write_elements(name, tuple(shape), positions.to(self._device), elements.to(self._device))
                steps, values = steps[count:], values[count * kind.itemsize :]

    def read_folder(self, folder: str, update: int) -> None:
        """Read all weights from a folder of safetensors; rejected if another update has begun meanwhile."""
        with self._on_device():
            self._need(self._paused and update == self.update, "the engine is not paused for this update")
            self._whole = False
            # until all files are read, all tensors count as missing: they may be of two versions
            self._missing = set(self._writer.held)
            self._writer.read_folder(Path(folder))
            self._missing = set()

    def checksums(self) -> dict[str, Any]:
        """Return the checksum of every part that this rank holds, by name."""
        checksums = {}
        for name, part in self._writer.parts():
            made = make_checksum(part.nbytes, on_gpu=part.is_cuda)
            made.update(part)
            checksums[name] = made.hexdigest()
        return {"checksums": checksums}

    def empty(self, nbytes: int) -> Tensor:
        """Allocate `nbytes` bytes, uint8 [nbytes], on the engine's device."""
        return torch.empty(nbytes, dtype=torch.uint8, device=self._device)

    def _need(self, condition: bool, why: str) -> None:
        if not condition:
            raise Refused(why)

    def _need_open(self, update: int) -> None:
        """Refuse tensors outside of the open update; otherwise record that the parameters may mix two versions from now
        on."""
        self._need(self._open and update == self.update, "tensors were sent outside of the open update")
        self._whole = False

    @contextlib.contextmanager
    def _on_device(self) -> Iterator[None]:
        """Let one thread write at a time; after the block the device has finished reading the sender's buffer."""
        with self._writing:
            if self._device.type == "cuda":
                torch.cuda.set_device(self._device)  # this thread begins on device 0
            yield
            if self._device.type == "cuda":
                torch.cuda.synchronize(self._device)


class _Conversation:
    """Handles the messages of one trainer rank, and holds the process groups shared with it."""

    def __init__(self, inbox: WeightInbox) -> None:
        self._inbox = inbox
        self._groups: dict[str, tuple[dist.ProcessGroup, dist.TCPStore]] = {}

    def handle(self, header: dict[str, Any], bodies: list[bytearray]) -> dict[str, Any]:
        """Run one message's operation and return its answer. Any error becomes a `Refused`, so the engine survives."""
        inbox, update = self._inbox, self._inbox.update
        plain = ("layout", "pause", "begin", "end", "set_version", "held_version", "resume", "checksums")
        actions: dict[str, Any] = {name: getattr(inbox, name) for name in plain} | {
            "shared": lambda handle, tensors: inbox.take_flat(open_handle(handle), tensors, update),
            "changes": lambda handle, header: inbox.take_changes(open_handle(handle), header, update),
            "join": self._join,
            "broadcast": self._broadcast,
            "folder": lambda folder: inbox.read_folder(folder, update),
        }
        try:
            return actions[header.pop("op")](**header) or {}
        except Refused:
            raise
        except Exception as error:
            traceback.print_exception(error)
            raise Refused(f"{type(error).__name__}: {error}") from error

    def leave_groups(self) -> None:
        """Leave the process groups of a trainer rank whose connection has closed."""
        for group, _ in self._groups.values():
            abort(group)
        self._groups = {}

    def _join(self, name: str, address: str, port: int, size: int, backend: str, deadline_s: float) -> None:
        limit = datetime.timedelta(seconds=deadline_s)
        store = dist.TCPStore(address, port, size, False, limit)
        self._groups[name] = join(store, name, size, 1 + self._inbox.rank, backend, deadline_s), store

    def _broadcast(self, name: str, tensors: list[list[Any]], nbytes: int, deadline_s: float) -> None:
        update, flat = self._inbox.update, self._inbox.empty(nbytes)
        try:
            broadcast_within(flat, self._groups[name][0], deadline_s)
        except TimeoutError:
            abort(self._groups.pop(name)[0])  # stops NCCL's kernel on the device
            raise Refused(f"the trainer's broadcast of weights did not arrive within {deadline_s:g} s") from None
        self._inbox.take_flat(flat, tensors, update)
