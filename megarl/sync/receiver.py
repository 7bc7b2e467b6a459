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
Checksums = list[dict[str, str]]  # by rank of a receiver: parameter -> checksum


@dataclass(frozen=True)
class UpdateStep:
    """One step of an update: its name in errors, and the seconds it may take as a whole."""

    phase: str
    deadline_s: float


@dataclass(frozen=True)
class SharedUse:
    """The time for which a receiver may keep a sender's buffer mapped: until `last` in the update of that name.

    Attributes:
        update: a name that all senders of an update share.
        sender: sender of the buffer.
        last: this is the sender's last bucket.
    """

    update: str
    sender: str
    last: bool


@dataclass(frozen=True)
class UpdateGroup:
    """A process group of one sender, its rank 0, and the ranks of one receiver, 1 and on."""

    name: str
    address: str
    port: int
    size: int
    backend: str


class ReceiverLayout(Protocol):
    """The split of the model over a receiver's ranks. Equal layouts are equal values, and can be hashed."""

    @property
    def ranks(self) -> int:
        """Processes that hold parts of the model."""
        ...

    def needs(self, rank: int, tensor: str) -> bool:
        """Tell whether `rank` holds any part of this Hugging Face tensor."""
        ...

    def parts(self, rank: int, name: str, tensor: Tensor) -> Iterator[tuple[str, Tensor, int]]:
        """Yield the parts of a Hugging Face tensor that `rank` holds, in the dtype it holds them in.

        Args:
            tensor: whole, in the wire's dtype.

        Returns:
            (parameter, the part of `tensor` that follows in it, elements of the whole parameter), in the order in which
            tensors come when a checkpoint is written.
        """
        ...

    def make_checksum(self, nbytes: int) -> Checksum:
        """Return the checksum that the receiver gives of a parameter of `nbytes` bytes."""
        ...


class Receiver(Protocol):
    """One engine, as one rank of the trainer sees it.

    Every method but `forget` and `done` is a call of the engine with the deadline of its `step`, and raises a
    ServerError, which names the engine and the step, when the engine is gone, too slow or refuses.

    Attributes:
        number: in the list of receivers, and in the plan.
        name: its name in messages.
        url: where it is reached; its host is that of the receiver.
        version: the last one that it was acknowledged to hold; None: none yet.
        answers: it may be updated, as far as this rank knows.
        gpus: names of the GPUs of its ranks on its host, as CUDA_VISIBLE_DEVICES has them; empty: not known, or a CPU.
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
        """Stop generation; running requests end, are put back or go on later, as `sync.pause` says."""
        ...

    def loading(self, version: str, step: UpdateStep) -> None:
        """Note that from now on it may hold tensors of both its old version and `version`."""
        ...

    def begin(self, step: UpdateStep) -> None:
        """Open it for tensors. An update that a dead trainer left open is closed first."""
        ...

    def end(self, step: UpdateStep) -> None:
        """Finish what is derived from the tensors: all of them have arrived."""
        ...

    def set_version(self, version: str, step: UpdateStep) -> None:
        """Name what it holds."""
        ...

    def held_version(self, step: UpdateStep) -> str:
        """Return the name of what it holds; another trainer may have given it."""
        ...

    def flush(self, mode: PauseMode, step: UpdateStep) -> None:
        """Drop the prefix cache that the old weights filled. With `in_place` running requests keep theirs."""
        ...

    def resume(self, step: UpdateStep) -> None:
        """Generate again."""
        ...

    def done(self, version: str, folder: Path | None) -> None:
        """Note that it generates with `version`; `folder`: where it can read all of that again, if anywhere."""
        ...

    def take_shared(
        self, handles: Sequence[Handle], entries: Sequence[Sequence[Entry]], use: SharedUse | None, step: UpdateStep
    ) -> None:
        """Copy tensors out of a buffer on its host; the buffer is free again when this returns.

        Args:
            handles: handles of the buffer, one for each rank.
            entries: for each rank, the tensors it is to take.
            use: time that the buffer may stay mapped; None: until this returns.
        """
        ...

    def takes_changes(self, step: UpdateStep) -> bool:
        """Tell whether it can write changed elements into its parameters."""
        ...

    def take_changes(self, handles: Sequence[Handle], header: list[Any], step: UpdateStep) -> bool:
        """Write changed elements; False when it cannot with some tensor, and must be given whole ones from now on.

        Args:
            handles: handles of a buffer with distances and values, made by `megarl.sync.delta`; one for each rank.
            header: see `megarl.sync.delta.patch_header`.
        """
        ...

    def join_group(self, group: UpdateGroup, step: UpdateStep) -> None:
        """Meet a sender in a process group."""
        ...

    def take_broadcast(self, group: str, entries: Sequence[Entry], step: UpdateStep) -> None:
        """Take part in a broadcast of these tensors, one flat buffer, from rank 0 of the group of that name."""
        ...

    def read_folder(self, folder: Path, step: UpdateStep) -> None:
        """Load a folder of safetensors."""
        ...

    def checksums(self, step: UpdateStep) -> Checksums:
        """Return the checksums of its own parameters, by rank."""
        ...

    def forget(self) -> None:
        """Forget what was learnt of a receiver that failed: another engine may come back at its address."""
        ...


class Receivers(Protocol):
    """All receivers of a run as one rank sees them: the same ones in the same order on every rank."""

    @property
    def all(self) -> Sequence[Receiver]:
        """The receivers by number."""
        ...

    @property
    def cannot_map(self) -> str:
        """Why no receiver can map the trainer's device memory even on one host; empty: they can."""
        ...

    @property
    def spread(self) -> str:
        """Why nothing on one host reaches all ranks of a receiver; empty: they are on one host."""
        ...

    def lead(self, folder: Path, deadline_s: float) -> None:
        """Make this rank lead updates of some receivers.

        Args:
            folder: for files that outlive this process.
            deadline_s: deadline in seconds of each step, see `UpdateStep`.
        """
        ...

    def acknowledge(self, number: int, version: int) -> None:
        """Note that it holds only `version`, and may generate."""
        ...

    def mark_failed(self, number: int, why: str) -> None:
        """Ask it nothing more."""
        ...

    def close(self) -> None:
        """End what `lead` began, as the trainer ends; or let it go on without the trainer."""
        ...
