"""Routing of samples over servers."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megarl.rollout.sglang.router import NoServerError, Router


def test_samples_of_a_prompt_stay_together_and_prompts_are_spread() -> None:
    router = Router(["a", "b"], capacity=8)
    taken = {prompt: {router.take(prompt) for _ in range(3)} for prompt in range(4)}
    assert all(len(servers) == 1 for servers in taken.values())
    assert sorted(next(iter(servers)) for servers in taken.values()) == ["a", "a", "b", "b"]


def test_a_full_server_makes_its_prompts_wait() -> None:
    router = Router(["a", "b"], capacity=2)
    home = router.take("p")
    assert home is not None
    assert router.take("p") == home
    assert router.take("p") is None
    router.give_back(home)
    assert router.take("p") == home


def test_prompts_of_a_dropped_server_find_another() -> None:
    router = Router(["a", "b"], capacity=2)
    home = router.take("p")
    assert home is not None
    router.drop(home)
    router.give_back(home)  # the sample that was there comes back late
    assert router.take("p") not in (home, None)
    router.drop(router.names[0])
    with pytest.raises(NoServerError):
        router.take("p")


def test_a_finished_prompt_makes_room_for_a_new_one() -> None:
    router = Router(["a", "b"], capacity=8)
    first, second = router.take("p"), router.take("q")
    assert first != second
    assert first is not None
    router.give_back(first)
    router.forget("p")
    assert router.take("r") == first


@settings(deadline=None)
@given(st.lists(st.tuples(st.sampled_from(["take", "give", "drop"]), st.integers(0, 5)), max_size=60))
def test_capacity_is_never_exceeded_and_dropped_servers_never_come_back(steps: list[tuple[str, int]]) -> None:
    router, held, dropped = Router([0, 1, 2], capacity=2), [], set()
    for action, value in steps:
        if action == "take" and router.names:
            name = router.take(value)
            if name is not None:
                held.append(name)
        elif action == "give" and held:
            router.give_back(held.pop(value % len(held)))
        elif action == "drop" and value < 3:
            router.drop(value)
            dropped.add(value)
        alive = [name for name in held if name not in dropped]
        assert all(alive.count(name) <= 2 for name in alive)
        assert not set(router.names) & dropped
