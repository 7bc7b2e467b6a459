"""A worker's connection to the buffer: samples that it hands over and fetches, and how long it waits for other teams.

A busy team may take long, so a wait has no fixed limit. It ends when no other team has made progress for `deadline_s`.
Every worker reports its progress to the buffer every few seconds; waiting is no progress. If all teams wait for each
other, or the awaited one hangs, the error of every waiting worker lists where the others stand.

A call whose connection broke is repeated, and the buffer makes each change once. When the buffer dies, every call
raises.

Bytes are in the object store of the process that gave them, until no step needs them. If that process dies and its team
is restarted (`buffer.core.Core.restart_team`), the team gives them again, and readers wait for that.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeAlias
from weakref import WeakKeyDictionary

from megarl.disaggregated.buffer.core import GroupInfo, HandoverError
from megarl.disaggregated.buffer.progress import Ping, Progress
from megarl.system import tracing

if TYPE_CHECKING:
    from megarl.data.wire import Block, Span
    from megarl.disaggregated.buffer.flow import Finished, FlowGroup

_SLICE_S = 5.0  # longest call that waits, and time between two pings
_AGAIN_S = 0.5  # seconds between two attempts of a call


class BufferClient:
    """One worker's connection, made by `connect`. Every call blocks.

    Args:
        name: name of the buffer, for error messages.
        deadline_s: `cluster.timeout_s`.
        start: number of the team's restarts so far.

    Raises (every call):
        HandoverError: the call does not match the buffer's state, no reply came before the deadline, or the buffer is
            gone. The message names team, rank and phase.
    """

    def __init__(self, actor: Any, name: str, team: str, rank: int, deadline_s: float, start: int = 0) -> None:
        self._actor, self.name, self.team, self.rank, self._deadline_s = actor, name, team, rank, deadline_s
        self._start = start
        self._slice_s = min(_SLICE_S, deadline_s / 4)
        self._changing = threading.Lock()
        self._serial = 0  # number of this worker's last call that changes the state
        self._changes = 0
        self._waits_for = ""
        self._mailbox = Mailbox(actor, team, self._slice_s)
        tracing.on_change(self._moved)
        self._ping()
        threading.Thread(target=self._keep_pinging, name="buffer-ping", daemon=True).start()

    @classmethod
    def connect(cls, name: str, team: str, rank: int, deadline_s: float, start: int = 0) -> BufferClient:
        """Connect to the buffer that `start_buffer` started under this name; this process has initialised Ray. Raise
        HandoverError if Ray knows no such buffer, or it does not answer within `deadline_s`.
        """
        import ray

        from megarl.disaggregated.buffer.actor import NAMESPACE

        try:
            actor = ray.get_actor(name, namespace=NAMESPACE)
        except ValueError as error:
            raise HandoverError(f"team {team!r} rank {rank}: Ray has no buffer {name!r}: {error}") from error
        return cls(actor, name, team, rank, deadline_s, start)

    # -- mail --------------------------------------------------------------------------------------------------------

    def post(self, name: str, text: str) -> None:
        """Post a message (`megarl.dag.messages`) under a new name. Of `name/1`, `name/2`, ... the last few are kept. A
        message that a team posted before its restart stays.
        """
        self._change(f"post {name!r}", "post", name, text, self._start > 0)

    def arrive(self, name: str, text: str) -> None:
        """Note that this replica has arrived; when all replicas of its team have, the message is posted."""
        self._change(f"hear of {name!r}", "arrive", self.team, self.rank, name, text)

    def read(self, name: str) -> str:
        """Wait until a message is posted under a name, and return it. Any number of workers may read a message."""
        return self._wait(f"mail {name!r}", "read", self.team, name)

    def is_posted(self, name: str) -> bool:
        """Return whether a message is posted under a name now."""
        return bool(self._call(f"the buffer to look for mail {name!r}", "is_posted", name))

    def has_come(self, name: str) -> bool:
        """Return whether a message is posted under a name; cheap enough for a tight loop (`Mailbox`)."""
        return self._mailbox.has_come(name)

    # -- samples -----------------------------------------------------------------------------------------------------

    def give(self, step: int, key: str, groups: Sequence[GroupInfo], payloads: Iterable[Span]) -> int:
        """Hand over this replica's groups of one node in one call, and return the number of bytes.

        A replica without groups calls with none.

        Args:
            key: of the handover (`megarl.dag.placement.Handover.key`).
            payloads: one per group. Their blocks stay in this machine's object store; another machine pulls whole
                blocks.
        """
        refs, size = self._put_all(f"{key!r} of step {step}", payloads)
        what = f"hand over {key!r} of step {step}"
        self._change(what, "give", self.team, self.rank, step, key, list(groups), refs)
        return size

    def _put_all(self, what: str, payloads: Iterable[Span]) -> tuple[list[Piece], int]:
        """Put the blocks of payloads into this machine's object store; return the pieces and the number of bytes."""
        objects: WeakKeyDictionary[Block, Any] = WeakKeyDictionary()  # no block stays longer than its last payload
        pieces, size = [], 0
        for block, start, stop in payloads:
            if block not in objects:
                objects[block] = self._put(what, block)
                size += len(block)
            pieces.append((objects[block], start, stop))
        return pieces, size

    def _put(self, what: str, block: Block) -> Any:
        import ray

        # Ray copies the parts once into shared memory, where readers see them; bytes would be copied again by readers.
        try:
            return put_object(block)
        except ray.exceptions.RayError as error:
            whole = f"{len(block)} bytes of {what} do not fit into this machine's object store"
            full = "the store is full, and may not use the disk (placement.spill), or the disk is full, too"
            why = full if isinstance(error, ray.exceptions.OutOfDiskError) else error
            raise HandoverError(f"{self._who()}: {whole}: {why}") from error

    def assignment(self, step: int, samples: str, part: int) -> list[GroupInfo]:
        """Wait until all groups of the step are complete, and return those of replica `part` of this team, in order.

        Args:
            samples: the node that generated the samples.
        """
        return self._wait(f"the groups of {samples!r} in step {step}", "assignment", self.team, step, samples, part)

    def fetch(self, step: int, key: str, uids: Sequence[str]) -> list[Span]:
        """Wait until all replicas of the giver have sent these groups, and return their payloads, read-only. Without
        `uids` the result is the payload of one arbitrary group, which shows the fields.
        """
        import ray

        what = f"{key!r} of step {step}"
        lost: list[Piece] = []
        end = 0.0
        while True:
            refs = self._wait(what, "fetch", self.team, step, key, list(uids))
            with self._waiting(f"the bytes of {what}"), self._located(f"the bytes of {what}", self._deadline_s):
                try:
                    return payloads_of(refs, self._deadline_s)
                except ray.exceptions.ObjectLostError:  # the giver died; its team may be restarted
                    if refs != lost:
                        lost, end = refs, time.monotonic() + self._deadline_s
                    if time.monotonic() > end:
                        raise
                    time.sleep(_AGAIN_S)

    def done(self, step: int) -> None:
        """Note that this worker needs nothing more of `step`; its bytes are freed when all takers are done."""
        self._change(f"be done with step {step}", "done", self.team, self.rank, step)

    # -- samples that come as they get ready ---------------------------------------------------------------------------

    def open_flow(self, step: int, number: int, begun: Mapping[int, int], again: Sequence[int]) -> list[int]:
        """Open the flow of groups (`buffer.flow.Flow.open`); one worker of the rollout's team calls this."""
        return self._change("begin to hand out prompts", "open_flow", step, number, sorted(begun.items()), list(again))

    def swap(
        self,
        finished: Sequence[Finished],
        payloads: Mapping[str, Iterable[Span]],
        useless: Sequence[int],
        version: int,
        most: int,
    ) -> tuple[list[int], int]:
        """Hand over finished groups and admit other prompts in one call.

        Returns the numbers of the prompts to generate, and the number of bytes handed over.

        Args:
            finished: complete groups of admitted prompts.
            payloads: one per finished group, by key of handover, as in `give`.
            useless: admitted prompts whose samples no step will be trained on; others may begin in their place.
            version: of the weights that the newly admitted groups begin with.
            most: how many groups to admit. Fewer are admitted if more may not begin before a newer version.
        """
        refs, size, numbers = dict[str, list[Piece]](), 0, [*(group.number for group in finished), *useless]
        for key, spans in payloads.items():
            refs[key], nbytes = self._put_all(f"{key!r} of prompts {numbers[:4]}", spans)
            size += nbytes
        what = f"take prompts {numbers[:4]} back, and hand out up to {most}"
        arguments = (self.team, self.rank, list(finished), refs, list(useless), version, most)
        return self._change(what, "swap", *arguments), size

    def drained(self, version: int) -> bool:
        """Return whether no group is in flight, and none may be admitted with `version` of the weights."""
        return bool(self._call("the buffer to answer whether everything is generated", "drained", version))

    def flow_state(self) -> dict[str, Any]:
        """Return `Core.flow_state` of the buffer: the position in the prompts."""
        return self._call("the buffer to return the position in the prompts", "flow_state")

    def unused(self, step: int, part: int, parts: int) -> list[FlowGroup]:
        """Return one of `parts` shares of the finished groups that no step up to `step` uses; `refs` are payloads.
        Later steps stay in the buffer meanwhile: their takers finish them only after the checkpoint.
        """
        what = f"the groups of no step until {step}"
        unused: list[FlowGroup] = self._call(f"the buffer to list {what}", "unused", step)
        groups = [group for group in unused if group.number % parts == part]
        pieces = [piece for group in groups for piece in group.refs.values()]
        with self._waiting(f"the bytes of {what}"), self._located(f"the bytes of {what}", self._deadline_s):
            spans = iter(payloads_of(pieces, self._deadline_s))
        return [replace(group, refs={key: next(spans) for key in group.refs}) for group in groups]

    def queues(self) -> dict[str, int]:
        """Count groups that were given and not taken (`megarl.disaggregated.buffer.core.Core.queues`)."""
        return self._call("the buffer to count waiting groups", "queues")

    # -- calls and waits ---------------------------------------------------------------------------------------------

    def _change(self, what: str, method: str, *arguments: Any) -> Any:
        """Make a call that changes the buffer and waits for no other team, one at a time; it takes effect once."""
        with self._changing:
            self._serial += 1
            call = (self.team, self.rank, self._start, self._serial, method, list(arguments))
            return self._call(f"the buffer to {what}", "change", *call)

    def _ping(self) -> None:
        ping = Ping(self._changes, tracing.current(), tracing.step_now, self._waits_for)
        self._call("the buffer to answer", "ping", self.team, self.rank, ping)

    def _call(self, what: str, method: str, *arguments: Any, waits_s: float = 0.0) -> Any:
        """Return the buffer's answer, which may take `waits_s`. A call whose connection broke is repeated."""
        import ray

        limit_s = waits_s + self._deadline_s
        end = time.monotonic() + limit_s
        with self._located(what, limit_s):
            while True:
                try:
                    answer = getattr(self._actor, method).remote(*arguments)
                    return ray.get(answer, timeout=max(0.0, end - time.monotonic()))
                except ray.exceptions.ActorUnavailableError:
                    if time.monotonic() > end:
                        raise
                time.sleep(_AGAIN_S)

    def _wait(self, what: str, method: str, *arguments: Any) -> Any:
        """Repeat a call until it has a result, or until no other team has made progress for the deadline. The wait is
        two slices longer than the deadline, so that the launcher notices a hanging team first and can restart it.
        """
        start = time.monotonic()
        with self._waiting(what):
            while True:
                answer, others = self._call(what, method, *arguments, self._slice_s, waits_s=self._slice_s)
                if answer is not None:
                    return answer
                waited = time.monotonic() - start
                if min([waited, *(other.silent_s for other in others)]) > self._deadline_s + 2 * self._slice_s:
                    raise HandoverError(self._too_late(what, waited, others))

    @contextmanager
    def _located(self, what: str, limit_s: float) -> Iterator[None]:
        """Add this worker and what it waits for to errors raised in the block."""
        import ray

        whom = f"the buffer {self.name!r}"
        try:
            yield
        except ray.exceptions.RayTaskError as error:
            if isinstance(error.cause, HandoverError):
                raise HandoverError(f"{self._who()}: {error.cause}") from None
            raise
        except ray.exceptions.GetTimeoutError as error:
            raise HandoverError(
                f"{self._who()} timed out waiting for {what}: {whom} did not reply for {limit_s:g} s "
                "(cluster.timeout_s)"
            ) from error
        except ray.exceptions.RayActorError as error:
            raise HandoverError(f"{self._who()}, waiting for {what}: {whom} is gone: {error}") from error
        except ray.exceptions.RayError as error:
            raise HandoverError(f"{self._who()}: {what} is not available: {error}") from error

    def _too_late(self, what: str, waited: float, others: Sequence[Progress]) -> str:
        lines = "".join(f"\n  {other}" for other in others)
        return (
            f"{self._who()} timed out waiting for {what} after {waited:.0f} s: no other team has made progress for "
            f"{self._deadline_s:g} s (cluster.timeout_s){lines}"
        )

    def _who(self) -> str:
        return f"team {self.team!r} rank {self.rank} in phase {tracing.current()}"

    # -- progress ----------------------------------------------------------------------------------------------------

    @contextmanager
    def _waiting(self, what: str) -> Iterator[None]:
        """Keep the heartbeat going, since this wait has its own deadline; other teams do not see it as progress."""
        before, self._waits_for = self._waits_for, what
        try:
            with tracing.keep_beating(limit_s=math.inf, every_s=self._slice_s):
                yield
        finally:
            self._waits_for = before

    def _moved(self, path: str) -> None:
        if not self._waits_for:
            self._changes += 1

    def _keep_pinging(self) -> None:
        import ray

        while True:
            time.sleep(self._slice_s)
            try:
                self._ping()
            except HandoverError as error:  # raised again by the next call of another thread
                if not isinstance(error.__cause__, ray.exceptions.GetTimeoutError):
                    return


class Mailbox:
    """Watches for a message under one name at a time.

    Args:
        slice_s: seconds after which a call returns without a message.
    """

    def __init__(self, actor: Any, team: str, slice_s: float) -> None:
        self._actor, self._team, self._slice_s = actor, team, slice_s
        self._name, self._call = "", None

    def has_come(self, name: str) -> bool:
        """Return whether a message has arrived under this name, by the buffer's last reply."""
        import ray

        if self._call is None or self._name != name:
            self._name, self._call = name, self._actor.read.remote(self._team, name, self._slice_s)
        if not ray.wait([self._call], timeout=0)[0]:
            return False
        call, self._call = self._call, None
        try:
            mail, _ = ray.get(call)
        except (ray.exceptions.ActorUnavailableError, ray.exceptions.ActorDiedError):
            return False  # raised by the worker's next other call
        return mail is not None


#: A payload in the object store: the object with its block, and the first and last position of its samples there.
Piece: TypeAlias = tuple[Any, int, int]
_FREED_S = 7.0  # seconds until Ray has freed the memory of blocks that no step needs any more


def payloads_of(pieces: Sequence[Piece], limit_s: float) -> list[Span]:
    """Wait until the objects of these pieces are on this machine, and return their payloads."""
    import ray

    from megarl.data.wire import Span

    objects = list(dict.fromkeys(ref for ref, _, _ in pieces))
    blocks = dict(zip(objects, ray.get(objects, timeout=limit_s), strict=True))
    return [Span(blocks[ref], start, stop) for ref, start, stop in pieces]


def put_object(block: Block) -> Any:
    """Put `block` into this machine's object store; wait for room, since used blocks are freed seconds later."""
    import ray

    end = time.monotonic() + _FREED_S
    while True:
        try:
            return ray.put(block)
        except (ray.exceptions.ObjectStoreFullError, ray.exceptions.OutOfDiskError):
            if time.monotonic() > end:
                raise
            time.sleep(0.1)
