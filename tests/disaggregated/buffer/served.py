"""The buffer of a whole run without Ray: a core in the test's process, which workers reach over a socket.

with served(config) as environments:     # one per worker, in their order
    ...                                  # each worker calls `enter(environment)` before it runs
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from multiprocessing.connection import Client, Connection, Listener
from typing import Any

import numpy as np

from megarl.config.run import RunConfig
from megarl.dag.placement import Placement, place
from megarl.dag.staleness import StalenessSettings
from megarl.data.wire import Block, Span
from megarl.disaggregated.buffer.core import Change, Core
from megarl.system.comm import WorkerGroup
from megarl.system.processes import BUFFER, TEAM, WORKER, free_port

_KEY = b"of a test"
_LIMIT_S = 120.0


class Shelf:
    """A core that several threads use, and wait at. `None` is the answer of a method that only changes something."""

    def __init__(self, core: Core) -> None:
        self._core, self._change = core, threading.Condition()

    def call(self, method: str, *arguments: Any) -> Any:
        """The answer of the core, as soon as there is one."""
        if method in ("post", "give", "done", "arrive", "swap", "open_flow"):
            with self._change:
                change: Change = getattr(self._core, method)(*arguments)
                self._change.notify_all()
            return change.answer
        if method in ("is_posted", "drained", "flow_state", "unused"):
            with self._change:
                return getattr(self._core, method)(*arguments)
        last = list[Any]()

        def there() -> bool:
            last[:] = [getattr(self._core, method)(*arguments)]
            return last[0] is not None

        with self._change:
            came = self._change.wait_for(there, timeout=_LIMIT_S)
            assert came, f"timed out waiting for {method} {arguments}"
        return last[0]

    def serve(self, listener: Listener) -> None:
        """Every worker that connects, in a thread of its own, until the listener is closed."""
        while True:
            try:
                worker = listener.accept()
            except (EOFError, ConnectionError):  # it has died before they knew each other
                continue
            except OSError:
                return
            threading.Thread(target=self._serve, args=(worker,), daemon=True).start()

    def _serve(self, worker: Connection) -> None:
        with contextlib.suppress(EOFError, OSError):  # it has ended
            while True:
                try:
                    answer = (True, self.call(*worker.recv()))
                except (EOFError, OSError):
                    raise
                except Exception as error:  # of the core: the worker's own
                    answer = (False, error)
                worker.send(answer)


class FarClient:
    """What `megarl.disaggregated.buffer.client.BufferClient` does, with a shelf in another process."""

    def __init__(self, shelf: Connection, team: str, rank: int, start: int) -> None:
        self._shelf, self.team, self.rank, self._start = shelf, team, rank, start

    @classmethod
    def connect(cls, name: str, team: str, rank: int, deadline_s: float, start: int = 0) -> FarClient:
        """`name` is the port of the shelf."""
        return cls(Client(("127.0.0.1", int(name)), authkey=_KEY), team, rank, start)

    def join_team(self, world: WorkerGroup) -> None:
        """Nothing: progress is not reported."""

    def _call(self, *call: Any) -> Any:
        self._shelf.send(call)
        good, answer = self._shelf.recv()
        if not good:
            raise answer
        return answer

    def post(self, name: str, text: str) -> None:
        """Leave a message under a name that is free."""
        self._call("post", name, text, self._start > 0)

    def read(self, name: str) -> str:
        """The message under a name, as soon as it is there."""
        return self._call("read", name)

    def read_together(self, name: str) -> str:
        """The message under a name, as soon as it is there."""
        return self.read(name)

    def arrive(self, name: str, text: str) -> None:
        """This replica has come so far."""
        self._call("arrive", self.team, self.rank, name, text)

    def is_posted(self, name: str) -> bool:
        """Whether there is a message under a name."""
        return self._call("is_posted", name)

    def has_arrived(self, name: str) -> bool:
        """Whether there is a message under a name."""
        return self.is_posted(name)

    def open_flow(self, step: int, number: int, begun: Mapping[int, int], again: Sequence[int]) -> Any:
        """Begin to hand out prompts."""
        return self._call("open_flow", step, number, sorted(begun.items()), list(again))

    def swap(
        self,
        finished: Sequence[Any],
        payloads: Mapping[str, Iterable[Span]],
        rejected: Sequence[int],
        version: int,
        most: int,
    ) -> tuple[list[int], int]:
        """Hand over finished groups and take prompts; their numbers, and the bytes of the blocks."""
        refs = {key: _pieces(some) for key, some in payloads.items()}
        numbers = self._call("swap", self.team, self.rank, list(finished), refs, list(rejected), version, most)
        return numbers, sum(map(_size, refs.values()))

    def drained(self, version: int) -> Any:
        """Whether nothing is drawn before there are newer weights."""
        return self._call("drained", version)

    def flow_state(self) -> Any:
        """Where prompts stand."""
        return self._call("flow_state")

    def unused(self, step: int, part: int, parts: int) -> list[Any]:
        """Finished groups that no step until `step` is of: one of `parts` shares."""
        groups = [group for group in self._call("unused", step) if group.number % parts == part]
        spans = iter(_spans([piece for group in groups for piece in group.refs.values()]))
        return [replace(group, refs={key: next(spans) for key in group.refs}) for group in groups]

    def give(self, step: int, key: str, groups: Sequence[Any], payloads: Iterable[Span]) -> int:
        """Hand over this replica's groups of one node; the bytes of their blocks."""
        refs = _pieces(payloads)
        self._call("give", self.team, self.rank, step, key, list(groups), refs)
        return _size(refs)

    def assignment(self, step: int, samples: str, part: int) -> Any:
        """The groups of one part."""
        return self._call("assignment", self.team, step, samples, part)

    def fetch(self, step: int, key: str, uids: Sequence[str]) -> list[Span]:
        """The payloads of groups."""
        return _spans(self._call("fetch", self.team, step, key, list(uids)))

    def queues(self) -> Any:
        """How many groups wait for whom."""
        return self._call("queues")

    def done(self, step: int) -> None:
        """This worker needs nothing more of `step`."""
        self._call("done", self.team, self.rank, step)


def _pieces(payloads: Iterable[Span]) -> list[tuple[bytes, int, int]]:
    """Groups of one block share its bytes; so they do after a trip to the shelf and back."""
    contents: dict[Block, bytes] = {}
    pieces = []
    for block, start, stop in payloads:
        if block not in contents:
            contents[block] = bytes(block)
        pieces.append((contents[block], start, stop))
    return pieces


def _size(pieces: Iterable[tuple[bytes, int, int]]) -> int:
    return sum(map(len, {id(content): content for content, _, _ in pieces}.values()))


def _spans(pieces: Iterable[tuple[bytes, int, int]]) -> list[Span]:
    blocks: dict[int, Block] = {}
    for content, _, _ in pieces:
        blocks.setdefault(id(content), Block((np.frombuffer(content, dtype=np.uint8),)))
    return [Span(blocks[id(content)], start, stop) for content, start, stop in pieces]


@contextlib.contextmanager
def served(config: RunConfig) -> Iterator[list[dict[str, str]]]:
    """The buffer of a run with several teams, as long as the block lasts; environments of its workers."""
    from megarl.recipes.build import build_task_graph

    placement = place(build_task_graph(config), config)
    flow = None if config.async_.in_order else StalenessSettings.of(config)
    shelf = Shelf(Core(placement, config.data.batch_size, config.placement.share, flow))
    with Listener(("127.0.0.1", 0), backlog=16, authkey=_KEY) as listener:
        threading.Thread(target=shelf.serve, args=(listener,), daemon=True).start()
        yield environments(placement, listener.address[1])


def environments(placement: Placement, port: int) -> list[dict[str, str]]:
    """What a launcher tells the workers of all teams, in their order."""
    told = []
    for team in placement.teams:
        meeting = str(free_port())
        for rank in range(team.devices):
            own = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": team.devices, "LOCAL_WORLD_SIZE": team.devices}
            names = {TEAM: team.name, WORKER: team.first + rank, BUFFER: port, "MASTER_PORT": meeting}
            told.append({name: str(value) for name, value in (own | names).items()})
    return told


def enter(environment: dict[str, str]) -> None:
    """In a worker's process: become a worker of its team, with this buffer in place of the one that Ray holds."""
    from megarl.disaggregated import loop

    os.environ.update(environment)
    loop.BufferClient = FarClient  # type: ignore[assignment, misc]
