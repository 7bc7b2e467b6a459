"""How long the fleet waits for servers that do not answer."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field
from typing import Any

import pytest

from megarl.config.sglang import SGLangConfig
from megarl.errors import ServerError
from megarl.rollout.sglang.api import ServerApi
from megarl.rollout.sglang.fleet import Fleet, Server


@dataclass(frozen=True)
class Told(ServerApi):
    """`/health` fails after `hold` until it has been asked `late` times; keeps the deadlines it was asked with."""

    late: int = 10**9
    hold: Any = None
    deadlines: list[float] = field(default_factory=list)

    def call(self, path: str, payload: Any = None, *, deadline_s: float, phase: str, method: str = "POST") -> Any:
        self.deadlines.append(deadline_s)
        if self.hold is not None:
            self.hold()
        if len(self.deadlines) <= self.late:
            raise ServerError(self.name, self.url, phase, "not yet")
        return {}


def fleet_of(apis: list[Told], timeout_s: float) -> Fleet:
    servers = [Server(number, api) for number, api in enumerate(apis)]
    return Fleet(servers, SGLangConfig(start_timeout_s=timeout_s), watched=range(len(apis)))


def test_a_server_that_hangs_is_asked_no_longer_than_the_time_that_is_left() -> None:
    apis = [Told("http://127.0.0.1:1", None, f"server {i}") for i in range(2)]
    with pytest.raises(ServerError, match=r"not ready within 2 s \(rollout\.sglang\.start_timeout_s\): not yet"):
        fleet_of(apis, 2.0).wait_started()
    assert all(deadline <= 2.0 for api in apis for deadline in api.deadlines)


def test_servers_that_hang_are_asked_side_by_side() -> None:
    meet = threading.Barrier(3)  # passed only by three at the same time

    def hold() -> None:
        meet.wait(20)

    apis = [Told("http://127.0.0.1:1", None, f"server {i}", late=0, hold=hold) for i in range(3)]
    fleet = fleet_of(apis, 60.0)
    fleet.wait_started()
    assert [server.state for server in fleet.servers] == ["catching_up"] * 3


def test_servers_that_run_already_may_take_as_long_to_answer_as_own_ones() -> None:
    fleet = fleet_of([Told("http://127.0.0.1:1", None, "server 0", late=2)], 60.0)
    fleet.wait_started()
    assert [server.state for server in fleet.servers] == ["catching_up"]
    fleet.mark_failed(fleet.servers[0], "test")
    fleet.refresh()
    assert fleet.servers[0].state == "catching_up"
