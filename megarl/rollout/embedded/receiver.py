"""The trainer's end of embedded engines in processes of their own: receivers of weights like SGLang's servers.

The engines' end is inbox.py. All ranks of an engine are called side by side, except that its first rank pauses before
the others, which follow it from one generation to the next.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from megarl.models.weight_table import Coordinate, TensorRegion, as_index
from megarl.models.weights.receive import held_slices, part_name
from megarl.rollout.embedded.inbox import PEER
from megarl.sync.checksum import Checksum, make_checksum
from megarl.sync.messages import MessageClient, Refused
from megarl.sync.plan import Entry
from megarl.sync.receiver import Checksums, PauseMode, SharedUse, UpdateGroup, UpdateStep
from megarl.sync.shared import Handle
from megarl.system.errors import ServerError

if TYPE_CHECKING:
    from transformers import PretrainedConfig

Address = tuple[str, int]
_MIXED = "mixed weights"  # the version of an engine whose ranks disagree
_SHARE = 0.9  # of a deadline that the engine waits for itself, so that its own words come in time


@dataclass(frozen=True)
class EngineLayout:
    """A `ReceiverLayout`: each rank of an engine holds parts by its place in the engine's parallel layout.

    Attributes:
        hf: configuration of the model, the same for all engines of a run.
        on_gpu: its parameters are on GPUs, which have another checksum.
    """

    coordinates: tuple[Coordinate, ...]
    dtype: torch.dtype
    hf: PretrainedConfig = field(compare=False, repr=False)
    on_gpu: bool = False

    @property
    def ranks(self) -> int:
        """Processes of the engine."""
        return len(self.coordinates)

    @functools.cached_property
    def _regions(self) -> list[dict[str, list[TensorRegion]]]:
        return [held_slices(self.hf, at) for at in self.coordinates]

    def needs(self, rank: int, tensor: str) -> bool:
        """Tell whether `rank` holds any part of this tensor."""
        return tensor in self._regions[rank]

    def parts(self, rank: int, name: str, tensor: Tensor) -> Iterator[tuple[str, Tensor, int]]:
        """Yield each region that `rank` holds as a parameter of its own."""
        for number, region in enumerate(self._regions[rank].get(name, ())):
            part = tensor[as_index(region)].to(self.dtype)
            yield part_name(name, region, number), part, part.numel()

    def make_checksum(self, nbytes: int) -> Checksum:
        """Return the checksum of the engine's device."""
        return make_checksum(nbytes, on_gpu=self.on_gpu)


class EngineReceiver:
    """One engine, see `megarl.sync.receiver.Receiver`.

    Args:
        addresses: addresses of the inboxes of its ranks, all of them on one host.
    """

    def __init__(self, number: int, addresses: Sequence[Address], key: str, layout: EngineLayout) -> None:
        self.number, self.name, self.layout = number, f"engine {number}", layout
        self.url = f"tcp://{addresses[0][0]}:{addresses[0][1]}"
        self.version: int | None = None
        self.answers = True
        self.gpus: tuple[str, ...] = ()  # they are no trainer's
        self._ranks = _Ranks(self.name, self.url, addresses, key)

    def pause(self, mode: PauseMode, step: UpdateStep) -> None:
        """Wait for running generation to end, whatever the mode: it reads the parameters that are written."""
        waiting = {"op": "pause", "deadline_s": _SHARE * step.deadline_s}
        self._ranks.ask(waiting, step, range(1))
        self._ranks.ask(waiting, step, range(1, self.layout.ranks))

    def loading(self, version: str, step: UpdateStep) -> None:
        """Do nothing: an engine whose trainer is gone stays paused."""

    def begin(self, step: UpdateStep) -> None:
        """Open it for tensors."""
        self._ranks.ask({"op": "begin"}, step)

    def end(self, step: UpdateStep) -> None:
        """End the update; nothing is derived from the parameters before the next generation."""
        self._ranks.ask({"op": "end"}, step)

    def set_version(self, version: str, step: UpdateStep) -> None:
        """Set the version; refused while a tensor has never come."""
        self._ranks.ask({"op": "set_version", "version": version}, step)

    def held_version(self, step: UpdateStep) -> str:
        """Return the version that all ranks hold."""
        found = {answer["version"] for answer in self._ranks.ask({"op": "held_version"}, step)}
        return str(found.pop()) if len(found) == 1 else _MIXED

    def flush(self, mode: PauseMode, step: UpdateStep) -> None:
        """Do nothing: no cache outlives a generation."""

    def resume(self, step: UpdateStep) -> None:
        """Generate again; the first rank is the last one told, since the others follow it."""
        self._ranks.ask({"op": "resume"}, step, range(1, self.layout.ranks))
        self._ranks.ask({"op": "resume"}, step, range(1))

    def done(self, version: str, folder: Path | None) -> None:
        """Do nothing: nobody keeps account."""

    def take_shared(
        self, handles: Sequence[Handle], entries: Sequence[Sequence[Entry]], use: SharedUse | None, step: UpdateStep
    ) -> None:
        """Make each rank map the buffer and copy its parts."""
        pairs = zip(handles, entries, strict=True)
        messages = [{"op": "shared", "handle": handle, "tensors": _placed(wanted)} for handle, wanted in pairs]
        self._ranks.ask_each(messages, step)

    def takes_changes(self, step: UpdateStep) -> bool:
        """Return True."""
        return True

    def take_changes(self, handles: Sequence[Handle], header: list[Any], step: UpdateStep) -> bool:
        """Make each rank write the elements that it holds."""
        self._ranks.ask_each([{"op": "changes", "handle": handle, "header": header} for handle in handles], step)
        return True

    def join_group(self, group: UpdateGroup, step: UpdateStep) -> None:
        """Make all ranks join."""
        meeting = {"name": group.name, "address": group.address, "port": group.port, "size": group.size}
        limit = {"backend": group.backend, "deadline_s": step.deadline_s}
        self._ranks.ask({"op": "join"} | meeting | limit, step)

    def take_broadcast(self, group: str, entries: Sequence[Entry], step: UpdateStep) -> None:
        """Broadcast the whole bucket to every rank, which copies its parts."""
        size = sum(entry.nbytes for entry in entries)
        bucket = {"tensors": _placed(entries), "nbytes": size, "deadline_s": _SHARE * step.deadline_s}
        self._ranks.ask({"op": "broadcast", "name": group} | bucket, step)

    def read_folder(self, folder: Path, step: UpdateStep) -> None:
        """Make each rank read its own parts."""
        self._ranks.ask({"op": "folder", "folder": str(folder)}, step)

    def checksums(self, step: UpdateStep) -> Checksums:
        """Return a checksum of every part that a rank holds."""
        return [answer["checksums"] for answer in self._ranks.ask({"op": "checksums"}, step)]

    def forget(self) -> None:
        """Close its connections, which are made again."""
        self._ranks.close()


class EngineReceivers:
    """The engines of a run, see `megarl.sync.receiver.Receivers`.

    Args:
        receivers: the same ones on every rank of the trainer.
        cannot_map: why they cannot map the trainer's device memory; empty: they can.
    """

    def __init__(self, receivers: Sequence[EngineReceiver], cannot_map: str = "") -> None:
        self.all, self.cannot_map, self.spread = list(receivers), cannot_map, ""

    @classmethod
    def connect(
        cls,
        engines: Sequence[Sequence[Address]],
        key: str,
        hf: PretrainedConfig,
        deadline_s: float,
        cannot_map: str = "",
    ) -> EngineReceivers:
        """Ask every rank of every engine which part of the model it holds.

        Args:
            engines: addresses of the ranks' inboxes, by engine.
            deadline_s: for each engine.

        Raises:
            ServerError: an engine does not answer.
        """
        made = []
        for number, addresses in enumerate(engines):
            ranks = _Ranks(f"engine {number}", f"tcp://{addresses[0][0]}:{addresses[0][1]}", addresses, key)
            said = ranks.ask({"op": "layout"}, UpdateStep("which part of the model it holds", deadline_s))
            ranks.close()
            places = tuple(Coordinate(*answer["at"]) for answer in said)
            layout = EngineLayout(places, getattr(torch, said[0]["dtype"]), hf, said[0]["on_gpu"])
            made.append(EngineReceiver(number, addresses, key, layout))
        return cls(made, cannot_map)

    def lead(self, folder: Path, deadline_s: float) -> None:
        """Do nothing: an engine needs no process other than the trainer."""

    def acknowledge(self, number: int, version: int) -> None:
        """Note that it holds this version."""
        self.all[number].version = version

    def mark_failed(self, number: int, why: str) -> None:
        """Leave it out until `retry`."""
        self.all[number].version, self.all[number].answers = None, False

    def retry(self, number: int) -> None:
        """Include the engine again: it can be reached, and the next update brings everything. Call on every rank."""
        self.all[number].answers = True

    def close(self) -> None:
        """Close the connections, and end the relay that this rank started."""
        for receiver in self.all:
            receiver.forget()


class _Ranks:
    """The connections to the inboxes of one engine."""

    def __init__(self, name: str, url: str, addresses: Sequence[Address], key: str) -> None:
        self._name, self._url, self._addresses, self._key = name, url, list(addresses), key
        self._clients: dict[int, MessageClient] = {}

    def ask(self, message: dict[str, Any], step: UpdateStep, ranks: range | None = None) -> list[dict[str, Any]]:
        """Send the same message to these ranks, or to all, and return their answers."""
        wanted = range(len(self._addresses)) if ranks is None else ranks
        return self._ask(dict.fromkeys(wanted, message), step)

    def ask_each(self, messages: Sequence[dict[str, Any]], step: UpdateStep) -> list[dict[str, Any]]:
        """Send one message to each rank and return the answers."""
        return self._ask(dict(enumerate(messages)), step)

    def close(self) -> None:
        """Close the connection; the next request makes another one."""
        for rank in list(self._clients):
            self._clients.pop(rank).close()

    def _ask(self, messages: dict[int, dict[str, Any]], step: UpdateStep) -> list[dict[str, Any]]:
        if not messages:
            return []
        with ThreadPoolExecutor(len(messages)) as pool:
            return list(pool.map(lambda rank: self._call(rank, messages[rank], step), messages))

    def _call(self, rank: int, message: dict[str, Any], step: UpdateStep) -> dict[str, Any]:
        try:
            if rank not in self._clients:
                self._clients[rank] = MessageClient(self._addresses[rank], self._key, step.deadline_s, PEER)
            return self._clients[rank].call(message, deadline_s=step.deadline_s)
        except TimeoutError as error:
            self._clients.pop(rank, None)
            raise self._error(rank, step, f"no answer within {step.deadline_s:g} s") from error
        except OSError as error:
            self._clients.pop(rank, None)
            raise self._error(rank, step, f"{type(error).__name__}: {error}") from error
        except Refused as error:
            raise self._error(rank, step, str(error)) from error

    def _error(self, rank: int, step: UpdateStep, reason: str) -> ServerError:
        return ServerError(self._name, self._url, step.phase, f"rank {rank}: {reason}")


def _placed(entries: Sequence[Entry]) -> list[list[Any]]:
    """(name, shape, dtype, first byte, bytes) of tensors in a flat buffer."""
    return [[entry.name, list(entry.shape), entry.dtype, entry.offset, entry.nbytes] for entry in entries]
