"""Servers that share their devices with the trainer: parts of them leave the devices, and come back.

`megarl.system.offload_schedule` says which parts are there in which phase. Weights that leave a device are not kept
anywhere: the next synchronisation brings the new ones. Needs SGLang's memory saver, which the servers are started with
when `rollout.sglang.colocated` is set; on a CPU the calls free nothing.
"""

from __future__ import annotations

from collections.abc import Iterable

from megarl.rollout.sglang.fleet import Fleet, Server
from megarl.system.comm import WorkerGroup
from megarl.system.errors import ServerError
from megarl.system.offload_schedule import CACHE, WEIGHTS


class ServerMemory:
    """The memory of servers on shared devices. Methods are collective over all ranks of the run.

    Args:
        deadline_s: deadline in seconds of each call, none of which moves weights: `rollout.sglang.health_timeout_s`.
        world: all ranks; each speaks to the servers whose number is its own modulo the number of ranks.
    """

    def __init__(self, fleet: Fleet, deadline_s: float, world: WorkerGroup) -> None:
        self._fleet, self._deadline_s = fleet, deadline_s
        self._mine = range(world.rank, len(fleet.servers), world.size)
        self._held: dict[tuple[int, int], set[str]] = {}  # by number and restarts: a fresh server has everything

    def hold(self, *parts: str) -> None:
        """Keep exactly these parts on the devices.

        A server that refuses, or hangs, is marked failed on every rank and killed, which frees its memory.
        """
        wanted = set(parts)
        for number in self._mine:
            server = self._fleet.servers[number]
            if server.state in ("catching_up", "current"):
                try:
                    self._move(server, wanted)
                except ServerError as error:
                    self._fleet.mark_failed(server, str(error))
        self._fleet.share_failures()

    def _move(self, server: Server, wanted: set[str]) -> None:
        held = self._held.setdefault((server.number, server.restarts), {CACHE, WEIGHTS})
        if held - wanted:
            self._settle(server)
        self._call(server, "/release_memory_occupation", held - wanted)
        self._call(server, "/resume_memory_occupation", wanted - held)
        self._held[server.number, server.restarts] = wanted

    def _settle(self, server: Server) -> None:
        """Wait until nothing runs: SGLang ends when memory is taken from under a request.

        Nobody waits for what is left: samples of a server that was given up went to another one.
        """
        server.api.call("/abort_request", {"abort_all": True}, deadline_s=self._deadline_s, phase="memory")
        idle_s = max(1, int(self._deadline_s) - 1)  # the server's own limit, so that its answer says what runs
        server.api.call(f"/flush_cache?timeout={idle_s}", deadline_s=self._deadline_s, phase="memory")

    def _call(self, server: Server, path: str, parts: Iterable[str]) -> None:
        tags = sorted(parts)
        if tags:
            server.api.call(path, {"tags": tags}, deadline_s=self._deadline_s, phase="memory")
