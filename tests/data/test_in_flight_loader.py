"""New prompts of a round: as many as are missing, every prompt once, to the replicas with the fewest groups."""

from __future__ import annotations

import itertools
import random

import hypothesis.strategies as st
from hypothesis import given

from megarl.data.in_flight_loader import InFlightLoader
from tests.data.test_loader import Numbers


def loaders(ranks: int, batch: int, most: int, size: int = 7) -> list[InFlightLoader]:
    return [InFlightLoader(Numbers(size), batch, rank, ranks, most=most) for rank in range(ranks)]


@given(st.integers(1, 4), st.integers(1, 6), st.integers(0, 6), st.integers(0, 99))
def test_every_prompt_begins_once_and_replicas_have_equally_many_groups(ranks, batch, more, seed):
    drawn, every = random.Random(seed), loaders(ranks, batch, batch + more)
    held = [[] for _ in every]
    started, rounds = list[int](), 6
    for left in range(rounds, 0, -1):
        for loader in every:
            loader.in_flight, loader.needed = [len(groups) for groups in held], left * batch
        for loader, groups in zip(every, held, strict=True):
            samples = next(loader)["at"]
            assert samples == [[number // 7, loader._indices(number // 7)[number % 7]] for number in loader.numbers]
            groups += loader.numbers
            started += loader.numbers
        assert sum(map(len, held)) == min(batch + more, left * batch)
        assert max(map(len, held)) <= -(-(batch + more) // ranks)
        assert len({loader.number for loader in every}) == 1
        for number in drawn.sample(sorted(itertools.chain.from_iterable(held)), batch):
            next(groups for groups in held if number in groups).remove(number)
    assert sorted(started) == list(range(rounds * batch)), "a group begins that no round needs"
    assert held == [[] for _ in every]


def test_what_is_in_flight_is_not_used_and_a_state_goes_on_on_any_number_of_ranks():
    (loader,) = loaders(1, 4, 6)
    next(loader)
    loader.in_flight = [2]
    assert (loader.number, loader.used) == (6, 4)
    shares = loaders(2, 4, 6)
    for other in shares:
        other.load_state_dict(loader.state_dict())
        other.in_flight = [2, 0]
    new = [next(other)["at"] for other in shares]
    assert [len(share) for share in new] == [1, 3]
    shared = sorted(tuple(at) for share in new for at in share)
    assert shared == sorted(tuple(at) for at in next(loader)["at"])
