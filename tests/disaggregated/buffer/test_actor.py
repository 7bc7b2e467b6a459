"""Calls that wait: woken by what they wait for, and otherwise back after a slice with where the others stand."""

from __future__ import annotations

import asyncio
import gc
import time
import tracemalloc
from collections import Counter
from typing import Any

import pytest

from megarl.disaggregated.buffer.actor import BufferActor
from megarl.disaggregated.buffer.core import GroupInfo, HandoverError
from megarl.disaggregated.buffer.progress import Ping
from tests.disaggregated.buffer.teams import by_hand

KEY = "rollout>critic+ref"
GROUP = GroupInfo("u", 0, ("u#0",), 5)


async def change(actor: BufferActor, team: str, rank: int, serial: int, method: str, *arguments: Any) -> Any:
    return await actor.change(team, rank, 0, serial, method, arguments)


async def assignment(actor: BufferActor, team: str, step: int, slice_s: float) -> Any:
    return await actor.wait(team, ("samples", step, "rollout"), "assignment", [team, step, "rollout", 0], slice_s)


async def fetch(actor: BufferActor, team: str, step: int, slice_s: float, key: str = KEY) -> Any:
    return await actor.wait(team, ("handover", step, key), "fetch", [team, step, key, ["u"]], slice_s)


async def read(actor: BufferActor, team: str, name: str, slice_s: float) -> Any:
    return await actor.wait(team, ("mail", name), "read", [name], slice_s)


def test_waiting_calls_are_woken_when_the_last_rank_has_given() -> None:
    async def run() -> None:
        actor = BufferActor(by_hand(train=2), 4, "dealt")
        calls = [
            asyncio.create_task(assignment(actor, "ref", 1, 300.0)),
            asyncio.create_task(fetch(actor, "critic", 1, 300.0)),
            asyncio.create_task(read(actor, "ref", "m", 300.0)),
        ]
        await asyncio.sleep(0)
        await change(actor, "train", 0, 1, "give", "train", 0, 1, KEY, [GROUP], ["bytes"])
        await asyncio.sleep(0.01)
        assert not any(call.done() for call in calls)
        await change(actor, "train", 1, 1, "give", "train", 1, 1, KEY, [], [])
        await change(actor, "train", 1, 2, "post", "m", "1")
        assert await asyncio.wait_for(asyncio.gather(*calls), 60) == [([GROUP], []), (["bytes"], []), ("1", [])]
        assert actor._waiting == {}

    asyncio.run(run())


def test_a_repeated_call_has_the_same_answer_and_changes_nothing() -> None:
    async def run() -> None:
        actor = BufferActor(by_hand(), 4, "dealt")
        give = ("train", 0, 1, "give", "train", 0, 1, KEY, [GROUP], ["bytes"])
        assert [await change(actor, *give) for _ in range(2)] == [None, None]
        assert (await fetch(actor, "critic", 1, 1.0))[0] == ["bytes"]
        for _ in range(2):
            with pytest.raises(HandoverError, match="this rank has already handed over its groups"):
                await change(actor, "train", 0, 2, *give[3:])

    asyncio.run(run())


def test_a_process_of_an_earlier_start_of_its_team_changes_nothing() -> None:
    async def run() -> None:
        actor = BufferActor(by_hand(), 4, "dealt")
        await change(actor, "ref", 0, 1, "post", "m", "1")
        await actor.restart_team("ref", 1, 60.0)
        with pytest.raises(HandoverError, match="this process of team 'ref', rank 0, must end"):
            await change(actor, "ref", 0, 2, "post", "n", "1")
        await actor.change("ref", 0, 1, 1, "post", ["n", "2"])  # the new process counts its calls from 1
        assert (await read(actor, "train", "n", 1.0))[0] == "2"

    asyncio.run(run())


def test_a_slice_without_result_tells_where_the_others_stand() -> None:
    async def run() -> None:
        actor = BufferActor(by_hand(), 4, "dealt")
        await actor.ping("ref", {0: Ping(1, "step/ref_logp", 2, "")})
        start = time.monotonic()
        found, others = await fetch(actor, "train", 1, 0.1, "ref_logp>train")
        assert time.monotonic() - start > 0.05
        assert found is None
        assert [other.team for other in others] == ["ref", "critic"]
        assert actor._waiting == {}

    asyncio.run(run())


def test_the_buffer_takes_no_more_memory_after_many_steps() -> None:
    serials = Counter[str]()

    async def steps(actor: BufferActor, numbers: range) -> None:
        for step in numbers:
            told = f"{step:01000}"
            calls = {
                "train": [("give", "train", 0, step, KEY, [GROUP], [told]), ("post", f"weights/{step}", told)],
                "ref": [
                    ("give", "ref", 0, step, "ref_logp>train", [GROUP], [told]),
                    ("arrive", "ref", 0, f"here/{step}", told),
                ],
                "critic": [],
            }
            for team, some in calls.items():
                for call in (*some, ("done", team, 0, step)):
                    serials[team] += 1
                    await change(actor, team, 0, serials[team], *call)
                await actor.ping(team, {0: Ping(step, "step", step, "")})
                if team == "train":
                    assert (await assignment(actor, "ref", step, 1.0))[0] == [GROUP]
                    assert (await fetch(actor, "ref", step, 1.0))[0] == [told]
                assert not await actor.query("is_posted", [f"weights/{step + 1}"])
            assert (await read(actor, "ref", f"nobody/{step}", 0.0))[0] is None

    async def run() -> None:
        actor = BufferActor(by_hand(), 4, "dealt")
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
