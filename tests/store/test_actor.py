"""Calls that wait: woken by what they wait for, and otherwise back after a slice with where the others stand."""

from __future__ import annotations

import asyncio
import time

from megarl.store.actor import StoreActor
from megarl.store.core import GroupInfo
from megarl.store.standing import Ping
from tests.store.teams import by_hand

KEY = "rollout>critic+ref"
GROUP = GroupInfo("u", 0, ("u#0",), 5)


def test_waiting_calls_are_woken_by_the_last_gift() -> None:
    async def run() -> None:
        actor = StoreActor(by_hand(train=2), 4, "dealt")
        calls = [
            asyncio.create_task(actor.assignment("ref", 1, "rollout", 0, 30.0)),
            asyncio.create_task(actor.fetch("critic", 1, KEY, ["u"], 30.0)),
            asyncio.create_task(actor.read("ref", "m", 30.0)),
        ]
        await asyncio.sleep(0)
        await actor.give("train", 0, 1, KEY, [GROUP], ["bytes"])
        await asyncio.sleep(0.01)
        assert not any(call.done() for call in calls)
        await actor.give("train", 1, 1, KEY, [], [])
        await actor.post("m", "1")
        assert await asyncio.wait_for(asyncio.gather(*calls), 5) == [([GROUP], []), (["bytes"], []), (("1",), [])]
        assert actor._waiting == {}

    asyncio.run(run())


def test_a_slice_without_result_tells_where_the_others_stand() -> None:
    async def run() -> None:
        actor = StoreActor(by_hand(), 4, "dealt")
        await actor.ping("ref", 0, Ping(1, "step/ref_logp", 2, ""))
        start = time.monotonic()
        found, others = await actor.fetch("train", 1, "ref_logp>train", ["u"], 0.1)
        assert 0.05 < time.monotonic() - start < 5
        assert found is None
        assert [other.team for other in others] == ["ref", "critic"]
        assert actor._waiting == {}

    asyncio.run(run())
