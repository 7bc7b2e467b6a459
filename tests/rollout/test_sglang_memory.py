"""Memory of colocated servers, with a server that ends as SGLang does when its memory is taken at a wrong moment."""

from typing import Any

import pytest

from megarl.config.sglang import SGLangConfig
from megarl.rollout.sglang.api import ServerApi
from megarl.rollout.sglang.fleet import Fleet, Server
from megarl.rollout.sglang.memory import ServerMemory
from megarl.system.comm import WorkerGroup
from megarl.system.errors import ServerError
from megarl.system.offload_schedule import CACHE, WEIGHTS


class Machine(ServerApi):
    """Parts on the device, and how many requests run; one that does not stop in time keeps it busy."""

    def __init__(self, running: int = 0, stuck: bool = False) -> None:
        super().__init__("http://127.0.0.1:1", None, "server 0")
        object.__setattr__(
            self, "state", {"held": {CACHE, WEIGHTS, "cuda_graph"}, "running": running, "stuck": stuck, "dead": False}
        )
        object.__setattr__(self, "paths", [])

    def call(self, path: str, payload: Any = None, *, deadline_s: float, phase: str, method: str = "POST") -> Any:
        state, (path, _, query) = self.state, path.partition("?")
        self.paths.append(path)
        if state["dead"]:
            raise ServerError(self.name, self.url, phase, "connection refused")
        if path == "/abort_request":
            assert payload == {"abort_all": True}
            if not state["stuck"]:
                state["running"] = 0
        elif path == "/flush_cache":
            assert 0 < float(query.removeprefix("timeout=")) < deadline_s  # the server's answer comes before ours
            if state["running"]:
                raise ServerError(self.name, self.url, phase, "HTTP 400: requests are pending")
        elif path == "/release_memory_occupation":
            state["dead"] = state["running"] > 0
            assert ("cuda_graph" in payload["tags"]) == ("kv_cache" in payload["tags"])
            state["held"] -= set(payload["tags"])
        elif path == "/resume_memory_occupation":
            state["held"] |= set(payload["tags"])
        return {}


def memory_of(machine: Machine) -> tuple[ServerMemory, Server]:
    server = Server(0, machine, "current", 1)
    return ServerMemory(Fleet([server], SGLangConfig()), 10.0, WorkerGroup.alone()), server


def test_nothing_runs_when_memory_is_taken() -> None:
    machine = Machine(running=3)
    memory, server = memory_of(machine)
    memory.hold(WEIGHTS)
    assert (machine.state["dead"], machine.state["held"], server.state) == (False, {WEIGHTS}, "current")
    memory.hold(WEIGHTS, CACHE)
    assert machine.state["held"] == {WEIGHTS, CACHE, "cuda_graph"}


def test_a_server_that_stays_busy_is_given_up_not_killed() -> None:
    machine = Machine(running=1, stuck=True)
    memory, server = memory_of(machine)
    memory.hold()
    assert not machine.state["dead"]
    assert (server.state, "requests are pending" in server.why) == ("failed", True)


@pytest.mark.parametrize("parts", [(CACHE, WEIGHTS), (WEIGHTS,)])
def test_nothing_is_aborted_when_nothing_is_taken(parts: tuple[str, ...]) -> None:
    machine = Machine()
    memory, _ = memory_of(machine)
    memory.hold(*parts)
    machine.paths.clear()
    memory.hold(*parts)
    memory.hold(CACHE, WEIGHTS)
    assert set(machine.paths) <= {"/resume_memory_occupation"}
