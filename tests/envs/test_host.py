"""What an environment may do without keeping the run waiting."""

from __future__ import annotations

import asyncio
import threading
import time
from dataclasses import dataclass
from typing import Any, ClassVar

import pytest

from megarl.envs import Action, Environment, Step
from megarl.envs.host import Host, HostError, HostSession, Reply, _reply_of

ACTION = Action("1", "1", [1], "stop", 0)


class Rude(Environment):
    """Ends in the way that its row says."""

    over: ClassVar[threading.Event]

    def reset(self, row: dict[str, Any], seed: int) -> Any:
        self.how = row["how"]

    def step(self, action: Action) -> Any:
        if self.how == "coroutine exits":
            return self._exit()
        if self.how == "fine":
            return Step(done=True)
        if self.how == "late":
            self.over.wait()
        if self.how == "hangs":
            return asyncio.sleep(60)
        raise {"stops": StopIteration(3), "exits": SystemExit(3), "cancelled": asyncio.CancelledError()}.get(
            self.how, TimeoutError("its own")
        )

    async def _exit(self) -> Any:
        raise SystemExit(4)


@dataclass
class Played:
    """Waits for all answers."""

    session: HostSession

    def reset(self, rows: dict[int, tuple[dict[str, Any], int]]) -> dict[int, Reply]:
        for number, (row, seed) in rows.items():
            self.session.begin(number, row, seed)
        return self.session.all_answers()

    def step(self, actions: dict[int, Action]) -> dict[int, Reply]:
        for number, action in actions.items():
            self.session.step(number, action)
        return self.session.all_answers()


@pytest.fixture
def host():
    """host(kind, answer_s) -> a session of a host that is closed after the test."""
    hosts: list[Host] = []

    def make(kind: type[Environment], answer_s: float | None = None) -> Played:
        hosts.append(Host(kind, kind.Settings(), answer_s))
        return Played(hosts[-1].session())

    yield make
    for one in hosts:
        one.close()


@pytest.mark.parametrize(
    ("how", "error"),
    [
        ("stops", "step (turn 0) raised RuntimeError: StopIteration: 3 ("),
        ("exits", "step (turn 0) raised SystemExit: 3 ("),
        ("coroutine exits", "step (turn 0) raised SystemExit: 4 ("),
        ("cancelled", "step (turn 0) raised CancelledError ("),
        ("own timeout", "step (turn 0) raised TimeoutError: its own ("),
        ("late", "step (turn 0): the environment did not reply within 2 s"),
        ("hangs", "step (turn 0): the environment did not reply within 2 s"),
    ],
)
def test_whatever_it_does_is_its_episodes_error_and_others_go_on(host, how, error):
    mine, Rude.over = host(Rude, 2.0 if "did not reply" in error else 60.0), threading.Event()
    mine.reset({0: ({"how": how}, 0), 1: ({"how": "fine"}, 0)})
    try:
        replies = mine.step({0: ACTION, 1: ACTION})
        assert replies[0].error.startswith(error)
        assert "did not reply" in error or "test_host.py" in replies[0].error
        assert replies[1].done
        assert mine.step({1: ACTION})[1].done
    finally:
        Rude.over.set()


def test_calls_that_wait_for_a_thread_are_not_late(host, monkeypatch):
    class Slow(Environment):
        """All calls together take longer than one may."""

        def step(self, action: Action) -> Step:
            time.sleep(0.25)
            return Step(done=True)

    monkeypatch.setattr("megarl.envs.host._THREADS", 1)
    mine = host(Slow, 2.0)
    mine.reset({number: ({}, 0) for number in range(9)})
    assert all(reply.done for reply in mine.step(dict.fromkeys(range(9), ACTION)).values())


def test_an_object_that_cannot_be_made_is_an_error_of_reset(host):
    class Broken(Environment):
        """Cannot be made."""

        def __init__(self, settings: Any, shared: Any) -> None:
            raise ValueError("no state")

    assert host(Broken).reset({0: ({}, 0)})[0].error.startswith("reset raised ValueError: no state (")


class Ends(Environment):
    """Ends the thread of all environments, or keeps it."""

    over: ClassVar[threading.Event]

    async def step(self, action: Action) -> Step:
        self.over.wait()
        asyncio.get_running_loop().stop()
        await asyncio.sleep(60)
        return Step(done=True)


@pytest.mark.parametrize(
    ("blocks", "message"), [(False, "thread of .*Ends has ended"), (True, "Ends blocks all others")]
)
def test_a_loop_that_is_gone_or_blocked_ends_the_run(host, blocks, message):
    mine, Ends.over = host(Ends), threading.Event()
    mine.reset({0: ({}, 0)})
    if blocks:
        mine.session._host._answer_s = 0.5
    else:
        Ends.over.set()
    try:
        with pytest.raises(HostError, match=rf"env.name: .*{message}[\s\S]*fix:"):
            mine.step({0: ACTION})
    finally:
        Ends.over.set()


@pytest.mark.parametrize("name", ["cached", "errors", "cut", "turns/mean", "tokens/max"])
def test_info_may_not_hide_the_metrics_of_every_run(name):
    allowed = "keys other than cached, cut, errors"
    with pytest.raises(Exception, match=f"returned the info key '{name}'; allowed: {allowed}"):
        _reply_of(Step(done=True, info={name: 1.0}))


class Slow(Environment):
    async def step(self, action):
        await asyncio.sleep(0.6)
        return Step(done=True)


def test_a_pause_between_two_looks_is_no_block():
    """What the trainer does in between may take longer than an answer may."""
    host = Host(Slow, None, 60.0)
    session = host.session()
    Played(session).reset({0: ({}, 0)})
    host._answer_s = 0.3
    session.step(0, Action("", "", [], "stop", 0))
    session.any_answer()
    while host._asked_at is not None:
        time.sleep(0.01)
    time.sleep(0.5)
    session.any_answer()  # the loop gave a sign of life long ago
    host.close()
