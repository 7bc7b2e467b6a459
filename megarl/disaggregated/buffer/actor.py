"""The buffer's process: a named Ray actor around `buffer.core`.

A call whose result is available returns at once. Any other call waits for a few seconds at most and then returns the
progress of all other teams; the client calls again or raises an error. So no client hangs when the actor is gone.

When the actor dies, the launcher ends the attempt, and the run continues from its newest checkpoint.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from megarl.dag.staleness import StalenessSettings
from megarl.disaggregated.buffer.core import Change, Core, HandoverError, Share, Topic
from megarl.disaggregated.buffer.progress import Ping, Progress, ProgressTable

if TYPE_CHECKING:
    from megarl.dag.placement import Placement

NAMESPACE = "megarl"


class BufferActor:
    """Serves the calls of all workers to a `megarl.disaggregated.buffer.core.Core`."""

    def __init__(
        self, placement: Placement, groups_per_step: int, share: Share, flow: StalenessSettings | None = None
    ) -> None:
        self._core = Core(placement, groups_per_step, share, flow)
        self._progress = ProgressTable([team.name for team in placement.teams], time.monotonic())
        self._waiting: dict[Topic, set[asyncio.Future[None]]] = {}
        #: (start of the process, serial number, result) of each worker's last call of `change`; a repeated call returns
        #: this result instead of changing the state again
        self._last_changes: dict[tuple[str, int], tuple[int, int, Any]] = {}

    async def ping(self, team: str, pings: Mapping[int, Ping]) -> None:
        """Record progress reports of workers of a team; `pings`: rank -> report."""
        for rank, ping in pings.items():
            self._progress.ping(team, rank, ping, time.monotonic())

    async def end(self) -> None:
        """Never return: the launcher waits for this call to fail, which happens when the actor dies."""
        await asyncio.Event().wait()

    async def change(self, team: str, rank: int, start: int, serial: int, method: str, arguments: Sequence[Any]) -> Any:
        """Call a method of `Core` that changes the buffer's state, and return the result.

        A worker repeats a call whose reply was lost; a repeated call returns the same result and changes nothing.

        Raises:
            HandoverError: the buffer refuses the call, or the worker belongs to an earlier start of its team.

        Args:
            start: number of the team's restarts when this worker started.
            serial: number of the call among those of the worker.
            arguments: in a list, because Ray would fetch the bytes of references that are passed directly.
        """
        if start != self._core.starts(team):
            raise HandoverError(
                f"this process of team {team!r}, rank {rank}, must end: the team has been restarted since"
            )
        last = self._last_changes.get((team, rank))
        if last is None or last[:2] != (start, serial):
            result: Any
            try:
                change: Change = getattr(self._core, method)(*arguments)
                self._wake(change.topics)
                result = change.answer
            except HandoverError as error:
                result = error
            last = self._last_changes[team, rank] = start, serial, result
        if isinstance(last[2], HandoverError):
            raise last[2]
        return last[2]

    async def restart_team(self, team: str, number: int, limit_s: float) -> int | None:
        """Prepare for restart `number` of a team, and return the last finished step (`Core.restart_team`). Other teams
        wait for the team up to `limit_s` seconds.
        """
        finished = self._core.restart_team(team, number)
        self._wake(list(self._waiting))
        self._progress.restart(team, time.monotonic(), limit_s)
        return finished

    async def query(self, method: str, arguments: Sequence[Any]) -> Any:
        """Call a method of `Core` that does not wait for other teams and changes nothing, and return the result."""
        return getattr(self._core, method)(*arguments)

    async def wait(
        self, team: str, topic: Topic, method: str, arguments: Sequence[Any], slice_s: float
    ) -> tuple[Any, list[Progress]]:
        """Call a method of `Core` that returns None while data are missing; then wait for the data, and call it again.

        Args:
            topic: name of the data; `change` wakes this call when it has received them.
            slice_s: seconds to wait at most.

        Returns:
            The result and an empty list; if data are still missing, None and the progress of the other teams.
        """
        result = getattr(self._core, method)(*arguments)
        if result is None:
            waiters = self._waiting.setdefault(topic, set())
            waiter = asyncio.get_running_loop().create_future()
            waiters.add(waiter)
            await asyncio.wait([waiter], timeout=slice_s)
            waiters.discard(waiter)
            if not waiters and self._waiting.get(topic) is waiters:
                del self._waiting[topic]
            result = getattr(self._core, method)(*arguments)
        return result, [] if result is not None else self._progress.others(team, time.monotonic())

    def _wake(self, topics: Iterable[Topic]) -> None:
        for topic in topics:
            for waiter in self._waiting.pop(topic, ()):
                waiter.set_result(None)


def start_buffer(
    name: str,
    placement: Placement,
    groups_per_step: int,
    share: Share,
    environment: Mapping[str, str] | None = None,
    flow: StalenessSettings | None = None,
) -> Any:
    """Start the buffer of a run on this node of an initialised Ray; it ends with this process, or when it is killed.

    Args:
        name: `BufferClient.connect` finds it by this name; no two runs of a cluster share one.
        groups_per_step: largest number of groups of a step, `data.batch_size`.
        flow: settings for `async.order` other than in_order; None: in_order.

    Returns:
        The actor's handle, which the caller keeps. The actor may still be starting.
    """
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    workers = sum(team.devices for team in placement.teams)
    # with task events, Ray's control store would keep a record of each of the last 100,000 calls
    make = ray.remote(max_restarts=0, max_task_retries=0, enable_task_events=False)(BufferActor).options(
        name=name,
        namespace=NAMESPACE,
        num_cpus=0,
        max_concurrency=4 * workers + 100,  # every worker may wait, while its pings must still be served
        runtime_env={"env_vars": dict(environment or {})},
        scheduling_strategy=NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False),
    )
    return make.remote(placement, groups_per_step, share, flow)
