"""Releases and restores the device memory of servers that share devices with the trainer.

`megarl.system.offload_schedule` lists the parts that each phase needs. Released weights are lost, and the next weight
update sends all of them; with `sync.adapters: separate` they wait in host memory. CUDA graphs are released with the
cache. Needs SGLang's memory saver, which servers have with `rollout.sglang.colocated`; on a CPU the calls free nothing.
"""

from __future__ import annotations

from collections.abc import Iterable

from megarl.rollout.sglang.fleet import Fleet, Server
from megarl.system.comm import WorkerGroup
from megarl.system.errors import ServerError
from megarl.system.offload_schedule import CACHE, WEIGHTS

_TAGS = {WEIGHTS: ("weights",), CACHE: ("kv_cache", "cuda_graph")}
"""SGLang's names of what each part consists of: CUDA graphs are used by what also needs the cache."""


class ServerMemory:
    """Frees and restores the memory of servers that share devices with the trainer. Methods are collective over all
    ranks of the run.

    Args:
        deadline_s: deadline in seconds of each call.
        world: all ranks of the run; server s is called by rank s modulo the number of ranks.
    """

    def __init__(self, fleet: Fleet, deadline_s: float, world: WorkerGroup) -> None:
        self._fleet, self._deadline_s = fleet, deadline_s
        self._numbers = range(world.rank, len(fleet.servers), world.size)
        # parts on the devices, by number and restarts of the server: a restarted server has all parts
        self._parts: dict[tuple[int, int], set[str]] = {}

    def hold(self, *parts: str) -> None:
        """Keep only `parts` of the servers' memory (`WEIGHTS`, `CACHE`) on the devices.

        A server that rejects this or hangs is marked failed on every rank and killed, which frees its memory.
        """
        wanted = set(parts)
        for number in self._numbers:
            server = self._fleet.servers[number]
            if server.state in ("catching_up", "current"):
                try:
                    self._move(server, wanted)
                except ServerError as error:
                    self._fleet.mark_failed(server, str(error))
        self._fleet.share_failures()

    def _move(self, server: Server, wanted: set[str]) -> None:
        present = self._parts.setdefault((server.number, server.restarts), {CACHE, WEIGHTS})
        if present - wanted:
            # SGLang crashes if it releases memory while a request runs. No sample waits for requests that still run:
            # after a failure their samples were sent to another server.
            server.api.call("/abort_request", {"abort_all": True}, deadline_s=self._deadline_s, phase="memory")
            idle_s = max(1, int(self._deadline_s) - 1)  # the server's own error arrives before the deadline
            server.api.call(f"/flush_cache?timeout={idle_s}", deadline_s=self._deadline_s, phase="memory")
        self._call(server, "/release_memory_occupation", present - wanted)
        self._call(server, "/resume_memory_occupation", wanted - present)
        self._parts[server.number, server.restarts] = wanted

    def _call(self, server: Server, path: str, parts: Iterable[str]) -> None:
        tags = [tag for part in sorted(parts) for tag in _TAGS[part]]
        if tags:
            server.api.call(path, {"tags": tags}, deadline_s=self._deadline_s, phase="memory")
