"""A worker's way to the store: what it gives, what it waits for, and how long.

Another team may rightly be busy for long, so a wait does not end after a fixed time. It ends when no other team has
made progress for `deadline_s`. Every worker tells the store every few seconds how far it is, and waiting in the store
is no progress; so when all wait for each other, or the one that is waited for hangs, everybody learns where the others
stand.

The store may die and begin again. It knows what it was told (`buffer.durable`), so a call that it did not answer
is made again, with the same number where it changes something. What it does not know are references to bytes. This
worker keeps those of what it gave until the store needs them no more, and gives them again when the store asks.

Bytes go with the process that gave them. If its team starts again (`buffer.core.Core.restart_team`), it gives
them again; who has not fetched them by then waits for that, as for any other team that is busy.
"""

from __future__ import annotations

import json
import math
import threading
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeAlias
from weakref import WeakKeyDictionary

from megarl import tracing
from megarl.disaggregated.buffer.core import GroupInfo, StoreError
from megarl.disaggregated.buffer.progress import Ping, Progress

if TYPE_CHECKING:
    from megarl.data.wire import Block, Span
    from megarl.disaggregated.buffer.flow import Finished, FlowGroup
    from megarl.disaggregated.buffer.journal import Ack


_SLICE_S = 5.0  # of a wait, and between two words of a worker
_AGAIN_S = 0.5  # between two tries to reach a store that died


class StoreClient:
    """One worker's connection; made by `connect`. Every call blocks.

    Args:
        name: of the store, for messages.
        deadline_s: `cluster.timeout_s`.
        start: how often this team has begun again.

    Raises (every call):
        StoreError: the call does not fit what is in the store, it waited until the deadline, or the store is gone. The
            message names team, rank and phase.
    """

    def __init__(self, actor: Any, name: str, team: str, rank: int, deadline_s: float, start: int = 0) -> None:
        self._actor, self.name, self.team, self.rank, self._deadline_s = actor, name, team, rank, deadline_s
        self._start = start
        self._slice_s = min(_SLICE_S, deadline_s / 4)
        self._changing, self._keeping = threading.Lock(), threading.Lock()
        self._given: dict[int, list[Any]] = {}  # references, by the number of the call
        self._changes = 0
        self._waits_for = ""
        self._mailbox = Mailbox(actor, team, self._slice_s)
        tracing.on_change(self._moved)
        self._serial = self._ping().heard  # of the last call that changes something; another process may have made it
        threading.Thread(target=self._keep_telling, name="store-ping", daemon=True).start()

    @classmethod
    def connect(cls, name: str, team: str, rank: int, deadline_s: float, start: int = 0) -> StoreClient:
        """Connect to the store that `start_store` started under this name; this process has initialised Ray.

        Raises:
            StoreError: there is no such store, or it does not answer within `deadline_s`.
        """
        import ray

        from megarl.disaggregated.buffer.actor import NAMESPACE

        try:
            actor = ray.get_actor(name, namespace=NAMESPACE)
        except ValueError as error:
            raise StoreError(f"team {team!r} rank {rank}: Ray knows no store {name!r}: {error}") from error
        return cls(actor, name, team, rank, deadline_s, start)

    # -- mail --------------------------------------------------------------------------------------------------------

    def post(self, name: str, value: Any) -> None:
        """Leave a JSON value under a new name. Of `name/1`, `name/2`, ... only the last few are kept.

        What a team posted before it began again stays as it was.
        """
        self._change(f"post {name!r}", "post", name, json.dumps(value), self._start > 0)

    def arrive(self, name: str) -> None:
        """This replica has come so far; once all of its team have, there is mail under this name."""
        self._change(f"hear of {name!r}", "arrive", self.team, self.rank, name)

    def read(self, name: str) -> Any:
        """Wait until somebody has posted a value under a name, and return it; any number of workers may read it."""
        (text,) = self._wait(f"mail {name!r}", "read", self.team, name)
        return json.loads(text)

    def peek(self, name: str) -> Any:
        """Return the value under a name, or None where nobody has posted it."""
        found = self._call(f"the store to look for mail {name!r}", "peek", name)
        return None if found is None else json.loads(found[0])

    def has_come(self, name: str) -> bool:
        """Say whether somebody has posted this; cheap enough to be asked all the time (`Mailbox`)."""
        return self._mailbox.has_come(name)

    # -- samples -----------------------------------------------------------------------------------------------------

    def give(self, step: int, key: str, groups: Sequence[GroupInfo], payloads: Iterable[Span]) -> int:
        """Hand over this replica's groups of one node, all at once, and return the bytes of all blocks.

        A replica that has none gives none.

        Args:
            key: of the handover (`megarl.dag.placement.Handover.key`).
            payloads: of each group: what `fetch` returns. Their blocks stay in this machine's object store; another
                machine pulls a block whole.
        """
        refs, size = self._keep(f"{key!r} of step {step}", payloads)
        what = f"hand over {key!r} of step {step}"
        self._change(what, "give", self.team, self.rank, step, key, list(groups), refs=refs)
        return size

    def _keep(self, what: str, payloads: Iterable[Span]) -> tuple[list[Piece], int]:
        """Of each payload the object in this machine's store that is its block; and the bytes of all blocks."""
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

        # Ray copies parts once into shared memory, where readers see them; bytes it would copy again to read.
        try:
            return put_object(block)
        except ray.exceptions.RayError as error:
            whole = f"{len(block)} bytes of {what} do not go into this machine's object store"
            full = "it is full, and may not use the disk (placement.spill), or that is full, too"
            why = full if isinstance(error, ray.exceptions.OutOfDiskError) else error
            raise StoreError(f"{self._who()}: {whole}: {why}") from error

    def assignment(self, step: int, samples: str, part: int) -> list[GroupInfo]:
        """Wait until all groups of the step are there, and return those of part `part` of this team, in order.

        Args:
            samples: the node that made the samples.
        """
        return self._wait(f"the groups of {samples!r} in step {step}", "assignment", self.team, step, samples, part)

    def fetch(self, step: int, key: str, uids: Sequence[str]) -> list[Span]:
        """Wait until all replicas of the giver have sent these groups, and return their payloads, read-only.

        Without `uids` it is the payload of any one group, which tells what the fields are.
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
                except ray.exceptions.ObjectLostError:  # with their giver, which may start again
                    if refs != lost:
                        lost, end = refs, time.monotonic() + self._deadline_s
                    if time.monotonic() > end:
                        raise
                    time.sleep(_AGAIN_S)

    def done(self, step: int) -> None:
        """This worker needs nothing more of `step`; what all workers of all takers are done with is freed."""
        self._change(f"be done with step {step}", "done", self.team, self.rank, step)

    # -- samples that come as they get ready ---------------------------------------------------------------------------

    def open_flow(self, step: int, number: int, begun: Mapping[int, int], again: Sequence[int]) -> list[int]:
        """Begin to hand out prompts, see `buffer.flow.Flow.open`; one worker of the rollout's team calls."""
        return self._change("begin to hand out prompts", "open_flow", step, number, sorted(begun.items()), list(again))

    def swap(
        self,
        finished: Sequence[Finished],
        payloads: Mapping[str, Iterable[Span]],
        useless: Sequence[int],
        version: int,
        most: int,
    ) -> tuple[list[int], int]:
        """Hand over finished groups, each of which is in some later step, and take other prompts, in one call.

        Returns the numbers of the prompts to generate, and the bytes of all blocks.

        Args:
            finished: groups of prompts that were taken before.
            payloads: of each of them, by key of handover, as in `give`.
            useless: prompts taken before, whose samples no step is to be trained on; others may begin in their place.
            version: of the weights that the next ones are generated with.
            most: of them. Fewer are handed out where no more may begin before there is a newer version.
        """
        refs, size, numbers = list[Any](), 0, [*(one.number for one in finished), *useless]
        for key, some in payloads.items():
            more, nbytes = self._keep(f"{key!r} of prompts {numbers[:4]}", some)
            refs, size = refs + more, size + nbytes
        what = f"take prompts {numbers[:4]} back, and hand out up to {most}"
        where, rest = (self.team, self.rank), (list(payloads), list(useless), version, most)
        return self._change(what, "swap", *where, list(finished), *rest, refs=refs), size

    def drained(self, version: int) -> bool:
        """Say whether nothing is generated before there are newer weights, see `buffer.flow.Flow.drained`."""
        return bool(self._call("the store to say whether all is generated", "drained", version))

    def flow_state(self) -> dict[str, Any]:
        """See `megarl.disaggregated.buffer.core.Core.flow_state`."""
        return self._call("the store to say where prompts stand", "flow_state")

    def unused(self, step: int, part: int, parts: int) -> list[FlowGroup]:
        """Finished groups that no step until `step` is of, with payloads as their `refs`: one of `parts` shares.

        Whoever would be done with the steps after it waits for a checkpoint meanwhile.
        """
        what = f"the groups of no step until {step}"
        found: list[FlowGroup] = self._wait(what, "unused", self.team, step)
        groups = [group for group in found if group.number % parts == part]
        pieces = [piece for group in groups for piece in group.refs.values()]
        with self._waiting(f"the bytes of {what}"), self._located(f"the bytes of {what}", self._deadline_s):
            spans = iter(payloads_of(pieces, self._deadline_s))
        return [replace(group, refs={key: next(spans) for key in group.refs}) for group in groups]

    def queues(self) -> dict[str, int]:
        """Groups that have been given and not been taken, see `megarl.disaggregated.buffer.core.Core.queues`."""
        return self._call("the store to say what waits", "queues")

    # -- calls and waits ---------------------------------------------------------------------------------------------

    def _change(self, what: str, method: str, *arguments: Any, refs: Sequence[Any] = ()) -> Any:
        """Call what changes something and waits for no other team, one call at a time; it takes effect once."""
        call = json.dumps([method, *arguments], separators=(",", ":"))
        with self._changing:
            self._serial += 1
            if refs:
                with self._keeping:
                    self._given[self._serial] = list(refs)
            number = (self.team, self.rank, self._serial)
            ack, answer = self._call(f"the store to {what}", "change", *number, call, list(refs), self._start)
        self._heed(ack)
        return answer

    def _ping(self) -> Ack:
        mine = Ping(self._changes, tracing.current(), tracing.step_now, self._waits_for)
        return self._call("the store to answer", "ping", self.team, self.rank, mine)

    def _heed(self, ack: Ack) -> None:
        """Let go of bytes that nobody needs, and give again what the store lacks."""
        with self._keeping:
            told, held = ack.gone if ack.held is None else list(self._given), frozenset(ack.held or ())
            gone = [one for one in told if one in self._given and one <= ack.heard and one not in held]
            for serial in gone:
                del self._given[serial]
            again = {serial: self._given[serial] for serial in ack.lacking if serial in self._given}
        if again:
            what = "the store to take references again"
            self._call(what, "give_again", self.team, self.rank, list(again), list(again.values()))

    def _call(self, what: str, method: str, *arguments: Any, waits_s: float = 0.0) -> Any:
        """Return the store's answer, which takes it `waits_s`. One that dies is asked again, if Ray restarts it."""
        import ray

        limit_s, dead = waits_s + self._deadline_s, False
        end = time.monotonic() + limit_s
        with self._located(what, limit_s):
            while True:
                try:
                    answer = getattr(self._actor, method).remote(*arguments)
                    return ray.get(answer, timeout=max(0.0, end - time.monotonic()))
                except ray.exceptions.ActorUnavailableError:
                    if time.monotonic() > end:
                        raise
                    dead = False
                except ray.exceptions.ActorDiedError:  # during this call, or before it and for good
                    if dead:
                        raise
                    dead = True
                time.sleep(_AGAIN_S)

    def _wait(self, what: str, method: str, *arguments: Any) -> Any:
        """Ask again and again, until there is an answer or no other team has moved for the deadline.

        A little longer: its launcher notices then that another one hangs, and may start it again.
        """
        start = time.monotonic()
        with self._waiting(what):
            while True:
                found, others = self._call(what, method, *arguments, self._slice_s, waits_s=self._slice_s)
                if found is not None:
                    return found
                waited = time.monotonic() - start
                if min([waited, *(other.silent_s for other in others)]) > self._deadline_s + 2 * self._slice_s:
                    raise StoreError(self._too_late(what, waited, others))

    @contextmanager
    def _located(self, what: str, limit_s: float) -> Iterator[None]:
        """Errors of a call name this worker, and what it waits for."""
        import ray

        whom = f"the store {self.name!r}"
        try:
            yield
        except ray.exceptions.RayTaskError as error:
            if isinstance(error.cause, StoreError):
                raise StoreError(f"{self._who()}: {error.cause}") from None
            raise
        except ray.exceptions.GetTimeoutError as error:
            raise StoreError(
                f"{self._who()} timed out waiting for {what}: {whom} has not answered for {limit_s:g} s "
                "(cluster.timeout_s)"
            ) from error
        except ray.exceptions.RayActorError as error:
            raise StoreError(f"{self._who()}, waiting for {what}: {whom} is gone: {error}") from error
        except ray.exceptions.RayError as error:
            raise StoreError(f"{self._who()}: {what} cannot be had: {error}") from error

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
        """This worker's own deadline is here, so to its launcher it is alive; to other teams it stands still."""
        before, self._waits_for = self._waits_for, what
        try:
            with tracing.keep_beating(limit_s=math.inf, every_s=self._slice_s):
                yield
        finally:
            self._waits_for = before

    def _moved(self, path: str) -> None:
        if not self._waits_for:
            self._changes += 1

    def _keep_telling(self) -> None:
        import ray

        while True:
            time.sleep(self._slice_s)
            try:
                self._heed(self._ping())
            except StoreError as error:  # whoever waits for it says so
                if not isinstance(error.__cause__, ray.exceptions.GetTimeoutError):
                    return


class Mailbox:
    """A worker's look-out for mail, under one name at a time.

    Args:
        slice_s: seconds after which a call comes back without mail.
    """

    def __init__(self, actor: Any, team: str, slice_s: float) -> None:
        self._actor, self._team, self._slice_s = actor, team, slice_s
        self._name, self._call = "", None

    def has_come(self, name: str) -> bool:
        """Say whether there is mail under this name, as far as the store has answered."""
        import ray

        if self._call is None or self._name != name:
            self._name, self._call = name, self._actor.read.remote(self._team, name, self._slice_s)
        if not ray.wait([self._call], timeout=0)[0]:
            return False
        call, self._call = self._call, None
        try:
            found, _ = ray.get(call)
        except (ray.exceptions.ActorUnavailableError, ray.exceptions.ActorDiedError):
            return False  # it may begin again; if not, the worker's next other call says so
        return found is not None


#: A payload: the object that is its block, and its samples in it, from and to.
Piece: TypeAlias = tuple[Any, int, int]
_FREED_S = 7.0  # until all givers have heard what nobody needs, in their words every 5 s, and Ray has its memory back


def payloads_of(pieces: Sequence[Piece], limit_s: float) -> list[Span]:
    """Wait until the objects of these pieces are on this machine, and return their bytes."""
    import ray

    from megarl.data.wire import Span

    objects = list(dict.fromkeys(ref for ref, _, _ in pieces))
    blocks = dict(zip(objects, ray.get(objects, timeout=limit_s), strict=True))
    return [Span(blocks[ref], start, stop) for ref, start, stop in pieces]


def put_object(block: Block) -> Any:
    """Put `block` into this machine's object store, as soon as there is room: used blocks leave seconds later."""
    import ray

    end = time.monotonic() + _FREED_S
    while True:
        try:
            return ray.put(block)
        except (ray.exceptions.ObjectStoreFullError, ray.exceptions.OutOfDiskError):
            if time.monotonic() > end:
                raise
            time.sleep(0.1)
