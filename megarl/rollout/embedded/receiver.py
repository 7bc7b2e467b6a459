"""The trainer's end of embedded engines in processes of their own: receivers of weights like SGLang's servers.

The engines' end is inbox.py. Messages go to all ranks of an engine in parallel, but the first rank pauses before the
others and resumes after them, because it decides for all ranks when a generation begins.
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

from megarl.models.layers.rules import TensorRegion
from megarl.models.weight_table import Coordinate, WeightTable, as_index
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
_MIXED = "mixed weights"  # the version of an engine whose ranks hold different versions
_SHARE = 0.9  # share of a deadline that the engine itself waits, so that its error arrives before the deadline


@dataclass(frozen=True)
class EngineLayout:
    """A `ReceiverLayout`: an engine rank's place in the parallel layout determines which parts of tensors it holds.

    Attributes:
        hf: Hugging Face config of the model, the same for all engines of a run.
        on_gpu: whether the parameters are on GPUs, whose checksum differs from the CPU's.
    """

    coordinates: tuple[Coordinate, ...]
    dtype: torch.dtype
    hf: PretrainedConfig = field(compare=False, repr=False)
    on_gpu: bool = False

    @property
    def ranks(self) -> int:
        """Number of processes of the engine."""
        return len(self.coordinates)

    @functools.cached_property
    def _regions(self) -> list[dict[str, list[TensorRegion]]]:
        return [held_slices(self.hf, at) for at in self.coordinates]

    @functools.cached_property
    def _float32(self) -> frozenset[str]:
        return WeightTable.of(self.hf).float32()

    def needs(self, rank: int, tensor: str) -> bool:
        """Return whether `rank` holds any part of this tensor."""
        return tensor in self._regions[rank]

    def parts(self, rank: int, name: str, tensor: Tensor) -> Iterator[tuple[str, Tensor, int]]:
        """Yield (name, values, elements) of each slice of `tensor` that `rank` holds."""
        for number, region in enumerate(self._regions[rank].get(name, ())):
            part = tensor[as_index(region)].to(torch.float32 if name in self._float32 else self.dtype)
            yield part_name(name, region, number), part, part.numel()

    def together(self, tensor: str) -> str:
        """Return the tensor's own name, because an engine can load each tensor by itself."""
        return tensor

    def make_checksum(self, nbytes: int) -> Checksum:
        """Return an empty checksum over `nbytes` bytes, of the kind that the engine's device computes."""
        return make_checksum(nbytes, on_gpu=self.on_gpu)


class EngineReceiver:
    """One engine as a `megarl.sync.receiver.Receiver`.

    Args:
        addresses: inbox address of each rank.
    """

    def __init__(self, number: int, addresses: Sequence[Address], key: str, layout: EngineLayout) -> None:
        self.number, self.name, self.layout = number, f"engine {number}", layout
        self.url = f"tcp://{addresses[0][0]}:{addresses[0][1]}"
        self.version: int | None = None
        self.answers = True
        self.gpus: tuple[str, ...] = ()  # empty: the engine shares no GPU with the trainer
        self._ranks = _Ranks(self.name, self.url, addresses, key)

    def pause(self, mode: PauseMode, step: UpdateStep) -> None:
        """Wait until no generation runs, in every mode, because a generation reads the parameters."""
        waiting = {"op": "pause", "deadline_s": _SHARE * step.deadline_s}
        self._ranks.ask(waiting, step, range(1))
        self._ranks.ask(waiting, step, range(1, self.layout.ranks))

    def loading(self, version: str, step: UpdateStep) -> None:
        """Do nothing. For servers a keeper process notes the phase of an update, in case the trainer dies in it."""

    def begin(self, step: UpdateStep) -> None:
        """Prepare the engine to receive tensors."""
        self._ranks.ask({"op": "begin"}, step)

    def end(self, step: UpdateStep) -> None:
        """End the update; the next generation recomputes what the engine derives from parameters."""
        self._ranks.ask({"op": "end"}, step)

    def set_version(self, version: str, step: UpdateStep) -> None:
        """Set the weight version; the engine rejects it if some tensor was never sent."""
        self._ranks.ask({"op": "set_version", "version": version}, step)

    def held_version(self, step: UpdateStep) -> str:
        """Return the weight version that all ranks hold, or `_MIXED` if they differ."""
        versions = {answer["version"] for answer in self._ranks.ask({"op": "held_version"}, step)}
        return str(versions.pop()) if len(versions) == 1 else _MIXED

    def flush(self, mode: PauseMode, step: UpdateStep) -> None:
        """Do nothing: no cache outlives a generation."""

    def resume(self, step: UpdateStep) -> None:
        """Resume generation; the first rank resumes last, because the others follow it."""
        self._ranks.ask({"op": "resume"}, step, range(1, self.layout.ranks))
        self._ranks.ask({"op": "resume"}, step, range(1))

    def done(self, version: str, folder: Path | None) -> None:
        """Do nothing: an engine whose trainer dies stays paused, and no other process restores it."""

    def take_shared(
        self, handles: Sequence[Handle], entries: Sequence[Sequence[Entry]], use: SharedUse | None, step: UpdateStep
    ) -> None:
        """Make each rank map the trainer's buffer and copy its own parts of the tensors."""
        pairs = zip(handles, entries, strict=True)
        messages = [{"op": "shared", "handle": handle, "tensors": _placed(wanted)} for handle, wanted in pairs]
        self._ranks.ask_each(messages, step)

    def takes_changes(self, step: UpdateStep) -> bool:
        """Return True: every engine accepts updates that contain only the changed elements."""
        return True

    def take_changes(self, handles: Sequence[Handle], header: list[Any], step: UpdateStep) -> bool:
        """Make each rank write those changed elements that belong to its own parts; return True."""
        self._ranks.ask_each([{"op": "changes", "handle": handle, "header": header} for handle in handles], step)
        return True

    def join_group(self, group: UpdateGroup, step: UpdateStep) -> None:
        """Make all ranks of the engine join the process group through which updates are broadcast."""
        meeting = {"name": group.name, "address": group.address, "port": group.port, "size": group.size}
        limit = {"backend": group.backend, "deadline_s": step.deadline_s}
        self._ranks.ask({"op": "join"} | meeting | limit, step)

    def take_broadcast(self, group: str, entries: Sequence[Entry], step: UpdateStep) -> None:
        """Make every rank of the engine receive the broadcast bucket and copy its own parts."""
        size = sum(entry.nbytes for entry in entries)
        bucket = {"tensors": _placed(entries), "nbytes": size, "deadline_s": _SHARE * step.deadline_s}
        self._ranks.ask({"op": "broadcast", "name": group} | bucket, step)

    def read_folder(self, folder: Path, step: UpdateStep) -> None:
        """Make each rank read its own parts of all weights from the folder."""
        self._ranks.ask({"op": "folder", "folder": str(folder)}, step)

    def checksums(self, step: UpdateStep) -> Checksums:
        """Return the checksum of every part that an engine rank holds, by rank."""
        return [answer["checksums"] for answer in self._ranks.ask({"op": "checksums"}, step)]

    def forget(self) -> None:
        """Close the connections; the next message opens new ones."""
        self._ranks.close()


class EngineReceivers:
    """The engines of a run as `megarl.sync.receiver.Receivers`.

    Args:
        receivers: the same engines on every rank of the trainer.
        cannot_map: why the engines cannot map the trainer's device memory; empty if they can.
    """

    def __init__(self, receivers: Sequence[EngineReceiver], cannot_map: str = "") -> None:
        self.all, self.cannot_map, self.spread = list(receivers), cannot_map, ""
        self.takes_draft = self.colocated = False
        self.takes_no_shards = "embedded engines take whole tensors"

    @classmethod
    def connect(
        cls,
        engines: Sequence[Sequence[Address]],
        key: str,
        hf: PretrainedConfig,
        deadline_s: float,
        cannot_map: str = "",
    ) -> EngineReceivers:
        """Query the parallel layout of every engine and return the receivers.

        Args:
            engines: inbox addresses of the ranks of each engine.
            deadline_s: deadline in seconds for each engine.

        Raises:
            ServerError: an engine does not answer.
        """
        made = []
        for number, addresses in enumerate(engines):
            ranks = _Ranks(f"engine {number}", f"tcp://{addresses[0][0]}:{addresses[0][1]}", addresses, key)
            answers = ranks.ask({"op": "layout"}, UpdateStep("query of the parallel layout", deadline_s))
            ranks.close()
            places = tuple(Coordinate(*answer["at"]) for answer in answers)
            layout = EngineLayout(places, getattr(torch, answers[0]["dtype"]), hf, answers[0]["on_gpu"])
            made.append(EngineReceiver(number, addresses, key, layout))
        return cls(made, cannot_map)

    def lead(self, folder: Path, deadline_s: float) -> None:
        """Do nothing: embedded engines need no helper process."""

    def acknowledge(self, number: int, version: int) -> None:
        """Record that engine `number` holds weight version `version`."""
        self.all[number].version = version

    def mark_failed(self, number: int, why: str) -> None:
        """Send no updates to engine `number` until `retry`."""
        self.all[number].version, self.all[number].answers = None, False

    def retry(self, number: int) -> None:
        """Send updates to engine `number` again, beginning with all weights. Call on every rank."""
        self.all[number].answers = True

    def close(self) -> None:
        """Close all connections."""
        for receiver in self.all:
            receiver.forget()


class _Ranks:
    """The connections to all ranks of one engine, each at the address of the rank's inbox."""

    def __init__(self, name: str, url: str, addresses: Sequence[Address], key: str) -> None:
        self._name, self._url, self._addresses, self._key = name, url, list(addresses), key
        self._clients: dict[int, MessageClient] = {}

    def ask(self, message: dict[str, Any], step: UpdateStep, ranks: range | None = None) -> list[dict[str, Any]]:
        """Send the same message to `ranks`, or to all ranks, and return their answers."""
        wanted = range(len(self._addresses)) if ranks is None else ranks
        return self._ask(dict.fromkeys(wanted, message), step)

    def ask_each(self, messages: Sequence[dict[str, Any]], step: UpdateStep) -> list[dict[str, Any]]:
        """Send one message to each rank and return the answers."""
        return self._ask(dict(enumerate(messages)), step)

    def close(self) -> None:
        """Close all connections; the next message opens new ones."""
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
    """Return (name, shape, dtype, offset in bytes, number of bytes) of each tensor in a flat buffer."""
    return [[entry.name, list(entry.shape), entry.dtype, entry.offset, entry.nbytes] for entry in entries]
