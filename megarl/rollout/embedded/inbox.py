"""An embedded engine in processes of its own: each of them takes the trainer's weights here, between two generations.

    inbox = WeightInbox(chunks, key, group)              on every rank of the engine; `address` goes to the trainer
    with inbox.generating(600.0) as version:             waits while weights come; collective over the engine
        engine.weight_version = version                  (`version=4`: for these weights, and no others)
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
import time
import traceback
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from megarl.models.policy import PolicyModel
from megarl.models.weights.fill import coordinate
from megarl.models.weights.receive import WeightWriter
from megarl.sync.checksum import make_checksum
from megarl.sync.messages import Refused, answer
from megarl.sync.protocol import read_tag
from megarl.sync.shared import open_handle
from megarl.sync.transports.distributed import broadcast_within, join, leave
from megarl.system.comm import WorkerGroup
from megarl.system.errors import WorkerError

if TYPE_CHECKING:
    from megarl.rollout.embedded.engine import EmbeddedEngine

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
        version: the trainer's name of the weights; empty: there are none yet.
        update: number of the update that is open or was the last one: writes that still wait when another one begins
            are refused.
        rank: of this process in the engine.
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
        self._whole = False  # the parameters are those of `version`, all of them
        self.version = ""
        self._listener = socket.create_server((host, 0))
        self.address: tuple[str, int] = (host, self._listener.getsockname()[1])
        threading.Thread(target=answer, args=(self._listener, self._opened, key, PEER), daemon=True).start()

    @contextlib.contextmanager
    def generating(self, deadline_s: float, version: int | None = None) -> Iterator[int]:
        """Allow no write to the parameters inside the block. Collective over the engine.

        Args:
            deadline_s: deadline in seconds of the wait for weights.
            version: the ones to wait for; None: any.

        Yields:
            The version of the weights, as the trainer counts it.

        Raises:
            WorkerError: on every rank, when there were no whole weights, or not those of `version`, for `deadline_s`
                seconds, whatever the deadline of the engine's group; at once where they are newer than `version`, which
                does not come back.
        """
        # The first rank decides: trainers pause it first and let it go on last, so no rank begins what another one has
        # to wait with.
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
                wanted = "no whole weights" if version is None else f"no weights of version {version}"
                raise WorkerError(f"{wanted} came within {deadline_s:g} s: {whys[0]}")
            yield read_tag(self.version)[0]
        finally:
            if entered:
                with self._changed:
                    self._running -= 1
                    self._changed.notify_all()

    def close(self) -> None:
        """Take no new trainers."""
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()

    def _enter(self, deadline_s: float, version: int | None) -> tuple[bool, str | None]:
        """Tell whether generation has begun here, and why not."""
        with self._changed:
            settled = self._changed.wait_for(
                lambda: not self._paused and (self._holds(version) or self._is_past(version)), max(deadline_s, 0.0)
            )
            if not settled or self._is_past(version):
                held = f"holding {self.version}" if self._whole else "holding no weights"
                does = "is paused" if self._paused else "goes on"
                return False, f"rank {self._group.rank} of {self._group.name} {does}, {held}"
            self._running += 1
        return True, None

    def _holds(self, version: int | None) -> bool:
        return version is None or (self._whole and read_tag(self.version)[0] == version)

    def _is_past(self, version: int | None) -> bool:
        """Tell whether newer weights than `version` are held."""
        return version is not None and self._whole and read_tag(self.version)[0] > version

    @contextlib.contextmanager
    def _opened(self) -> Iterator[Any]:
        """Return one trainer rank's connection."""
        conversation = _Conversation(self)
        try:
            yield conversation.handle
        finally:
            conversation.leave_groups()

    # -- steps of an update; called by threads of connections ---------------------------------------------------------

    def layout(self) -> dict[str, Any]:
        """Return the coordinates of this rank, and the dtype and device of its parameters."""
        kind = {"dtype": str(self._dtype).removeprefix("torch."), "on_gpu": self._device.type == "cuda"}
        return {"at": dataclasses.astuple(self._coordinate)} | kind

    def pause(self, deadline_s: float) -> None:
        """Let no generation begin, and wait until none runs."""
        with self._changed:
            before, self._paused = self._paused, True
            self.update += 1
            if not self._changed.wait_for(lambda: self._running == 0, deadline_s):
                self._paused = before
                self._changed.notify_all()
                raise Refused(f"it still generates after {deadline_s:g} s")

    def begin(self) -> None:
        """Begin an update: what a dead trainer left open ends here, and what it left half written must come whole."""
        self._need(self._paused, "it was not paused")
        with self._writing:
            if not self._whole:
                self.version, self._missing = "", set(self._writer.held)
            self.update, self._open = self.update + 1, True

    def end(self) -> None:
        """End the update: no more tensors come."""
        self._need(self._open, "no update is open")
        self._open = False

    def set_version(self, version: str) -> None:
        """Note that all of this version has come."""
        if self._missing:
            raise Refused(f"{len(self._missing)} tensors never came, for example {min(self._missing)}")
        self.version, self._whole = version, True

    def held_version(self) -> dict[str, str]:
        """Return the tag of the weights."""
        return {"version": self.version}

    def resume(self) -> None:
        """Let generation begin."""
        self._need(self._whole, "it holds no whole weights")
        with self._changed:
            self._paused = False
            self._changed.notify_all()

    def take_flat(self, flat: Tensor, tensors: Sequence[Sequence[Any]], update: int) -> None:
        """Take whole tensors (name, shape, dtype, first byte, bytes) in a flat buffer, of this update."""
        with self._on_device():
            self._need_open(update)
            for name, shape, dtype, start, nbytes in tensors:
                if dtype.startswith("float8"):
                    raise Refused(f"{name} comes in {dtype}: sync.fp8 is for servers with a block-FP8 configuration")
                part = flat[start : start + nbytes].view(getattr(torch, dtype)).view(shape)
                self._writer.write(name, part)
                self._missing.discard(name)

    def take_changes(self, flat: Tensor, header: Sequence[Sequence[Any]], update: int) -> None:
        """Take distances and values of changed elements, see `megarl.sync.delta`, of this update."""
        steps, values = flat, flat[sum(count for *_, count in header) :]
        with self._on_device():
            self._need_open(update)
            for name, shape, dtype, count in header:
                kind = getattr(torch, dtype)
                elements = values[: count * kind.itemsize].clone().view(kind)  # where they lie they may not be aligned
                positions = steps[:count].to(torch.int64).cumsum(0) - 1
                self._writer.write_elements(name, tuple(shape), positions.to(self._device), elements.to(self._device))
                steps, values = steps[count:], values[count * kind.itemsize :]

    def read_folder(self, folder: str, update: int) -> None:
        """Read a folder of safetensors, unless another update began while this one waited."""
        with self._on_device():
            self._need(self._paused and update == self.update, "not paused for this update")
            self._whole = False
            self._missing = set(self._writer.held)  # of two versions until it is read to its end
            self._writer.read_folder(Path(folder))
            self._missing = set()

    def checksums(self) -> dict[str, Any]:
        """Return the checksums of every part that this rank holds."""
        found = {}
        for name, part in self._writer.parts():
            made = make_checksum(part.nbytes, on_gpu=part.is_cuda)
            made.update(part)
            found[name] = made.hexdigest()
        return {"checksums": found}

    def empty(self, nbytes: int) -> Tensor:
        """Return the memory on the engine's device."""
        return torch.empty(nbytes, dtype=torch.uint8, device=self._device)

    def _need(self, held: bool, why: str) -> None:
        if not held:
            raise Refused(why)

    def _need_open(self, update: int) -> None:
        """Note, for the next writer, that from here on the parameters are of two versions."""
        self._need(self._open and update == self.update, "tensors outside of an update")
        self._whole = False

    @contextlib.contextmanager
    def _on_device(self) -> Iterator[None]:
        """Admit one writer at a time; the sender's buffer is free when the block is over."""
        with self._writing:
            if self._device.type == "cuda":
                torch.cuda.set_device(self._device)  # this thread begins on device 0
            yield
            if self._device.type == "cuda":
                torch.cuda.synchronize(self._device)


class _Conversation:
    """The requests of one rank of a trainer, and the process groups shared with it."""

    def __init__(self, inbox: WeightInbox) -> None:
        self._inbox = inbox
        self._groups: dict[str, tuple[dist.ProcessGroup, dist.TCPStore]] = {}

    def handle(self, header: dict[str, Any], bodies: list[bytearray]) -> dict[str, Any]:
        """Answer one message. Whatever goes wrong is an answer, and the engine lives on."""
        inbox, update = self._inbox, self._inbox.update
        actions: dict[str, Any] = {
            "layout": inbox.layout,
            "pause": inbox.pause,
            "begin": inbox.begin,
            "end": inbox.end,
            "set_version": inbox.set_version,
            "held_version": inbox.held_version,
            "resume": inbox.resume,
            "shared": lambda handle, tensors: inbox.take_flat(open_handle(handle), tensors, update),
            "changes": lambda handle, header: inbox.take_changes(open_handle(handle), header, update),
            "join": self._join,
            "broadcast": self._broadcast,
            "folder": lambda folder: inbox.read_folder(folder, update),
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
        """Leave the groups of a trainer's rank that is gone, or done."""
        for group, _ in self._groups.values():
            leave(group)
        self._groups = {}

    def _join(self, name: str, address: str, port: int, size: int, backend: str, deadline_s: float) -> None:
        limit = datetime.timedelta(seconds=deadline_s)
        store = dist.TCPStore(address, port, size, False, limit)
        self._groups[name] = join(store, name, 1 + self._inbox.rank, size, backend, limit), store

    def _broadcast(self, name: str, tensors: list[list[Any]], nbytes: int, deadline_s: float) -> None:
        update, flat = self._inbox.update, self._inbox.empty(nbytes)
        try:
            broadcast_within(flat, self._groups[name][0], deadline_s)
        except TimeoutError:
            leave(self._groups.pop(name)[0])  # takes nccl's kernel off the device
            raise Refused(f"the trainer's broadcast did not come within {deadline_s:g} s") from None
        self._inbox.take_flat(flat, tensors, update)


class PushedWeights:
    """The weights that an embedded engine generates with: one version, from one `follow` to the next.

    Args:
        deadline_s: deadline in seconds of the wait for a version that was pushed.
    """

    def __init__(self, engine: EmbeddedEngine, inbox: WeightInbox, deadline_s: float) -> None:
        self._engine, self._inbox, self._deadline_s = engine, inbox, deadline_s
        self._version = 0

    def follow(self, version: int) -> None:
        """Generate with `version` from here on. It is there, or comes within the deadline. Collective over the engine.

        Raises:
            WorkerError: it did not come.
        """
        self._version = version
        with self.held():
            self._engine.weight_version = version

    @contextlib.contextmanager
    def held(self) -> Iterator[None]:
        """Keep the parameters those of the followed version as long as the block runs. Collective.

        Raises:
            WorkerError: they are not.
        """
        with self._inbox.generating(self._deadline_s, version=self._version):
            yield

    def close(self) -> None:
        """Take no more weights."""
        self._inbox.close()
