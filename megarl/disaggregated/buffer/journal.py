"""A file of records that outlives its writer: whoever opens it again finds all that was appended.

    9a4ad20f {"journal": 1, "of": "store-1f0e"}       checksum of the record, and the record: one line of JSON
    8d2b01aa ["train",0,1,2,["give","train",0,...
    03c1a4f7 ["train",0,                              torn: its writer died, and nobody was told that it is there

A record is with the operating system when `append` returns. So it outlives the process, not the machine.
"""

from __future__ import annotations

import json
import os
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple
from zlib import crc32

from megarl.disaggregated.buffer import json_state
from megarl.disaggregated.buffer.core import STATE, Core, GroupInfo, StoreError, Topic
from megarl.disaggregated.buffer.flow import Finished, FlowGroup

_FORMAT = 1
_CHECKSUM = 9  # bytes: eight digits and a space


class Journal:
    """The journal of one writer. It reads before it writes: `records` first, to the end.

    Args:
        of: whose it is. What another has left there is replaced.

    Attributes:
        size: of the file in bytes.
    """

    def __init__(self, path: Path, of: str) -> None:
        self._path, self._head = path, json.dumps({"journal": _FORMAT, "of": of})
        self._file: BinaryIO | None = None
        self.size = 0

    def records(self) -> Iterator[bytes]:
        """Return what was appended since the journal began or was last replaced; then it is open.

        Raises:
            StoreError: a record is damaged, and others come after it.
        """
        if self._path.is_file():
            with self._path.open("rb") as file:
                head = _record(file.readline())
                if head == self._head.encode():
                    self.size = file.tell()
                    yield from self._rest(file)
        if self.size:
            self._file = self._path.open("r+b", buffering=0)
            self._file.truncate(self.size)
            self._file.seek(self.size)
        else:
            self.replace([])

    def _rest(self, file: BinaryIO) -> Iterator[bytes]:
        for line in file:
            record = _record(line)
            if record is None:
                if file.read(1):
                    raise StoreError(
                        f"{self._path}: the record at byte {self.size} is damaged, and others come after it: the "
                        "store cannot go on from its journal"
                    )
                return
            self.size += len(line)
            yield record

    def append(self, record: str) -> None:
        """Add one line of JSON.

        Raises:
            StoreError: it cannot be written, or an earlier one could not.
        """
        if self._file is None:
            raise StoreError(f"{self._path}: the journal of the store ends where it could not be written")
        line = _line(record)
        try:
            written = self._file.write(line)
            if written != len(line):
                raise OSError(f"{written} of {len(line)} bytes were written")
        except OSError as error:
            self._file.close()
            self._file = None
            raise StoreError(f"{self._path}: the journal of the store cannot be written: {error}") from error
        self.size += len(line)

    def replace(self, records: Iterable[str]) -> None:
        """Forget all records for these; whoever opens the file finds the old ones or the new ones.

        Raises:
            StoreError: they cannot be written; the old ones are there, or nothing more can be appended.
        """
        new = self._path.with_name(f"{self._path.name}.new")
        try:
            with new.open("wb") as file:
                file.writelines(map(_line, [self._head, *records]))
            os.replace(new, self._path)
            if self._file is not None:
                self._file.close()  # the file has no name any more: what was written there would be lost
                self._file = None
            self._file = self._path.open("ab", buffering=0)
            self.size = self._path.stat().st_size
        except OSError as error:
            raise StoreError(f"{self._path}: the journal of the store cannot be written: {error}") from error


def _line(record: str) -> bytes:
    body = record.encode()
    return b"%08x %s\n" % (crc32(body), body)


def _record(line: bytes) -> bytes | None:
    """None: it is torn."""
    body = line[_CHECKSUM:-1]
    return body if line[:_CHECKSUM] == b"%08x " % crc32(body) and line[-1:] == b"\n" else None


#: Bytes of calls that the journal may hold before the state takes their place, beside five times the state.
ROOM = 16 << 20

Worker = tuple[str, int]


@dataclass(eq=False)
class Payload:
    """The bytes of one call, as long as the core holds a piece of it."""

    team: str
    rank: int
    serial: int


class PayloadPiece(NamedTuple):
    """One reference of a payload."""

    payload: Payload
    place: int


class Ack(NamedTuple):
    """The buffer's acknowledgement of bytes that a worker sent.

    Attributes:
        heard: number of the last call of this worker.
        gone: numbers of its calls whose bytes are needed no more, since it was told last; an answer that is lost takes
            them with it.
        lacking: numbers of calls whose bytes are needed, and whose references have to be given again.
        held: numbers of all calls whose bytes are needed; None: this is only what is new.
    """

    heard: int
    gone: list[int]
    lacking: list[int]
    held: list[int] | None = None


class _Refusal(NamedTuple):
    message: str


#: Of one call: its answer, and what has come by it.
_Outcome = tuple[Any, list[Topic]]
_Change = Callable[[Core, list[Any], list[PayloadPiece]], _Outcome]


def _give(core: Core, arguments: list[Any], pieces: list[PayloadPiece]) -> _Outcome:
    team, rank, step, key, groups = arguments
    return None, core.give(team, rank, step, key, list(map(_info, groups)), pieces)


def _swap(core: Core, arguments: list[Any], pieces: list[PayloadPiece]) -> _Outcome:
    team, rank, finished, keys, *rest = arguments
    groups = [Finished(number, _info(info), metrics) for number, info, metrics in finished]
    refs = {key: pieces[place * len(groups) :][: len(groups)] for place, key in enumerate(keys)}
    return core.swap(team, rank, groups, refs, *rest)


def _plain(method: str, *, tells: bool = False, answers: bool = False) -> _Change:
    """Wrap a method without groups and references. It returns the mail that came by it, its answer, or nothing."""

    def change(core: Core, arguments: list[Any], pieces: list[PayloadPiece]) -> _Outcome:
        found = getattr(core, method)(*arguments)
        return found if answers else None, found if tells else []

    return change


def _info(group: list[Any]) -> GroupInfo:
    uid, ordinal, ids, tokens = group
    return GroupInfo(uid, ordinal, tuple(ids), tokens)


#: Every method that may change a core, called with what JSON makes of its arguments.
_CHANGES: dict[str, _Change] = {
    "give": _give,
    "swap": _swap,
    "post": _plain("post", tells=True),
    "arrive": _plain("arrive", tells=True),
    "done": _plain("done"),
    "open_flow": _plain("open_flow", answers=True),
    "assignment": _plain("assignment"),
    "fetch": _plain("fetch"),
    "restart_team": _plain("restart_team"),
}
_CLASSES = (*STATE, Payload, PayloadPiece, _Refusal)


def _note_gone(gone: defaultdict[Worker, list[int]], worker: Worker, serial: int) -> None:
    gone[worker].append(serial)


class DurableCore:
    """A core and its journal.

    Args:
        make: a new core, the same whenever it is called.
        name: of the store. The journal of another one is replaced.

    Raises:
        StoreError: the journal is damaged, or cannot be written.
    """

    def __init__(self, make: Callable[[], Core], path: Path, name: str, room: int = ROOM) -> None:
        self._make, self._room = make, room
        self._core = make()
        self._said: dict[Worker, tuple[int, Any]] = {}  # number and answer of the last call of each
        self._payloads: dict[Worker, weakref.WeakValueDictionary[int, Payload]] = {}
        self._refs: weakref.WeakKeyDictionary[Payload, Sequence[Any]] = weakref.WeakKeyDictionary()
        self._gone: defaultdict[Worker, list[int]] = defaultdict(list)  # that the worker has not been told of
        self._lacking: defaultdict[Worker, weakref.WeakSet[Payload]] = defaultdict(weakref.WeakSet)
        self._journal = Journal(path, name)
        self._most = room
        parse = json.JSONDecoder().raw_decode  # half the time of json.loads for records so short
        for record in self._journal.records():
            found, _ = parse(record.decode())
            if isinstance(found, dict):
                self._restore(found["state"])
                self._most = room + 5 * len(record)
            else:
                self._do(*found)
        self._gone.clear()  # workers that gave before this process began are told of all that is held

    def change(
        self, team: str, rank: int, serial: int, call: str, refs: Sequence[Any] = ()
    ) -> tuple[Any, list[Topic] | None]:
        """Do a call, if it is not a repeated one.

        Args:
            serial: number of the call, one more than that of the call before; or the same: it is repeated.
            call: JSON of a list: the name of the method, and its arguments without references.

        Returns:
            The answer, and what has come by it; None: references came again, and anything may have come by that.

        Raises:
            StoreError: the core refuses it, or calls of this worker are missing.
        """
        topics: list[Topic] | None = None
        last = self._last(team, rank)
        if serial == last + 1:
            topics = self._do(team, rank, serial, len(refs), json.loads(call))
            self._append(f"[{json.dumps(team)},{rank},{serial},{len(refs)},{call}]")
        elif serial != last:
            raise StoreError(
                f"team {team!r} rank {rank}: this is its call {serial}, and the last that the store knows of is {last}"
            )
        self.bind(team, rank, serial, refs)
        answer = self._said[team, rank][1]
        if isinstance(answer, _Refusal):
            raise StoreError(answer.message)
        return answer, topics

    def ask(self, method: str, *arguments: Any) -> Any:
        """Return the core's answer. Where the answer decides something, the decision is in the journal."""
        before = self._core.decisions
        try:
            return getattr(self._core, method)(*arguments)
        finally:
            if self._core.decisions != before:
                self._append(json.dumps(["", 0, 0, 0, [method, *arguments]]))

    def fetch(self, team: str, step: int, key: str, uids: Sequence[str]) -> list[Any] | None:
        """See `Core.fetch`; None, too: a giver has to give references again."""
        return self._refs_of(self.ask("fetch", team, step, key, uids))

    def unused(self, step: int) -> list[FlowGroup] | None:
        """See `Core.unused`; None: a giver has to give references again."""
        groups: list[FlowGroup] = self.ask("unused", step)
        found = []
        for group in groups:
            refs = self._refs_of(list(group.refs.values()))
            if refs is None:
                return None
            found.append(replace(group, refs=dict(zip(group.refs, refs, strict=True))))
        return found

    def _refs_of(self, pieces: Sequence[PayloadPiece] | None) -> list[Any] | None:
        if pieces is None:
            return None
        found = []
        for piece in pieces:
            refs = self._refs.get(piece.payload)
            if refs is None:
                return None
            found.append(refs[piece.place])
        return found

    def bind(self, team: str, rank: int, serial: int, refs: Sequence[Any]) -> None:
        """These are the references of a call of this worker; of one that is forgotten they are not kept."""
        payload = self._of(team, rank).get(serial)
        if payload is not None:
            self._refs[payload] = refs
            self._lacking[team, rank].discard(payload)

    def ack(self, team: str, rank: int, *, whole: bool = False) -> Ack:
        """Return what is new to a worker. `whole`: also all of its calls whose bytes are needed, which takes time."""
        gone = self._gone.pop((team, rank), [])
        lacking = sorted(payload.serial for payload in self._lacking[team, rank])
        return Ack(self._last(team, rank), gone, lacking, sorted(self._of(team, rank)) if whole else None)

    # ----------------------------------------------------------------------------------------------------------------

    def _last(self, team: str, rank: int) -> int:
        return self._said[team, rank][0] if (team, rank) in self._said else 0

    def _do(self, team: str, rank: int, serial: int, count: int, call: list[Any]) -> list[Topic]:
        """Make a call, now or as the journal has it; without a number: a decision of the core."""
        method, *arguments = call
        pieces: list[PayloadPiece] = []
        if count:
            payload = Payload(team, rank, serial)
            pieces = [PayloadPiece(payload, place) for place in range(count)]
        try:
            answer, topics = _CHANGES[method](self._core, arguments, pieces)
        except StoreError as error:
            answer, topics = _Refusal(str(error)), []
        if count:
            self._keep(payload)
        if serial:
            self._said[team, rank] = serial, answer
        return topics

    def _of(self, team: str, rank: int) -> weakref.WeakValueDictionary[int, Payload]:
        """List what a worker sent that is still needed."""
        worker = (team, rank)
        if worker not in self._payloads:
            self._payloads[worker] = weakref.WeakValueDictionary()
        return self._payloads[worker]

    def _keep(self, payload: Payload) -> None:
        worker, serial = (payload.team, payload.rank), payload.serial
        self._of(*worker)[serial] = payload
        self._lacking[worker].add(payload)
        weakref.finalize(payload, _note_gone, self._gone, worker, serial).atexit = False

    def _append(self, record: str) -> None:
        self._journal.append(record)
        if self._journal.size > self._most:
            state = json.dumps({"state": self._state()}, separators=(",", ":"))
            self._journal.replace([state])
            self._most = self._room + 5 * self._journal.size

    def _state(self) -> Any:
        """All that calls have changed, as JSON."""
        new = vars(self._make())
        core = {name: value for name, value in vars(self._core).items() if value != new[name]}
        payloads = [payload for some in self._payloads.values() for payload in some.values()]
        return json_state.freeze((core, self._said, payloads), _CLASSES)

    def _restore(self, state: Any) -> None:
        core, self._said, payloads = json_state.thaw(state, _CLASSES)
        vars(self._core).update(core)
        for payload in payloads:
            self._keep(payload)
