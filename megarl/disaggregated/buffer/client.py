"""A worker's connection to the buffer: it hands over and fetches samples, posts and reads messages, and waits for them.

A busy team may take long, so a wait has no fixed limit. It ends when no other team has made progress for `deadline_s`.
The first worker of each team reports the progress of all its workers to the buffer every few seconds; waiting is not
progress. If all teams wait for each other, or the awaited team hangs, the error of every waiting worker lists the
progress of the others.

A call whose connection broke is repeated, and the buffer makes each change once. When the buffer dies, every call
raises.

Bytes are in the object store of the process that gave them, until no step needs them. If this process dies and its team
is restarted (`buffer.core.Core.restart_team`), the team gives the bytes again, and readers wait until then.
"""

from __future__ import annotations

import math
import threading
import time
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeAlias
from weakref import WeakKeyDictionary

from megarl.disaggregated.buffer.core import RUN_AGAIN, GroupInfo, HandoverError, Topic
from megarl.disaggregated.buffer.progress import Ping
from megarl.disaggregated.buffer.team_progress import TeamProgress
from megarl.system import tracing
from megarl.system.errors import WorkerError

if TYPE_CHECKING:
    from megarl.data.wire import Block, Span
    from megarl.disaggregated.buffer.flow import Finished, FlowGroup
    from megarl.system.comm import WorkerGroup
    from megarl.system.store import SharedStore

_SLICE_S = 5.0  # usual seconds of the longest call that waits, and between two pings
_AGAIN_S = 0.5  # seconds between two attempts of a call
_PASSED_ON = 256  # how many messages stay in the team's store; older ones are deleted
_CALLS_S = 50  # waiting calls per second of a whole team; each call of a larger team waits longer, up to a limit


class BufferClient:
    """One worker's connection to the buffer, made by `connect`. Every call blocks.

    Args:
        name: name of the buffer, for error messages.
        deadline_s: `cluster.timeout_s`.
        start: number of the team's restarts so far.

    Raises:
        HandoverError: (every call) the call does not match the buffer's state, no reply came before the deadline, or
            the buffer is gone. The message names team, rank and phase.
    """

    def __init__(self, actor: Any, name: str, team: str, rank: int, deadline_s: float, start: int = 0) -> None:
        self._actor, self.name, self.team, self.rank, self._deadline_s = actor, name, team, rank, deadline_s
        self._start = start
        self._slice_s = self._every_s = min(_SLICE_S, deadline_s / 4)
        self._changing = threading.Lock()
        self._serial = 0  # number of this worker's last call that changes the state
        self._changes = 0
        self._waits_for = ""
        self._together: TeamProgress | None = None
        self._store: SharedStore | None = None  # store of the team's world; None before `join_team`
        self._size = 1
        self._passed_on: deque[str] = deque()
        self._awaited, self._awaiting = "", None  # name of the message that `has_arrived` awaits, and the call for it
        tracing.on_change(self._moved)
        self._ping()
        threading.Thread(target=self._keep_pinging, name="buffer-ping", daemon=True).start()

    @classmethod
    def connect(cls, name: str, team: str, rank: int, deadline_s: float, start: int = 0) -> BufferClient:
        """Connect to the buffer that `start_buffer` started under this name; this process has initialised Ray.

        Raises:
            HandoverError: Ray has no buffer of this name, or it does not answer within `deadline_s`.
        """
        import ray

        from megarl.disaggregated.buffer.actor import NAMESPACE

        try:
            actor = ray.get_actor(name, namespace=NAMESPACE)
        except ValueError as error:
            raise HandoverError(f"team {team!r} rank {rank}: Ray has no buffer {name!r}: {error}{RUN_AGAIN}") from error
        return cls(actor, name, team, rank, deadline_s, start)

    def join_team(self, world: WorkerGroup) -> None:
        """From now on, let the first worker of the team report the progress of all workers to the buffer, and share
        messages and reports through the team's store; `world`: all workers of the team."""
        if world.size > 1:
            self._slice_s = min(max(self._slice_s, world.size / _CALLS_S), self._deadline_s / 4)
            self._store, self._size = world.store(), world.size
            self._together = TeamProgress(self._store, world.rank, world.size)

    # -- mail --------------------------------------------------------------------------------------------------------

    def post(self, name: str, text: str) -> None:
        """Post a message (`megarl.dag.messages`) under a new name; see `Core.post`."""
        self._change(f"post {name!r}", "post", name, text, self._start > 0)

    def arrive(self, name: str, text: str) -> None:
        """Report that this replica is ready to post a message; it is posted once all replicas of its team are ready."""
        self._change(f"record the arrival at {name!r}", "arrive", self.team, self.rank, name, text)

    def read(self, name: str) -> str:
        """Wait until a message is posted under a name, and return it. Any number of workers may read a message."""
        return self._wait(f"mail {name!r}", ("mail", name), "read", name)

    def read_together(self, name: str) -> str:
        """Wait for a message that every worker of the team reads, and return it.

        The first worker reads the message from the buffer, and writes it to the team's store for the others. A worker
        that waits longer than the deadline calls the buffer itself, because the buffer's error names the team that
        makes no progress.
        """
        if self._store is None:
            return self.read(name)
        if self.rank == 0:
            text = self.read(name)
            self._store.set(f"mail/{name}", text)
            self._passed_on.append(name)
            if len(self._passed_on) > _PASSED_ON:
                self._store.delete(f"mail/{self._passed_on.popleft()}")
            return text
        end = time.monotonic() + self._deadline_s
        with self._waiting(f"mail {name!r} from the first worker of the team"):
            while time.monotonic() < end:
                if self._store.has(f"mail/{name}", self._every_s):
                    return self._store.get(f"mail/{name}").decode()
        return self.read(name)

    def is_posted(self, name: str) -> bool:
        """Return whether a message is posted under a name now."""
        return bool(self._query(f"look for mail {name!r}", "is_posted", name))

    def has_arrived(self, name: str) -> bool:
        """Return whether a message is posted under a name, according to the buffer's last reply.

        It never waits, so it is cheap enough for a tight loop. A call for the message is always pending in the buffer.
        """
        import ray

        if self._awaiting is None or self._awaited != name:
            call = self._actor.wait.remote(self.team, ("mail", name), "read", [name], self._slice_s)
            self._awaited, self._awaiting = name, call
        if not ray.wait([self._awaiting], timeout=0)[0]:
            return False
        call, self._awaiting = self._awaiting, None
        try:
            mail, _ = ray.get(call)
        except (ray.exceptions.ActorUnavailableError, ray.exceptions.ActorDiedError):
            return False  # the worker's next call of any other method raises the error
        return mail is not None

    # -- samples -----------------------------------------------------------------------------------------------------

    def give(self, step: int, key: str, groups: Sequence[GroupInfo], payloads: Iterable[Span]) -> int:
        """Hand over this replica's groups of one node in one call, and return the number of bytes.

        A replica without groups calls it with empty lists.

        Args:
            key: key of the handover (`megarl.dag.placement.Handover.key`).
            payloads: one per group. Their blocks stay in this machine's object store; another machine pulls whole
                blocks.
        """
        handed = f"{key!r} of step {step}"
        refs, size = self._put_all(handed, payloads)
        self._change(f"record the handover {handed}", "give", self.team, self.rank, step, key, list(groups), refs)
        return size

    def _put_all(self, samples: str, payloads: Iterable[Span]) -> tuple[list[Piece], int]:
        """Put the blocks of payloads into this machine's object store; return the pieces and the number of bytes."""
        import ray

        # weak keys: nothing here keeps a block in memory after its last payload
        objects: WeakKeyDictionary[Block, Any] = WeakKeyDictionary()
        pieces, size = [], 0
        for block, start, stop in payloads:
            if block not in objects:
                # Ray copies the parts of a block once into shared memory, where readers map them; bytes would be copied
                # again.
                try:
                    objects[block] = put_object(block)
                except ray.exceptions.RayError as error:
                    payload = f"{self._caller()}: {len(block)} bytes of {samples}"
                    if not isinstance(error, ray.exceptions.OutOfDiskError | ray.exceptions.ObjectStoreFullError):
                        problem = f"{payload} cannot be put into this machine's object store: {error}{RUN_AGAIN}"
                        raise HandoverError(problem) from error
                    raise HandoverError(
                        f"{payload} do not fit into this machine's object store: it is full, and may not use the disk "
                        "(set placement.spill=true), or the disk is full, too\n  fix:     lower data.batch_size or "
                        "rollout.sampling.n, or start Ray's nodes with a larger --object-store-memory"
                    ) from error
                size += len(block)
            pieces.append((objects[block], start, stop))
        return pieces, size

    def assignment(self, step: int, samples: str, part: int) -> list[GroupInfo]:
        """Wait until all groups of the step are complete, and return those of replica `part` of this team, in order.

        Args:
            samples: the node that generated the samples.
        """
        groups, topic = f"the groups of {samples!r} in step {step}", ("samples", step, samples)
        return self._wait(groups, topic, "assignment", self.team, step, samples, part)

    def fetch(self, step: int, key: str, uids: Sequence[str]) -> list[Span]:
        """Wait until all replicas of the sending team have handed over these groups; return read-only payloads.

        Without `uids` the result is the payload of one arbitrary group, which shows the fields.
        """
        import ray

        groups = f"{key!r} of step {step}"
        lost: list[Piece] = []
        end = 0.0
        while True:
            refs = self._wait(groups, ("handover", step, key), "fetch", self.team, step, key, list(uids))
            with self._waiting(f"the bytes of {groups}"), self._located(f"the bytes of {groups}", self._deadline_s):
                try:
                    return payloads_of(refs, self._deadline_s)
                # The process that sent the samples, or its machine, may have died; its team may be restarted.
                except ray.exceptions.ObjectLostError:
                    if refs != lost:
                        lost, end = refs, time.monotonic() + self._deadline_s
                    if time.monotonic() > end:
                        raise
                    time.sleep(_AGAIN_S)

    def done(self, step: int) -> None:
        """Report that this worker needs no more samples of `step`, which the buffer frees when all workers that read
        the step have reported this. The last worker of a team to do so reports it for the whole team."""
        if self._store is None:
            self._change(f"record that step {step} is done", "done", self.team, self.rank, step)
        elif self._store.add(f"done/{step}", 1) == self._size:
            self._store.delete(f"done/{step}")
            self._change(f"record that step {step} is done", "done", self.team, None, step)

    # -- groups that are handed over when they are finished ------------------------------------------------------------

    def open_flow(self, step: int, number: int, begun: Mapping[int, int], again: Sequence[int]) -> list[int]:
        """Open the flow of groups (`buffer.flow.Flow.open`); one worker of the rollout's team calls this."""
        return self._change("begin to assign prompts", "open_flow", step, number, sorted(begun.items()), list(again))

    def swap(
        self,
        finished: Sequence[Finished],
        payloads: Mapping[str, Iterable[Span]],
        rejected: Sequence[int],
        version: int,
        most: int,
    ) -> tuple[list[int], int]:
        """Hand over finished groups and admit new ones in one call; see `Core.swap`.

        Args:
            payloads: one per finished group, by key of handover, as in `give`.

        Returns:
            The numbers of the prompts to generate, and the number of bytes handed over.
        """
        refs, size, numbers = dict[str, list[Piece]](), 0, [*(group.number for group in finished), *rejected]
        for key, spans in payloads.items():
            refs[key], nbytes = self._put_all(f"{key!r} of prompts {numbers[:4]}", spans)
            size += nbytes
        action = f"accept the groups of prompts {numbers[:4]}, and assign up to {most} prompts"
        arguments = (self.team, self.rank, list(finished), refs, list(rejected), version, most)
        return self._change(action, "swap", *arguments), size

    def drained(self, version: int) -> bool:
        """Return whether no group is in flight, and none may be admitted with `version` of the weights."""
        return bool(self._query("return whether all groups are generated", "drained", version))

    def flow_state(self) -> dict[str, Any]:
        """Return the position in the sequence of prompts; see `Core.flow_state`."""
        return self._query("return the position in the prompts", "flow_state")

    def unused(self, step: int, part: int, parts: int) -> list[FlowGroup]:
        """Return the finished groups that no step up to `step` uses and whose number is `part` modulo `parts`; their
        `refs` hold the samples themselves in place of references.

        The groups stay in the buffer during this call, because the teams that take them finish later steps only after
        the checkpoint.
        """
        unused: list[FlowGroup] = self._query(f"list the groups that no step up to {step} uses", "unused", step)
        groups = [group for group in unused if group.number % parts == part]
        pieces = [piece for group in groups for piece in group.refs.values()]
        wanted = f"the bytes of groups that no step up to {step} uses"
        with self._waiting(wanted), self._located(wanted, self._deadline_s):
            spans = iter(payloads_of(pieces, self._deadline_s))
        return [replace(group, refs={key: next(spans) for key in group.refs}) for group in groups]

    def queues(self) -> dict[str, int]:
        """Count the groups that wait for each team (`megarl.disaggregated.buffer.core.Core.queues`)."""
        return self._query("count waiting groups", "queues")

    # -- calls and waits ---------------------------------------------------------------------------------------------

    def _change(self, action: str, method: str, *arguments: Any) -> Any:
        """Make a call that changes the buffer, one at a time; it takes effect once, even if it is repeated."""
        with self._changing:
            self._serial += 1
            call = (self.team, self.rank, self._start, self._serial, method, list(arguments))
            return self._call(f"the buffer to {action}", "change", *call)

    def _query(self, action: str, method: str, *arguments: Any) -> Any:
        """Make a call that changes nothing and waits for no other team."""
        return self._call(f"the buffer to {action}", "query", method, list(arguments))

    def _ping(self) -> None:
        ping, team = Ping(self._changes, tracing.current(), tracing.step_now, self._waits_for), self._together
        pings = {self.rank: ping}
        if team is not None:
            team.write(ping)
            if self.rank:
                return
            pings = team.news()
        self._call("the buffer to answer", "ping", self.team, pings)

    def _call(self, awaited: str, method: str, *arguments: Any, waits_s: float = 0.0) -> Any:
        """Return the buffer's answer, which may take `waits_s`; repeat the call if its connection breaks."""
        import ray

        limit_s = waits_s + self._deadline_s
        end = time.monotonic() + limit_s
        with self._located(awaited, limit_s):
            while True:
                try:
                    answer = getattr(self._actor, method).remote(*arguments)
                    return ray.get(answer, timeout=max(0.0, end - time.monotonic()))
                except ray.exceptions.ActorUnavailableError:
                    if time.monotonic() > end:
                        raise
                time.sleep(_AGAIN_S)

    def _wait(self, awaited: str, topic: Topic, method: str, *arguments: Any) -> Any:
        """Repeat a call until it has a result, or until no other team has made progress for the deadline.

        The wait takes the time of two calls longer than the deadline, so that the launcher detects a hanging team first
        and can restart it.
        """
        start = time.monotonic()
        call = (self.team, topic, method, list(arguments), self._slice_s)
        with self._waiting(awaited):
            while True:
                answer, others = self._call(awaited, "wait", *call, waits_s=self._slice_s)
                if answer is not None:
                    return answer
                waited = time.monotonic() - start
                if min([waited, *(other.silent_s for other in others)]) > self._deadline_s + 2 * self._slice_s:
                    raise HandoverError(
                        f"{self._caller()} timed out waiting for {awaited} after {waited:.0f} s: no other team has "
                        f"made progress for {self._deadline_s:g} s (cluster.timeout_s)"
                        + "".join(f"\n  {other}" for other in others)
                        + "\n  fix:     raise cluster.timeout_s if another team only works longer than that; otherwise "
                        "see the logs of its workers"
                    )

    @contextmanager
    def _located(self, awaited: str, limit_s: float) -> Iterator[None]:
        """Name this worker, and the `awaited` reply or data, in errors raised in the block."""
        import ray

        buffer = f"the buffer {self.name!r}"
        try:
            yield
        except ray.exceptions.RayTaskError as error:
            if isinstance(error.cause, HandoverError):
                raise HandoverError(
                    f"{self._caller()}, waiting for {awaited}: {buffer} rejected the request: {error.cause}"
                ) from None
            raise
        except ray.exceptions.GetTimeoutError as error:
            raise HandoverError(
                f"{self._caller()} timed out waiting for {awaited}: {buffer} did not reply for {limit_s:g} s "
                f"(cluster.timeout_s); raise the limit if its machine is only slow or busy{RUN_AGAIN}"
            ) from error
        except ray.exceptions.RayActorError as error:
            raise HandoverError(
                f"{self._caller()}, waiting for {awaited}: {buffer} is gone: {error}{RUN_AGAIN}"
            ) from error
        except ray.exceptions.RayError as error:
            raise HandoverError(
                f"{self._caller()}, waiting for {awaited}: Ray raised {type(error).__name__}: {error}{RUN_AGAIN}"
            ) from error

    def _caller(self) -> str:
        return f"team {self.team!r} rank {self.rank} in phase {tracing.current()}"

    # -- progress ----------------------------------------------------------------------------------------------------

    @contextmanager
    def _waiting(self, awaited: str) -> Iterator[None]:
        """Send heartbeats to the launcher inside the block, which waits for `awaited` with a deadline of its own. Other
        teams do not count them as progress."""
        before, self._waits_for = self._waits_for, awaited
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
            time.sleep(self._every_s)
            try:
                self._ping()
            except WorkerError:  # the team's store is gone, as its first worker has ended
                return
            except HandoverError as error:  # not raised here: the next call of the worker's own thread raises it too
                if not isinstance(error.__cause__, ray.exceptions.GetTimeoutError):
                    return


#: A payload in the object store: the object with its block, and where its samples start and stop there.
Piece: TypeAlias = tuple[Any, int, int]
_FREED_S = 7.0  # seconds that Ray may take to free the memory of blocks that no step needs any more


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
