"""One rank's record of the run's servers: their addresses, states and weight versions.

    starting --(answers)--> catching_up --(acknowledge)--> current
        ^                                                     |
        '------(restarted by its owner)------ failed <--(mark_failed)

A restarted server holds the weights it was started with, so it gets no request before it has acknowledged a full
update. The first rank of each machine owns the server processes there; `refresh` shares the states with all ranks.

An owner kills the processes of a failed server at once, because a hanging process keeps its devices' memory. A server
on several machines has an owner on each. Requests go to its node 0, whose owner tracks the server's state. If one node
process ends, the server has failed, and all its node processes restart together at another address.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Literal

from megarl.config.sglang import SGLangConfig
from megarl.rollout.sglang.api import UNTRUSTED, ServerApi
from megarl.rollout.sglang.server import HEALTH_S, POLL_S, ServerProcess, health
from megarl.system.comm import WorkerGroup
from megarl.system.errors import ServerError, count
from megarl.system.tracing import beat

State = Literal["starting", "catching_up", "current", "failed"]


@dataclass
class Server:
    """One server.

    Attributes:
        number: 0, 1, ... over all machines.
        api: address of the server, which a restart changes.
        version: last acknowledged weight version; None: no weight update since the server's start.
        why: reason for the server's last failure.
        restarts: number of restarts; of an external server, number of times that the run waited for it.
        given_up: whether the server failed to start and is not restarted.
        gpus: names of the GPUs of the server's ranks on its first machine; empty: unknown, or a CPU.
    """

    number: int
    api: ServerApi
    state: State = "starting"
    version: int | None = None
    why: str = ""
    restarts: int = 0
    given_up: bool = False
    gpus: tuple[str, ...] = ()


@dataclass(frozen=True)
class LostServer:
    """A failure of the server that was at `url`; the server may have been restarted at another address since."""

    number: int
    url: str
    why: str


class Fleet:
    """All servers of a run.

    Args:
        servers: all servers by number, the same on every rank.
        owned: processes that this rank starts, by server number: whole servers, or one machine's process of each.
        watched: numbers of the external servers whose health this rank checks.
        world: the ranks that call the collective methods together; None: only this rank.

    Attributes:
        examine: returns why a server cannot be used, or None; called for every server that starts to answer.
    """

    def __init__(
        self,
        servers: Sequence[Server],
        config: SGLangConfig,
        owned: dict[int, ServerProcess] | None = None,
        watched: Sequence[int] = (),
        world: WorkerGroup | None = None,
    ) -> None:
        self.servers = list(servers)
        self.config, self._owned, self._watched = config, owned or {}, tuple(watched)
        self._world = world or WorkerGroup.alone()
        self.examine: Callable[[Server], str | None] | None = None
        self._start_end: dict[int, float] = {}  # server number -> deadline of its start

    def start(self) -> None:
        """Start the servers of the run. Collective, from the main thread.

        Raises:
            ConfigError: this machine does not have the address `rollout.sglang.host`.
        """
        self._start(range(len(self.servers)))

    @property
    def external(self) -> bool:
        """Whether the servers were started outside of the run (`rollout.sglang.urls`)."""
        return bool(self.config.urls)

    def current(self, version: int) -> list[Server]:
        """Return the servers that hold weight version `version` and take requests."""
        return [server for server in self.servers if server.state == "current" and server.version == version]

    def mark_failed(self, server: Server, why: str) -> None:
        """Mark `server` as failed on this rank; `share_failures` and `refresh` mark it on all ranks."""
        server.state, server.version, server.why = "failed", None, why

    def acknowledge(self, server: Server, version: int) -> None:
        """Record that requests to `server` are computed with the weights `version`, without caches of other weights."""
        if server.state in ("starting", "failed"):
            raise ValueError(f"{server.api.name} is in state {server.state!r}, in which it cannot acknowledge weights")
        server.state, server.version = "current", version

    def note(self, failures: Iterable[LostServer]) -> None:
        """Mark these servers as failed, unless they were restarted since, and kill those that this rank started.

        Call with the same failures on every rank.
        """
        for failure in failures:
            server = self.servers[failure.number]
            if server.state == "failed" or server.api.url != failure.url:
                continue
            self.mark_failed(server, failure.why)
            if server.number in self._watched:
                failed = f"{server.api.name} at {server.api.url} has failed: {failure.why}"
                print(f"{failed}; the run did not start this server, so it cannot restart it", flush=True)
        self._end_failed()

    def ended(self) -> list[LostServer]:
        """Return the running servers that have lost a process owned by this rank."""
        lost = []
        for number, process in self._owned.items():
            server = self.servers[number]
            if server.state in ("catching_up", "current") and process.pid is None:
                why = f"{process.spec.part} ended; see {process.spec.log}"
                lost.append(LostServer(number, server.api.url, why))
        return lost

    @property
    def replacing(self) -> bool:
        """Whether a server is starting or can be restarted; equal on all ranks after `refresh`."""
        return not self.external and any(s.state == "starting" or self._may_restart(s) for s in self.servers)

    @property
    def replaced(self) -> int:
        """Total number of server restarts so far."""
        return 0 if self.external else sum(server.restarts for server in self.servers)

    def need_one(self) -> None:
        """Raise an error unless at least one server has not failed.

        Raises:
            ServerError: every server has failed.
        """
        if all(server.state == "failed" for server in self.servers):
            first = self.servers[0]
            again = f", started again {count(first.restarts, 'time')}" if first.restarts else ""
            reason = f"no server is left; this server failed{again}: {first.why}"
            raise ServerError(first.api.name, first.api.url, "start", reason)

    def refresh(self) -> None:
        """Restart failed servers, check starting servers, and share every server's state with all ranks. Collective.

        Raises:
            ServerError: on every rank, if no server is left and none may be restarted.
        """
        self._check()
        self.share_failures()
        self._restart()
        for server in self._starting():
            if time.monotonic() > self._start_end.get(server.number, math.inf):
                self._give_up(server)
        outside = [self.servers[number] for number in self._watched if self.servers[number].state == "failed"]
        self._ask([*self._starting(), *outside], time.monotonic() + HEALTH_S)
        self._agree()

    def wait_started(self) -> None:
        """Restart failed servers; wait up to `start_timeout_s` until each answers or is given up. Collective.

        Failed external servers are also waited for. A server that a signal kills meanwhile is restarted; a server that
        exits by itself is given up, because it would exit again.

        Raises:
            ServerError: on every rank, if no server is left.
        """
        end = time.monotonic() + self.config.start_timeout_s  # one deadline, because all servers start in parallel
        self._check(give_up=True)
        self.share_failures()
        self._restart()
        for server in self.servers if self.external else ():  # the user may have restarted a failed server
            if self._may_restart(server):
                server.state, server.restarts = "starting", server.restarts + 1
        waited = self._starting()
        while True:
            self._check(give_up=True)
            self.share_failures()
            self._restart()
            self._ask(self._starting(), end)
            waiting = bool(self._starting()) and time.monotonic() <= end
            if not any(self._world.all_gather_json(waiting)):
                break
            beat()
            time.sleep(POLL_S)
        for server in waited:
            if server.state != "catching_up":
                self._give_up(server)
        self._agree()

    def close(self) -> None:
        """Stop the servers that this rank started, in parallel."""
        if self._owned:
            with ThreadPoolExecutor(len(self._owned)) as pool:
                list(pool.map(ServerProcess.stop, self._owned.values()))

    def __enter__(self) -> Fleet:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _tracked(self) -> list[Server]:
        """Return the servers whose state this rank tracks: those that it started, and its external ones."""
        heads = [number for number, process in self._owned.items() if process.spec.node == 0]
        return [self.servers[number] for number in (*heads, *self._watched)]

    def _starting(self) -> list[Server]:
        return [server for server in self._tracked() if server.state == "starting"]

    def share_failures(self) -> None:
        """Mark every server as failed that some rank has marked as failed. Collective."""
        failed = [[s.number, s.why, s.given_up] for s in self.servers if s.state == "failed"]
        reasons: dict[int, list[str]] = {}
        for reports in self._world.all_gather_json(failed):
            for number, why, given_up in reports:
                reasons.setdefault(number, []).append(why)
                self.servers[number].given_up |= given_up
        # When one node process of a server ends, its others end too, and each of them may be the cause.
        for number, whys in reasons.items():
            self.mark_failed(
                self.servers[number], "; ".join(dict.fromkeys(whys)) if self.config.nnodes > 1 else whys[-1]
            )
        self._end_failed()

    def _end_failed(self) -> None:
        """Kill this rank's processes of failed servers, which may hold memory that the trainer or a restart needs."""
        for number, process in self._owned.items():
            server = self.servers[number]
            if server.state == "failed" and process.is_started:
                process.stop(0)  # a hanging process ignores SIGTERM
                if process.spec.node:
                    continue
                most, next_step = self.config.max_restarts, "it is given up"
                if self._may_restart(server):
                    next_step = f"restart {server.restarts + 1} of {most} follows"
                failed = (
                    f"{server.api.name} has failed and was killed; {next_step} (rollout.sglang.max_restarts={most})"
                )
                print(f"{failed}: {server.why}", flush=True)

    def _may_restart(self, server: Server) -> bool:
        return server.state == "failed" and not server.given_up and server.restarts < self.config.max_restarts

    def _restart(self) -> None:
        """Restart failed servers. Collective, after `share_failures`; in the main thread, so that servers end with this
        process.
        """
        again = [] if self.external else [server for server in self.servers if self._may_restart(server)]
        self._start([server.number for server in again])
        for server in again:
            server.state, server.restarts = "starting", server.restarts + 1
            self._start_end[server.number] = time.monotonic() + self.config.start_timeout_s

    def _start(self, numbers: Iterable[int]) -> None:
        """Start this rank's processes of these servers. Collective, after all ranks have stopped the old processes."""
        processes = {number: self._owned[number] for number in numbers if number in self._owned}
        meetings: dict[str, str] = {}
        if self.config.nnodes > 1:
            heads = {str(number): process.meeting() for number, process in processes.items() if process.spec.node == 0}
            for part in self._world.all_gather_json(heads):
                meetings |= part
        for number, process in processes.items():
            process.stop(0)
            process.start(meetings.get(str(number), ""))
            self._record(process)

    def _record(self, process: ServerProcess) -> None:
        """If this is a server's process on its first machine, copy the address and GPUs to the `Server`."""
        if process.spec.node == 0:
            server = self.servers[process.spec.number]
            server.api, server.gpus = process.api, process.spec.own_gpus

    def _check(self, *, give_up: bool = False) -> None:
        """Mark a server as failed if this rank started one of its processes and that process has ended.

        Call from the main thread, see ServerProcess.

        Args:
            give_up: whether not to restart servers that exited by themselves while starting.
        """
        for lost in self.ended():
            self.mark_failed(self.servers[lost.number], lost.why)
        for number, process in self._owned.items():
            server = self.servers[number]
            if server.state == "starting":
                try:
                    process.check()
                except ServerError as error:
                    self.mark_failed(server, error.reason)
                    server.given_up = give_up and process.ended_by_itself
            self._record(process)

    def _ask(self, servers: Sequence[Server], end: float) -> None:
        """Send these servers one health check each, in parallel, and mark the servers that answer as `catching_up`. No
        check waits longer than until `time.monotonic()` is `end`."""

        def problem(server: Server) -> str | None:
            why = health(server.api, end)
            return self.examine(server) if why is None and self.examine is not None else why

        if not servers:
            return
        with ThreadPoolExecutor(len(servers)) as pool:
            for server, why in zip(servers, pool.map(problem, servers), strict=True):
                if why is None:
                    server.state = "catching_up"
                else:
                    server.why = why
                    if UNTRUSTED in why:  # another check would fail too: the certificate will not change
                        self.mark_failed(server, why)

    def _give_up(self, server: Server) -> None:
        """Mark `server` as failed, kill this rank's process of it, and do not restart it."""
        process, why = self._owned.get(server.number), server.why
        if server.state == "starting":
            limit = f"{self.config.start_timeout_s:g} s (rollout.sglang.start_timeout_s)"
            nodes = f"some of its {self.config.nnodes} node processes did not start, " if self.config.nnodes > 1 else ""
            why = f"not ready within {limit}: {nodes}{why if process is None else f'see {process.spec.log}'}"
        if process is not None:
            process.stop(0)
            server.given_up = True
        self.mark_failed(server, why)

    def _agree(self) -> None:
        """Share each server's state from the rank that tracks it with all ranks. Collective."""
        for reports in self._world.all_gather_json([_report(server) for server in self._tracked()]):
            self.adopt(reports)
        self._end_failed()  # another rank may have marked a server as failed that has processes on this machine
        self.need_one()

    def reports(self) -> list[dict[str, Any]]:
        """Return the states of all servers as JSON values."""
        return [_report(server) for server in self.servers]

    def adopt(self, reports: Sequence[dict[str, Any]]) -> None:
        """Copy the servers' states from `reports` of another `Fleet` of the same servers. Call on every rank."""
        for report in reports:
            server = self.servers[report["number"]]
            if report["url"] != server.api.url:
                server.api = ServerApi(report["url"], server.api.api_key, server.api.name)
            server.restarts, server.why, server.given_up = report["restarts"], report["why"], report["given_up"]
            server.gpus = tuple(report["gpus"])
            if report["state"] != server.state:
                server.state = report["state"]
                if server.state != "current":
                    server.version = None


def _report(server: Server) -> dict[str, Any]:
    """Return the state of a server as a JSON value."""
    names = ("number", "state", "why", "restarts", "given_up", "gpus")
    return {"url": server.api.url, **{name: getattr(server, name) for name in names}}
