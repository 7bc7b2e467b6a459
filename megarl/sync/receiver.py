"""The interface of an engine that receives the trainer's weights.

    one rank, its lead     pause, loading, begin ............................ end, set_version, flush, resume, done
    every sender                              take_shared | take_changes |
                                              join_group, take_broadcast
    lead, `disk`                                                      read_folder

SGLang's servers are receivers (megarl/rollout/sglang/receiver.py), and so are embedded engines in processes of their
own (megarl/rollout/embedded/receiver.py). The order of steps is in protocol.py.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol

from torch import Tensor

from megarl.sync.checksum import Checksum
from megarl.sync.plan import Entry
from megarl.sync.shared import Handle

PauseMode = Literal["abort", "retract", "in_place"]
Checksums = list[dict[str, str]]  # For each rank of a receiver: parameter -> checksum.


@dataclass(frozen=True)
class UpdateStep:
    """One step of a weight update: the step's name in errors, and its deadline in seconds."""

    phase: str
    deadline_s: float


@dataclass(frozen=True)
class SharedUse:
    """Lets a receiver keep a sender's buffer mapped until the sender's last bucket of an update."""

    update: str  # name of the update, equal for all its senders
    sender: str  # name of the sender that owns the buffer
    last: bool  # whether this is the sender's last bucket


@dataclass(frozen=True)
class UpdateGroup:
    """A process group of one sender (rank 0) and the ranks of one receiver (1 and higher)."""

    name: str
    address: str
    port: int
    size: int
    backend: str


@dataclass(frozen=True)
class ShardMeeting:
    """The store through which a receiver's ranks and the trainer's exchange messages for updates from shard to shard.

    Attributes:
        store: address and port of the trainer's TCPStore.
        prefix: first part of the run's keys in this store.
        server: the receiver's number in these keys.
        timeout_s: deadline in seconds of each step.
    """

    store: tuple[str, int]
    prefix: str
    server: int
    timeout_s: float


@dataclass(frozen=True)
class ShardUpdate:
    """One update from shard to shard, as a receiver's ranks get it.

    Attributes:
        meeting: the trainer's store.
        version: the part of this update's keys in the store that no other update has.
        program: name of the `TransferProgram`; each rank reads its part of it from the store.
        cell: number of the receiver's cell (receivers that share a process group with the trainer ranks that send to
            them).
        group: the cell as a JSON object (`megarl.sync.shards.exchange.ServerCell`).
        backend: gloo or nccl.
        hashed: whether each rank writes hashes of its parameters to the store.
        proxied: whether each rank copies what the trainer rank on its GPU receives for it, and joins no group.
    """

    meeting: ShardMeeting
    version: str
    program: str
    cell: int
    group: dict[str, Any]
    backend: str
    hashed: bool = False
    proxied: bool = False


class ReceiverLayout(Protocol):
    """Describes how a receiver's ranks split the model. Layouts are hashable and compared by value."""

    @property
    def ranks(self) -> int:
        """Number of processes that hold parts of the model."""

    def needs(self, rank: int, tensor: str) -> bool:
        """Return whether `rank` holds any part of this Hugging Face tensor."""

    def parts(self, rank: int, name: str, tensor: Tensor) -> Iterator[tuple[str, Tensor, int]]:
        """Yield the parts of a Hugging Face tensor that `rank` holds, in the dtype of its parameters.

        Args:
            tensor: whole tensor, in the dtype in which it is sent.

        Yields:
            (parameter, the part of `tensor` that is stored next in the parameter, number of elements of the whole
            parameter), in the order in which a checkpoint's tensors are written.
        """

    def together(self, tensor: str) -> str:
        """Return a name that is the same for all tensors that the receiver must get in one bucket: the tensor's own
        name, or that of the parameter that it forms with others.
        """

    def make_checksum(self, nbytes: int) -> Checksum:
        """Return an object that computes the receiver's checksum of a parameter of `nbytes` bytes."""


class Receiver(Protocol):
    """A generation engine that receives weights; every trainer rank has its own object for the engine.

    Every method except `forget` and `done` calls the engine with the deadline of its `step`. It raises a ServerError
    with engine and step if the engine is gone, too slow or rejects the call.

    Attributes:
        number: the receiver's number in the list of receivers and in the plan.
        name: the engine's name in messages.
        url: the engine's address, including the host.
        version: the last weight version that the engine acknowledged; None: none yet.
        answers: whether the engine can be updated, which means that it has not failed on this rank.
        gpus: names of the GPUs of the engine's ranks on its host, as in CUDA_VISIBLE_DEVICES; empty: unknown, or a CPU.
    """

    @property
    def number(self) -> int: ...  # noqa: D102
    @property
    def name(self) -> str: ...  # noqa: D102
    @property
    def url(self) -> str: ...  # noqa: D102
    @property
    def version(self) -> int | None: ...  # noqa: D102
    @property
    def answers(self) -> bool: ...  # noqa: D102
    @property
    def layout(self) -> ReceiverLayout: ...  # noqa: D102
    @property
    def gpus(self) -> Sequence[str]: ...  # noqa: D102

    def pause(self, mode: PauseMode, step: UpdateStep) -> None:
        """Pause generation; `mode` (`sync.pause`) decides whether requests are aborted, requeued or continued later."""

    def loading(self, version: str, step: UpdateStep) -> None:
        """Record that from now on the engine may hold tensors of its old version and of `version`."""

    def begin(self, step: UpdateStep) -> None:
        """Prepare the engine to receive tensors; close an update that a dead trainer left open."""

    def end(self, step: UpdateStep) -> None:
        """End the update after all tensors have arrived; the engine then recomputes what it derives from them."""

    def set_version(self, version: str, step: UpdateStep) -> None:
        """Set the name of the weights that the engine holds."""

    def held_version(self, step: UpdateStep) -> str:
        """Return the name of the weights that the engine holds; another trainer may have set it."""

    def flush(self, mode: PauseMode, step: UpdateStep) -> None:
        """Drop the prefix cache of the old weights; with `in_place`, running requests keep their cache."""

    def resume(self, step: UpdateStep) -> None:
        """Resume generation."""

    def done(self, version: str, folder: Path | None) -> None:
        """Record that the engine generates with `version`. `folder`: a folder with these weights, if any."""

    def take_shared(
        self, handles: Sequence[Handle], entries: Sequence[Sequence[Entry]], use: SharedUse | None, step: UpdateStep
    ) -> None:
        """Make the engine copy tensors from a shared buffer on its host; after that the buffer may be overwritten.

        Args:
            handles: one handle of the buffer for each rank.
            entries: the tensors that each rank copies.
            use: how long the buffer may stay mapped; None: until this method returns.
        """

    def takes_changes(self, step: UpdateStep) -> bool:
        """Return whether the engine can overwrite single elements of its parameters."""

    def take_changes(self, handles: Sequence[Handle], header: list[Any], step: UpdateStep) -> bool:
        """Make the engine overwrite changed elements; return False if it cannot and needs whole tensors from now on.

        Args:
            handles: for each rank, one handle of a buffer with distances and values from `megarl.sync.delta`.
            header: name, shape, dtype and number of changed elements of each changed tensor.
        """

    def join_group(self, group: UpdateGroup, step: UpdateStep) -> None:
        """Make the engine's ranks join the process group of a sender."""

    def take_broadcast(self, group: str, entries: Sequence[Entry], step: UpdateStep) -> None:
        """Make the engine receive these tensors as one flat buffer, broadcast from rank 0 of the named group."""

    def read_folder(self, folder: Path, step: UpdateStep) -> None:
        """Make the engine load a folder of safetensors files."""

    def checksums(self, step: UpdateStep) -> Checksums:
        """Return the checksums of the engine's parameters, by rank."""

    def forget(self) -> None:
        """Drop what is cached about a receiver that failed, because another engine may appear at its address."""


class Receivers(Protocol):
    """All receivers of a run, in the same order on every trainer rank."""

    @property
    def all(self) -> Sequence[Receiver]:
        """The receivers, each at the index that is its `number`."""

    @property
    def cannot_map(self) -> str:
        """Why no receiver can map the trainer's device memory even on the same host; empty if they can."""

    @property
    def spread(self) -> str:
        """Why one host cannot reach all ranks of a receiver; empty if each receiver is on one host."""

    @property
    def colocated(self) -> bool:
        """Whether the receivers run on the trainer's GPUs; on a CPU whether they are to be updated as if they did."""

    @property
    def takes_draft(self) -> bool:
        """Whether receivers take the tensors of the policy's draft head, too."""

    @property
    def takes_no_shards(self) -> str:
        """Why receivers cannot take weights with `sync.transport=shards`, where trainer ranks send directly to their
        ranks (`ShardReceiver`); empty if they can."""

    def lead(self, folder: Path, deadline_s: float) -> None:
        """Prepare this rank to lead the updates of some receivers.

        Args:
            folder: folder for files that outlive this process.
            deadline_s: deadline in seconds of each step, see `UpdateStep`.
        """

    def acknowledge(self, number: int, version: int) -> None:
        """Record that a receiver holds `version` completely and may generate."""

    def mark_failed(self, number: int, why: str) -> None:
        """Record that a receiver failed, so that no further calls are sent to it."""

    def close(self) -> None:
        """Stop the helper processes that `lead` started; the receivers may continue after the trainer ends."""
