"""Calls that wait: woken by what they wait for, and otherwise back after a slice with where the others stand."""

from __future__ import annotations

import asyncio
import gc
import json
import time
import tracemalloc
from collections import Counter
from pathlib import Path
from typing import Any

from megarl.disaggregated.buffer.actor import StoreActor
from megarl.disaggregated.buffer.core import GroupInfo
from megarl.disaggregated.buffer.progress import Ping
from tests.disaggregated.buffer.teams import by_hand

KEY = "rollout>critic+ref"
GROUP = GroupInfo("u", 0, ("u#0",), 5)


async def change(actor: StoreActor, team: str, rank: int, serial: int, *call: Any, refs: Any = ()) -> Any:
    return await actor.change(team, rank, serial, json.dumps(call), refs)


def test_waiting_calls_are_woken_when_the_last_rank_has_given(tmp_path: Path) -> None:
    async def run() -> None:
        actor = StoreActor("s", by_hand(train=2), 4, "dealt", tmp_path / "j")
        calls = [
            asyncio.create_task(actor.assignment("ref", 1, "rollout", 0, 300.0)),
            asyncio.create_task(actor.fetch("critic", 1, KEY, ["u"], 300.0)),
            asyncio.create_task(actor.read("ref", "m", 300.0)),
        ]
        await asyncio.sleep(0)
        ack, _ = await change(actor, "train", 0, 1, "give", "train", 0, 1, KEY, [GROUP], refs=["bytes"])
        assert ack == (1, [], [], None)
        await asyncio.sleep(0.01)
        assert not any(call.done() for call in calls)
        await change(actor, "train", 1, 1, "give", "train", 1, 1, KEY, [])
        await change(actor, "train", 1, 2, "post", "m", "1")
        assert await asyncio.wait_for(asyncio.gather(*calls), 60) == [([GROUP], []), (["bytes"], []), (("1",), [])]
        assert actor._waiting == {}

    asyncio.run(run())


def test_after_a_restart_readers_are_woken_by_references_that_are_given_again(tmp_path: Path) -> None:
    async def run() -> None:
        def actor() -> StoreActor:
            return StoreActor("s", by_hand(), 4, "dealt", tmp_path / "j")

        give = ("train", 0, 1, "give", "train", 0, 1, KEY, [GROUP])
        await change(actor(), *give, refs=["bytes"])
        for again in (
            lambda one: one.give_again("train", 0, [1], [["bytes"]]),
            lambda one: change(one, *give, refs=["bytes"]),  # nobody heard the answer
        ):
            one = actor()
            assert await one.ping("train", 0, Ping(1, "step", 1, "")) == (1, [], [1], [1])
            call = asyncio.create_task(one.fetch("critic", 1, KEY, ["u"], 300.0))
            await asyncio.sleep(0.01)
            assert not call.done()
            await again(one)
            assert await asyncio.wait_for(call, 60) == (["bytes"], [])

    asyncio.run(run())


def test_a_slice_without_result_tells_where_the_others_stand(tmp_path: Path) -> None:
    async def run() -> None:
        actor = StoreActor("s", by_hand(), 4, "dealt", tmp_path / "j")
        await actor.ping("ref", 0, Ping(1, "step/ref_logp", 2, ""))
        start = time.monotonic()
        found, others = await actor.fetch("train", 1, "ref_logp>train", ["u"], 0.1)
        assert time.monotonic() - start > 0.05
        assert found is None
        assert [other.team for other in others] == ["ref", "critic"]
        assert actor._waiting == {}

    asyncio.run(run())


def test_the_store_takes_no_more_memory_after_many_steps(tmp_path: Path) -> None:
    serials = Counter[str]()

    async def steps(actor: StoreActor, numbers: range) -> None:
        for step in numbers:
            told = f"{step:01000}"
            calls = {
                "train": [("give", "train", 0, step, KEY, [GROUP]), ("post", f"weights/{step}", told)],
                "ref": [("give", "ref", 0, step, "ref_logp>train", [GROUP]), ("arrive", "ref", 0, f"here/{step}")],
                "critic": [],
            }
            for team, some in calls.items():
                for call in (*some, ("done", team, 0, step)):
                    serials[team] += 1
                    await change(actor, team, 0, serials[team], *call, refs=[told] if call[0] == "give" else [])
                await actor.ping(team, 0, Ping(step, "step", step, ""))
                if team == "train":
                    assert (await actor.assignment("ref", step, "rollout", 0, 1.0))[0] == [GROUP]
                    assert (await actor.fetch("ref", step, KEY, ["u"], 1.0))[0] == [told]
                assert await actor.peek(f"weights/{step + 1}") is None
            assert (await actor.read("ref", f"nobody/{step}", 0.0))[0] is None

    async def run() -> None:
        actor = StoreActor("s", by_hand(), 4, "dealt", tmp_path / "j")
        tracemalloc.start()
        try:
            taken = []
            for numbers in (
                range(300, 400),
                range(400, 500),
            ):  # of mail the last 64 are kept; Python has ints below 257
                await steps(actor, numbers)
                gc.collect()
                taken.append(tracemalloc.get_traced_memory()[0])
            assert taken[1] - taken[0] < 400 * 100, "bytes of the last 100 steps"
        finally:
            tracemalloc.stop()

    asyncio.run(run())
