"""Samples that wait for slots of servers."""

from __future__ import annotations

import asyncio
import random

import pytest

from megarl.rollout.sglang.router import Router
from megarl.rollout.sglang.samples import ServedSample
from megarl.rollout.sglang.slots import Slots


def sample(prompt: int) -> ServedSample:
    return ServedSample(prompt, [prompt], 0)


async def _turn() -> None:
    """Let all tasks go on that can."""
    for _ in range(5):
        await asyncio.sleep(0)


def test_a_free_slot_wakes_one_sample_however_many_wait(monkeypatch: pytest.MonkeyPatch):
    tries, take = [], Router.take
    monkeypatch.setattr(Router, "take", lambda router, prompt: tries.append(prompt) or take(router, prompt))

    async def play(slots: Slots, number: int) -> None:
        server = await slots.take(sample(number // 4))
        await asyncio.sleep(0)
        assert server is not None
        slots.give_back(server)

    async def play_all() -> None:
        slots = Slots(range(4), 2)
        await asyncio.gather(*(play(slots, i) for i in range(400)))

    asyncio.run(play_all())
    assert len(tries) < 3 * 400


def test_samples_do_not_pass_on_a_slot_that_another_one_has_taken(monkeypatch: pytest.MonkeyPatch):
    tries, take = [], Router.take
    monkeypatch.setattr(Router, "take", lambda router, prompt: tries.append(prompt) or take(router, prompt))

    async def play() -> None:
        slots = Slots([0], 1)
        assert await slots.take(sample(0)) == 0
        waiting = [asyncio.create_task(slots.take(sample(prompt))) for prompt in (1, 2, 3)]
        await _turn()
        slots.give_back(0)
        assert await slots.take(sample(4)) == 0  # before a sample that waits for it goes on
        tries.clear()
        for _ in range(20):
            await _turn()
        assert len(tries) == 1
        for _ in waiting:
            slots.give_back(0)
            await _turn()
        assert [task.result() for task in waiting] == [0, 0, 0]

    asyncio.run(play())


def test_a_sample_that_takes_a_slot_of_another_server_passes_on_the_one_that_woke_it():
    async def play() -> list[int]:
        slots = Slots([0, 1], 1)
        assert [await slots.take(sample(prompt)) for prompt in (0, 1)] == [0, 1]
        slots.forget(1)  # server 1 has fewer prompts, so new prompts prefer it
        waiting = [asyncio.create_task(slots.take(sample(prompt))) for prompt in (2, 2, 3)]
        await _turn()
        for server in (0, 1):  # both are free before any sample goes on
            slots.give_back(server)
        await _turn()
        return [task.result() for task in waiting if task.done()]

    assert asyncio.run(play()) == [1, 0]


def test_every_sample_gets_a_slot_whatever_is_aborted_dropped_and_added():
    async def play(slots: Slots, each: ServedSample, alive: set[int], random_: random.Random) -> int | None:
        while True:
            server = await slots.take(each)
            if server is None:
                return None
            for _ in range(random_.randrange(4)):
                await asyncio.sleep(0)
            slots.give_back(server)
            if server in alive:
                return server

    async def play_all(seed: int) -> None:
        random_, alive = random.Random(seed), {0, 1, 2}
        slots, samples = Slots(alive, 2), [sample(i // 3) for i in range(60)]
        running = [asyncio.create_task(play(slots, each, alive, random_)) for each in samples]
        for each in samples[::7]:
            await asyncio.sleep(0)
            each.aborted = True
            slots.wake(each)
        alive.discard(1)
        slots.drop(1)
        await _turn()
        alive.add(3)
        slots.add(3)
        ends = await asyncio.wait_for(asyncio.gather(*running), 20)
        assert all(end is not None or each.aborted for end, each in zip(ends, samples, strict=True))

    for seed in range(20):
        asyncio.run(play_all(seed))


def test_samples_that_wait_get_no_slot_when_no_server_is_left():
    async def play() -> list[int | None]:
        slots = Slots([0], 1)
        assert await slots.take(sample(0)) == 0
        waiting = [asyncio.create_task(slots.take(sample(prompt))) for prompt in (0, 1)]
        await _turn()
        slots.drop(0)
        return await asyncio.wait_for(asyncio.gather(*waiting), 20)

    assert asyncio.run(play()) == [None, None]


def test_a_new_prompt_goes_to_a_server_with_room_rather_than_to_one_with_fewer_prompts():
    router = Router(["a", "b"], capacity=2)
    assert [router.take("p"), router.take("p"), router.take("q")] == ["a", "a", "b"]
    router.take("r")
    router.give_back("b")
    assert router.take("s") == "b"
