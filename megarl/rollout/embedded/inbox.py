"""An embedded engine in processes of its own: each of them takes the trainer's weights here, between two generations.

    inbox = WeightInbox(chunks, key, group)              on every rank of the engine; `address` goes to the trainer
    with inbox.generating(600.0) as version:             waits while weights come; collective over the engine
        engine.weight_version = version
        completions = engine.generate(...)

    trainer's ranks --(JSON messages; bytes by shared memory, broadcast or files)--> threads of the inbox --> parameters

The engine may have any layout; every rank is told everything and copies what it holds. It has no weights at first, and
what fails in the middle of an update stays paused, until a whole update has come. The trainer's end is receiver.py.
"""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import socket
import threading
import traceback
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megarl.comm import WorkerGroup
from megarl.errors import WorkerError
from megarl.models.policy import PolicyModel
from megarl.models.weights.fill import coordinate
from megarl.models.weights.receive import WeightWriter
from megarl.sync.checksum import HostChecksum
from megarl.sync.messages import Refused, answer
from megarl.sync.shared import open_handle
from megarl.sync.transports.distributed import join, leave
from megarl.sync.versions import read_tag

PEER = "engine"  # what this side is called in proofs and messages


class WeightInbox:
    """One rank's end.

    Args:
        chunks: this process's part of the model; its parameters are overwritten.
        key: that trainers prove to know.
        group: the ranks of the engine.
        host: address to listen on; trainers reach it there.

    Attributes:
        address: host and port.
        version: what the trainer calls the weights; empty: there are none yet.
    """

    def __init__(self, chunks: Sequence[PolicyModel], key: str, group: WorkerGroup, host: str = "127.0.0.1") -> None:
        self._group, self._writer = group, WeightWriter(chunks)
        self._dtype, self._device = chunks[0].config.params_dtype, next(chunks[0].parameters()).device
        self._coordinate = coordinate(chunks)
        self._missing = set(self._writer.held)
        self._changed = threading.Condition()
        self._writing = threading.Lock()
        self._running, self._paused, self._open = 0, True, False
        self.version = ""
        self._listener = socket.create_server((host, 0))
        self.address: tuple[str, int] = (host, self._listener.getsockname()[1])
        threading.Thread(target=answer, args=(self._listener, self._opened, key, PEER), daemon=True).start()

    @contextlib.contextmanager
    def generating(self, deadline_s: float) -> Iterator[int]:
        """Nothing is written into the parameters inside the block. Collective over the engine.

        Yields:
            The version of the weights, as the trainer counts it.

        Raises:
            WorkerError: on every rank, when there were no whole weights for `deadline_s` seconds.
        """
        # The first rank decides, and trainers pause it first: no rank begins what another one has to wait with.
        why = self._enter(deadline_s) if self._group.rank == 0 else None
        why = self._group.broadcast_json(why)
        if why is None and self._group.rank != 0:
            why = self._enter(deadline_s)
        if why is not None:
            raise WorkerError(why)
        try:
            yield read_tag(self.version)[0]
        finally:
            with self._changed:
                self._running -= 1
                self._changed.notify_all()

    def close(self) -> None:
        """Take nothing more."""
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()

    def _enter(self, deadline_s: float) -> str | None:
        """None, or why generation cannot begin."""
        with self._changed:
            if not self._changed.wait_for(lambda: not self._paused, deadline_s):
                held = self.version or "no weights"
                where = f"rank {self._group.rank} of {self._group.name}"
                return f"{where}: paused for {deadline_s:g} s, holding {held}; the trainer brought no whole weights"
            self._running += 1
        return None

    @contextlib.contextmanager
    def _opened(self) -> Iterator[Any]:
        """One trainer rank's connection."""
        conversation = _Conversation(self)
        try:
            yield conversation.handle
        finally:
            conversation.leave_groups()

    # -- steps of an update; called by threads of connections ---------------------------------------------------------

    def layout(self) -> dict[str, Any]:
        """Where this rank stands, and the dtype of its parameters."""
        return {"at": dataclasses.astuple(self._coordinate), "dtype": str(self._dtype).removeprefix("torch.")}

    def pause(self, deadline_s: float) -> None:
        """Let no generation begin, and wait until none runs."""
        with self._changed:
            before, self._paused = self._paused, True
            if not self._changed.wait_for(lambda: self._running == 0, deadline_s):
                self._paused = before
                self._changed.notify_all()
                raise Refused(f"it still generates after {deadline_s:g} s")

    def begin(self) -> None:
        """Tensors come; what a dead trainer left open ends here."""
        self._need(self._paused, "it was not paused")
        self._open = True

    def end(self) -> None:
        """No more tensors."""
        self._need(self._open, "no update is open")
        self._open = False

    def set_version(self, version: str) -> None:
        """All of this version has come."""
        if self._missing:
            raise Refused(f"{len(self._missing)} tensors never came, for example {min(self._missing)}")
        self.version = version

    def held_version(self) -> dict[str, str]:
        """What the weights are called."""
        return {"version": self.version}

    def resume(self) -> None:
        """Generation may begin."""
        with self._changed:
            self._paused = False
            self._changed.notify_all()

    def take_flat(self, flat: Tensor, tensors: Sequence[Sequence[Any]]) -> None:
        """Whole tensors (name, shape, dtype, first byte, bytes) in a flat buffer."""
        self._need(self._open, "tensors outside of an update")
        with self._on_device():
            for name, shape, dtype, start, nbytes in tensors:
                if dtype.startswith("float8"):
                    raise Refused(f"{name} comes in {dtype}: sync.fp8 is for servers with a block-FP8 configuration")
                part = flat[start : start + nbytes].view(getattr(torch, dtype)).view(shape)
                self._writer.write(name, part)
                self._missing.discard(name)

    def take_changes(self, flat: Tensor, header: Sequence[Sequence[Any]]) -> None:
        """Distances and values of changed elements, see `megarl.sync.delta`."""
        self._need(self._open, "tensors outside of an update")
        steps, values = flat, flat[sum(count for *_, count in header) :]
        with self._on_device():
            for name, shape, dtype, count in header:
                kind = getattr(torch, dtype)
                elements = values[: count * kind.itemsize].clone().view(kind)  # where they lie they may not be aligned
                positions = steps[:count].to(torch.int64).cumsum(0) - 1
                self._writer.write_elements(name, tuple(shape), positions.to(self._device), elements.to(self._device))
                steps, values = steps[count:], values[count * kind.itemsize :]

    def read_folder(self, folder: str) -> None:
        """A folder of safetensors."""
        self._need(self._paused, "it was not paused")
        with self._on_device():
            self._missing = set(self._writer.held)  # of two versions until it is read to its end
            self._writer.read_folder(Path(folder))
            self._missing = set()

    def checksums(self) -> dict[str, Any]:
        """Of every part that this rank holds."""
        found = {}
        for name, part in self._writer.parts():
            made = HostChecksum()
            made.update(part)
            found[name] = made.hexdigest()
        return {"checksums": found}

    def empty(self, nbytes: int) -> Tensor:
        """Memory on the engine's device."""
        return torch.empty(nbytes, dtype=torch.uint8, device=self._device)

    @property
    def rank(self) -> int:
        """Of this process in the engine."""
        return self._group.rank

    def _need(self, held: bool, why: str) -> None:
        if not held:
            raise Refused(why)

    @contextlib.contextmanager
    def _on_device(self) -> Iterator[None]:
        """One writer at a time; the sender's buffer is free when the block is over."""
        with self._writing:
            if self._device.type == "cuda":
                torch.cuda.set_device(self._device)  # this thread begins on device 0
            yield
            if self._device.type == "cuda":
                torch.cuda.synchronize(self._device)


class _Conversation:
    """What one rank of a trainer asks, and the process groups that it shares with it."""

    def __init__(self, inbox: WeightInbox) -> None:
        self._inbox = inbox
        self._groups: dict[str, tuple[dist.ProcessGroup, dist.TCPStore]] = {}

    def handle(self, header: dict[str, Any], bodies: list[bytearray]) -> dict[str, Any]:
        """Answer one message. Whatever goes wrong is an answer, and the engine lives on."""
        inbox = self._inbox
        actions: dict[str, Any] = {
            "layout": inbox.layout,
            "pause": inbox.pause,
            "begin": inbox.begin,
            "end": inbox.end,
            "set_version": inbox.set_version,
            "held_version": inbox.held_version,
            "resume": inbox.resume,
            "shared": lambda handle, tensors: inbox.take_flat(open_handle(handle), tensors),
            "changes": lambda handle, header: inbox.take_changes(open_handle(handle), header),
            "join": self._join,
            "broadcast": self._broadcast,
            "folder": inbox.read_folder,
            "checksums": inbox.checksums,
        }
        try:
            return actions[header.pop("op")](**header) or {}
        except Refused:
            raise
        except Exception as error:
            traceback.print_exception(error)
            raise Refused(f"{type(error).__name__}: {error}") from error

    def leave_groups(self) -> None:
        """The trainer's rank is gone, or done."""
        for group, _ in self._groups.values():
            leave(group)
        self._groups = {}

    def _join(self, name: str, address: str, port: int, size: int, backend: str, deadline_s: float) -> None:
        limit = datetime.timedelta(seconds=deadline_s)
        store = dist.TCPStore(address, port, size, False, limit)
        self._groups[name] = join(store, name, 1 + self._inbox.rank, size, backend, limit), store

    def _broadcast(self, name: str, tensors: list[list[Any]], nbytes: int) -> None:
        flat = self._inbox.empty(nbytes)
        dist.broadcast(flat, src=0, group=self._groups[name][0])
        self._inbox.take_flat(flat, tensors)
