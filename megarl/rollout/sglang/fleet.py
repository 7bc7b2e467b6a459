"""The servers of a run as one rank sees them: where they are, which weights they hold, which may be asked.

    starting --(answers)--> catching_up --(acknowledge)--> current
        ^                                                     |
        '------(restarted by its owner)------ failed <--(mark_failed)

A restarted server holds the weights it was started with, so it gets no request before a full synchronisation has been
acknowledged. The first rank of each machine owns the processes there; `refresh` makes all ranks agree.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Literal

from megarl.comm import Group, all_gather_json
from megarl.config.sglang import SGLangConfig
from megarl.errors import ServerError
from megarl.rollout.sglang.api import ServerApi
from megarl.rollout.sglang.server import HEALTH_S, ServerProcess, wait_ready

State = Literal["starting", "catching_up", "current", "failed"]


@dataclass
class Server:
    """One server.

    Attributes:
        number: 0, 1, ... over all machines.
        api: how to reach it; a restart changes the address.
        version: last acknowledged weight version; None before the first since it was started.
        why: what was wrong with it last.
        restarts: how often it was started again.
    """

    number: int
    api: ServerApi
    state: State = "starting"
    version: int | None = None
    why: str = ""
    restarts: int = 0


class Fleet:
    """All servers of a run.

    Args:
        servers: in order of their numbers, the same on every rank.
        config: deadlines and the number of restarts.
        owned: processes that this rank started, by server number.
        watched: external servers whose health this rank looks after, by number.
    """

    def __init__(
        self,
        servers: Sequence[Server],
        config: SGLangConfig,
        owned: dict[int, ServerProcess] | None = None,
        watched: Sequence[int] = (),
    ) -> None:
        self.servers = list(servers)
        self._config, self._owned, self._watched = config, owned or {}, tuple(watched)

    @property
    def external(self) -> bool:
        """The servers were there before the run and will be after it."""
        return bool(self._config.urls)

    def current(self, version: int) -> list[Server]:
        """Servers that hold weight version `version` and may be asked."""
        return [server for server in self.servers if server.state == "current" and server.version == version]

    def behind(self, version: int) -> list[Server]:
        """Servers that answer and do not hold `version`: the ones to synchronise."""
        alive = [server for server in self.servers if server.state in ("catching_up", "current")]
        return [server for server in alive if server.state == "catching_up" or server.version != version]

    def mark_failed(self, server: Server, why: str) -> None:
        """Send nothing more to `server`; call on every rank, or let `refresh` tell the others."""
        server.state, server.version, server.why = "failed", None, why

    def acknowledge(self, server: Server, version: int) -> None:
        """`server` has confirmed that it holds `version` alone and has dropped every cache of older weights."""
        if server.state in ("starting", "failed"):
            raise ValueError(f"{server.api.name} is {server.state} and cannot hold weights")
        server.state, server.version = "current", version

    def refresh(self, group: Group = None) -> None:
        """Agree on every server's state. Collective over `group`: failed servers are restarted, started ones looked at.

        Raises:
            ServerError: on every rank, when no server is left and none may be restarted.
        """
        for reports in all_gather_json([[s.number, s.why] for s in self.servers if s.state == "failed"], group):
            for number, why in reports:
                self.mark_failed(self.servers[number], why)
        mine = [self._tend(server) for server in self.servers if self._is_mine(server.number)]
        for reports in all_gather_json(mine, group):
            for report in reports:
                self._adopt(report)
        if all(server.state == "failed" for server in self.servers):
            first = self.servers[0]
            reason = f"no server is left; what was wrong with this one: {first.why}"
            raise ServerError(first.api.name, first.api.url, "start", reason)

    def wait_started(self, group: Group = None) -> None:
        """Restart what failed and wait until every server answers or is given up. Collective over `group`.

        Raises:
            ServerError: on every rank, when no server is left.
        """
        self.refresh(group)
        end = time.monotonic() + self._config.start_timeout_s  # they start side by side
        for number, process in self._owned.items():
            server = self.servers[number]
            if server.state == "starting":
                try:
                    wait_ready(process, end)
                except ServerError as error:
                    process.stop(0)
                    server.restarts = self._config.max_restarts  # what does not start now does not start the next time
                    self.mark_failed(server, error.reason)
        self.refresh(group)

    def close(self) -> None:
        """End the servers that this rank started, side by side."""
        if self._owned:
            with ThreadPoolExecutor(len(self._owned)) as pool:
                list(pool.map(ServerProcess.stop, self._owned.values()))

    def __enter__(self) -> Fleet:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _is_mine(self, number: int) -> bool:
        return number in self._owned or number in self._watched

    def _tend(self, server: Server) -> dict[str, Any]:
        """Restart or look at a server of this rank; what the other ranks must know of it."""
        process = self._owned.get(server.number)
        if process is not None:
            self._tend_process(server, process)
        elif server.state in ("starting", "failed"):
            self._look_at(server)
        return {
            "number": server.number,
            "url": server.api.url,
            "state": server.state,
            "why": server.why,
            "restarts": server.restarts,
        }

    def _tend_process(self, server: Server, process: ServerProcess) -> None:
        if process.pid is None and server.state in ("catching_up", "current"):
            self.mark_failed(server, f"its process ended; see {process.spec.log}")
        if server.state == "failed" and server.restarts < self._config.max_restarts:
            process.stop(0)  # it may hang, and a hanging process takes no polite request
            process.start()
            server.state, server.restarts = "starting", server.restarts + 1
        elif server.state == "starting":
            try:
                if process.ready():
                    server.state = "catching_up"
            except ServerError as error:
                self.mark_failed(server, error.reason)
        server.api = process.api

    def _look_at(self, server: Server) -> None:
        try:
            server.api.call("/health", deadline_s=HEALTH_S, phase="health", method="GET")
            server.state = "catching_up"
        except ServerError as error:
            server.state, server.why = "failed", error.reason

    def _adopt(self, report: dict[str, Any]) -> None:
        server = self.servers[report["number"]]
        server.api = ServerApi(report["url"], server.api.api_key, server.api.name)
        server.restarts, server.why = report["restarts"], report["why"]
        if report["state"] != server.state:
            server.state = report["state"]
            if server.state != "current":
                server.version = None
