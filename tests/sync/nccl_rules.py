"""Runs what ranks have NCCL do, under its rules, and reports the ranks that never end.

    host    batch A, batch B, wait for A, batch C, ...     in the order in which a rank issued them
    device  A runs; B waits for A (one stream per communicator); C waits until B has started (one hardware queue)

The rules, of NCCL and of torch's process group over it:

* A communicator is made by all of its ranks: in the call that joins it or, where that makes none, in the first batch.
  Until every rank has called, the host of each is blocked (torch.distributed.batch_isend_irecv: "if this API is the
  first collective call in the group, all ranks of the group must participate").
* Two ranks of a communicator connect in the first batch in which both have messages for each other; until then the
  host is blocked.
* A batch is one kernel. It starts when the one before it in its stream has ended, all that were issued before it have
  started (CUDA_DEVICE_MAX_CONNECTIONS=1), and its blocks fit on the device. It keeps its blocks until each of its
  messages has met the other side in a kernel that runs; messages of a pair of ranks meet in order.
* A message outside of a batch makes a communicator for its pair of ranks.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Generator, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

Rank = Hashable
Host = Generator[Callable[[], bool], None, None]  # yields what it waits for
Span = tuple[int, int]  # first byte in memory, and the one after the last

SMS = 108  # multiprocessors of an A100; later devices have more
MESSAGE_BLOCKS, COLLECTIVE_BLOCKS = 32, 24  # channels in NCCL's log on eight H100 ("32 p2p channels per peer")


@dataclass(frozen=True)
class Message:
    """One message: this rank sends it to `peer` or receives it from there; `span`: where it is here."""

    sends: bool
    peer: Rank
    nbytes: int
    span: Span = (0, 0)


@dataclass(frozen=True)
class Join:
    """All `members` make a communicator now."""

    comm: str


@dataclass(frozen=True)
class Batch:
    """Messages of one kernel on a communicator; `number`: what `Wait` names."""

    comm: str
    messages: tuple[Message, ...]
    number: int = 0
    blocks: int = MESSAGE_BLOCKS


@dataclass(frozen=True)
class Wait:
    """The host waits for the batches of this rank that have this number."""

    number: int


@dataclass(frozen=True)
class Copy:
    """The device copies from and to these spans of memory, after what the host has waited for."""

    reads: tuple[Span, ...]
    writes: tuple[Span, ...]


@dataclass(frozen=True)
class Tell:
    """Writes a key that others wait for."""

    key: str


@dataclass(frozen=True)
class Await:
    """Waits for keys."""

    keys: tuple[str, ...]


Event = Join | Batch | Wait | Copy | Tell | Await


@dataclass(eq=False)
class Kernel:
    """A batch on a device."""

    comm: str
    blocks: int
    unmet: dict[tuple[Rank, Rank, int], int]  # (sender, receiver, number of the message in this pair): bytes
    started: bool = False
    ended: bool = False


@dataclass
class Outcome:
    """What was found: ranks that never end with what they wait for, messages that differ in size, and the
    communicators of each rank."""

    stuck: dict[Rank, str]
    unequal: list[str]
    communicators: dict[Rank, set[str]]


@dataclass
class Machine:
    """The devices of all ranks.

    Attributes:
        members: the ranks of each communicator.
        made: communicators that exist from the beginning.
        connected: those of them whose ranks are all connected with each other.
    """

    members: Mapping[str, Sequence[Rank]]
    made: set[str] = field(default_factory=set)
    connected: set[str] = field(default_factory=set)
    keys: set[str] = field(default_factory=set)
    unequal: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._calls: defaultdict[str, set[Rank]] = defaultdict(set)
        self._offers: set[tuple[str, Rank, Rank]] = set()
        self._counts: Counter[tuple[str, Rank, Rank, bool]] = Counter()
        self._kernels: defaultdict[Rank, list[Kernel]] = defaultdict(list)  # by rank those that have not ended
        self._running: dict[tuple[str, Rank, Rank, int, bool], tuple[Kernel, int]] = {}
        self.waiting: dict[Rank, str] = {}

    def host(self, rank: Rank, events: Iterable[Event]) -> Host:
        """A rank's host that goes through recorded events."""
        batches: defaultdict[int, list[Kernel]] = defaultdict(list)
        for event in events:
            self.waiting[rank] = str(event)
            if isinstance(event, Join):
                yield self._made(event.comm, rank)
            elif isinstance(event, Batch):
                yield from self.issue(rank, event, batches[event.number])
            elif isinstance(event, Wait):
                kernels = batches[event.number]
                yield lambda kernels=kernels: all(kernel.ended for kernel in kernels)
            elif isinstance(event, Tell):
                self.keys.add(event.key)
            elif isinstance(event, Await):
                yield lambda event=event: self.keys.issuperset(event.keys)

    def issue(self, rank: Rank, batch: Batch, batches: list[Kernel]) -> Host:
        """Put a kernel into the device's queue when its communicator and connections are there, and add it to
        `batches`."""
        yield self._made(batch.comm, rank)
        pairs = {(batch.comm, rank, message.peer) for message in batch.messages}
        self._offers |= pairs
        if batch.comm not in self.connected:
            yield lambda: all((comm, peer, own) in self._offers for comm, own, peer in pairs)
        unmet = {}
        for message in batch.messages:
            ends = (rank, message.peer) if message.sends else (message.peer, rank)
            key = (batch.comm, *ends, message.sends)
            unmet[*ends, self._counts[key]] = message.nbytes
            self._counts[key] += 1
        batches.append(Kernel(batch.comm, batch.blocks, unmet))
        self._kernels[rank].append(batches[-1])

    def _made(self, comm: str, rank: Rank) -> Callable[[], bool]:
        self._calls[comm].add(rank)
        return lambda: comm in self.made or self._calls[comm].issuperset(self.members[comm])

    def step(self) -> bool:
        """Start and end kernels; return whether any did."""
        moved = False
        for rank, kernels in self._kernels.items():
            room = SMS - sum(kernel.blocks for kernel in kernels if kernel.started)
            busy: set[str] = set()
            for kernel in kernels:
                if not kernel.started:
                    if kernel.comm in busy or kernel.blocks > room:
                        break
                    kernel.started, moved = True, True
                    room -= kernel.blocks
                    self._meet(rank, kernel)
                busy.add(kernel.comm)
            for kernel in kernels:
                kernel.ended = kernel.started and not kernel.unmet
            moved |= any(kernel.ended for kernel in kernels)
            kernels[:] = [kernel for kernel in kernels if not kernel.ended]
        return moved

    def _meet(self, rank: Rank, kernel: Kernel) -> None:
        """Let the messages of a kernel that starts meet those of running ones."""
        for (sender, receiver, number), nbytes in list(kernel.unmet.items()):
            key = kernel.comm, sender, receiver, number
            other = self._running.pop((*key, rank != sender), None)
            if other is None:
                self._running[*key, rank == sender] = kernel, nbytes
                continue
            for each in (kernel, other[0]):
                del each.unmet[sender, receiver, number]
            if other[1] != nbytes:
                self.unequal.append(f"message {number} from {sender} to {receiver} on {kernel.comm}")


def run(machine: Machine, hosts: Mapping[Rank, Host]) -> Outcome:
    """Run all hosts and devices until nothing moves."""
    pending: dict[Rank, Callable[[], bool]] = dict.fromkeys(hosts, lambda: True)
    moved = True
    while moved:
        moved = False
        for rank, ready in list(pending.items()):
            while rank in pending and ready():
                moved = True
                following = next(hosts[rank], None)
                if following is None:
                    del pending[rank]
                else:
                    ready = pending[rank] = following
        moved |= machine.step()
    communicators: defaultdict[Rank, set[str]] = defaultdict(set)
    for comm, ranks in machine._calls.items():
        for rank in ranks:
            communicators[rank].add(comm)
    return Outcome({rank: machine.waiting.get(rank, "") for rank in pending}, machine.unequal, dict(communicators))


def replay(
    events: Mapping[Rank, Sequence[Event]], members: Mapping[str, Sequence[Rank]], made: Iterable[str] = ()
) -> Outcome:
    """Run recorded events; `made`: communicators that exist before."""
    machine = Machine(members, set(made))
    return run(machine, {rank: machine.host(rank, recorded) for rank, recorded in events.items()})


def overlaps(events: Iterable[Event]) -> list[str]:
    """Name what uses memory of a batch that the host has not waited for: one of both writes there."""
    found: list[str] = []
    flying: dict[int, tuple[tuple[Span, ...], tuple[Span, ...]]] = {}
    for event in events:
        if isinstance(event, Wait):
            flying.pop(event.number, None)
        if not isinstance(event, Batch | Copy):
            continue
        if isinstance(event, Copy):
            reads, writes = event.reads, event.writes
        else:
            reads = tuple(message.span for message in event.messages if message.sends)
            writes = tuple(message.span for message in event.messages if not message.sends)
        for number, (other_reads, other_writes) in flying.items():
            if _meet(writes, other_reads + other_writes) or _meet(reads, other_writes):
                found.append(f"{type(event).__name__} uses memory of batch {number}, which is under way")
        if isinstance(event, Batch):
            flying[event.number] = reads, writes
    return found


def _meet(first: Sequence[Span], second: Sequence[Span]) -> bool:
    return any(a < d and c < b for a, b in first for c, d in second)
