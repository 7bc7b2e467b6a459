"""The store's process: a named Ray actor around `buffer.core`. Calls that wait come back after a while, empty.

A call that finds what it asks for answers at once. Another waits for a slice of a few seconds; then it answers with
where all other teams stand, and the client asks again, or gives up. So nobody hangs on an actor that is gone.

Ray starts an actor that died again, a few times in a run; it goes on from its journal (`buffer.durable`).
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from megarl.disaggregated.buffer.core import Core, GroupInfo, Share, StoreError, Topic
from megarl.disaggregated.buffer.flow import FlowGroup
from megarl.disaggregated.buffer.journal import Ack, DurableCore
from megarl.disaggregated.buffer.progress import Ping, Progress, ProgressTable
from megarl.staleness import StalenessSettings

if TYPE_CHECKING:
    from megarl.dag.placement import Placement

T = TypeVar("T")
#: What a call that waits comes back with: the answer or None, and where the other teams stand if it is None.
Answer = tuple[T | None, list[Progress]]

NAMESPACE = "megarl"
#: File of a run folder, while the run lasts.
JOURNAL = "store.journal"
#: How often the store of a run may die and go on; what kills it every time ends the run.
RESTARTS = 10


class StoreActor:
    """See `megarl.disaggregated.buffer.core.Core`, whose methods these are; every one is told which worker calls."""

    def __init__(
        self,
        name: str,
        placement: Placement,
        groups_per_step: int,
        share: Share,
        journal: Path,
        flow: StalenessSettings | None = None,
    ) -> None:
        self._core = DurableCore(lambda: Core(placement, groups_per_step, share, flow), journal, name)
        self._progress = ProgressTable([team.name for team in placement.teams], time.monotonic())
        self._waiting: dict[Topic, set[asyncio.Future[None]]] = {}

    async def ping(self, team: str, rank: int, ping: Ping) -> Ack:
        """Hear where a worker stands."""
        self._progress.ping(team, rank, ping, time.monotonic())
        return self._core.ack(team, rank, whole=True)

    async def change(
        self, team: str, rank: int, serial: int, call: str, refs: Sequence[Any], start: int = 0
    ) -> tuple[Ack, Any]:
        """See `DurableCore.change`; references in a list, or Ray would fetch the bytes.

        Args:
            start: how often the team had begun again when this worker started; of an earlier one nothing counts.
        """
        if start != self._core.ask("starts", team):
            raise StoreError(f"team {team!r} has begun again since rank {rank} of start {start} did")
        answer, topics = self._core.change(team, rank, serial, call, refs)
        self._wake(list(self._waiting) if topics is None else topics)
        return self._core.ack(team, rank), answer

    async def give_again(self, team: str, rank: int, serials: Sequence[int], refs: Sequence[Sequence[Any]]) -> None:
        """Take the references of earlier calls, after a restart."""
        for serial, some in zip(serials, refs, strict=True):
            self._core.bind(team, rank, serial, some)
        self._wake(list(self._waiting))

    async def restart_team(self, team: str, number: int, limit_s: float) -> int | None:
        """See `Core.restart_team`. Others wait for the team's new processes, which are there within `limit_s`."""
        finished: int | None = self._core.ask("restart_team", team, number)
        self._wake(list(self._waiting))
        self._progress.restart(team, time.monotonic(), limit_s)
        return finished

    async def assignment(
        self, team: str, step: int, samples: str, part: int, slice_s: float
    ) -> Answer[list[GroupInfo]]:
        """Groups of one part."""
        ask = lambda: self._core.ask("assignment", team, step, samples, part)  # noqa: E731
        return await self._answer(team, ask, ("samples", step, samples), slice_s)

    async def fetch(self, team: str, step: int, key: str, uids: Sequence[str], slice_s: float) -> Answer[list[Any]]:
        """References to groups' bytes."""
        ask = lambda: self._core.fetch(team, step, key, uids)  # noqa: E731
        return await self._answer(team, ask, ("handover", step, key), slice_s)

    async def read(self, team: str, name: str, slice_s: float) -> Answer[tuple[str]]:
        """Mail, in a tuple."""
        return await self._answer(team, lambda: self._core.ask("read", name), ("mail", name), slice_s)

    async def peek(self, name: str) -> tuple[str] | None:
        """Mail, in a tuple, if it is there."""
        return self._core.ask("read", name)

    async def drained(self, version: int) -> bool:
        """Say whether the replicas that generate have nothing to do."""
        return bool(self._core.ask("drained", version))

    async def flow_state(self) -> dict[str, Any]:
        """Return where prompts stand, for a checkpoint."""
        return self._core.ask("flow_state")

    async def unused(self, team: str, step: int, slice_s: float) -> Answer[list[FlowGroup]]:
        """Return finished groups for a checkpoint, with references to their bytes."""
        return await self._answer(team, lambda: self._core.unused(step), ("unused",), slice_s)

    async def queues(self) -> dict[str, int]:
        """Count the groups that wait for each team."""
        return self._core.ask("queues")

    async def _answer(self, team: str, ask: Callable[[], T | None], topic: Topic, slice_s: float) -> Answer[T]:
        found = ask()
        if found is None:
            await self._come(topic, slice_s)
            found = ask()
        return found, [] if found is not None else self._progress.others(team, time.monotonic())

    async def _come(self, topic: Topic, slice_s: float) -> None:
        """Wait for `topic`, for `slice_s` seconds at most."""
        waiters = self._waiting.setdefault(topic, set())
        mine = asyncio.get_running_loop().create_future()
        waiters.add(mine)
        await asyncio.wait([mine], timeout=slice_s)
        waiters.discard(mine)
        if not waiters and self._waiting.get(topic) is waiters:
            del self._waiting[topic]

    def _wake(self, topics: list[Topic]) -> None:
        for topic in topics:
            for waiter in self._waiting.pop(topic, ()):
                waiter.set_result(None)


def start_store(
    name: str,
    placement: Placement,
    groups_per_step: int,
    share: Share,
    journal: Path,
    environment: Mapping[str, str] | None = None,
    flow: StalenessSettings | None = None,
) -> Any:
    """Start the store of a run; Ray is initialised. It ends with the process that starts it, or when it is killed.

    It stays on the node of the process that starts it: its journal outlives a process, not a machine.

    Args:
        name: by which `StoreClient.connect` finds it; no two runs of a cluster share one.
        groups_per_step: most groups that a step has, `data.batch_size`.
        journal: file that the store writes; another store's is replaced. Nobody needs it after the run.
        flow: groups come as they get ready; None: step by step.

    Returns:
        The actor's handle, which the caller keeps. It need not be there yet.
    """
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    workers = sum(team.devices for team in placement.teams)
    # Each of the last 100,000 calls would have a record in the control store.
    make = ray.remote(max_restarts=RESTARTS, max_task_retries=0, enable_task_events=False)(StoreActor).options(
        name=name,
        namespace=NAMESPACE,
        num_cpus=0,
        max_concurrency=4 * workers + 100,  # every worker may wait, and must still be heard
        runtime_env={"env_vars": dict(environment or {})},
        scheduling_strategy=NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False),
    )
    return make.remote(name, placement, groups_per_step, share, journal.resolve(), flow)
