"""A generation that sleeps does what an engine does, in the seconds that its samples take."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from megarl.benchmarks.overlap import sleeping
from megarl.benchmarks.overlap.sleeping import Sleeping
from megarl.benchmarks.overlap.work import TOKEN_S, Work

EOS, PROMPT = 2, [3, 4]


@dataclass
class Clock:
    now: float = 100.0

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds + 1e-9


class Seeded(Work):
    def tokens(self, seed: int) -> int:
        return seed


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr(sleeping, "time", made)
    return made


def opened(slots: int = 2, version: int = 0, interrupted=None) -> Sleeping:
    kept = {} if interrupted is None else interrupted
    return Sleeping(Seeded(1, 1, slots, 1.0, 0.5, 100, 1.0), slots, version, EOS, kept)


def test_turns_are_side_by_side_as_far_as_there_are_slots(clock):
    turns = opened(slots=2)
    for sequence, tokens in enumerate([10, 4, 2]):
        turns.submit(sequence, PROMPT, tokens, 100)
    order = []
    while len(order) < 3:
        for sequence, done in turns.wait().items():
            order.append((sequence, round((clock.now - 100) / TOKEN_S), len(done.token_ids), done.finish_reason))
    assert order == [(1, 4, 4, "stop"), (2, 6, 2, "stop"), (0, 10, 10, "stop")]


def test_time_that_passes_between_two_calls_counts(clock):
    turns = opened(slots=1)
    turns.submit(0, PROMPT, 4, 100)
    turns.submit(1, PROMPT, 4, 100)
    clock.sleep(6 * TOKEN_S)
    assert list(turns.wait()) == [0]
    assert list(turns.wait()) == [1]
    assert clock.now == pytest.approx(100 + 8 * TOKEN_S, abs=1e-6)


def test_an_interrupted_sample_goes_on_where_it_was_and_ends_as_if_nothing_had_been(clock):
    kept = {}
    turns = opened(version=3, interrupted=kept)
    turns.submit(0, PROMPT, 10, 100)
    turns.submit(1, PROMPT, 1, 100)
    assert list(turns.wait()) == [1]
    turns.wait(lambda: clock.now > 100 + 4.5 * TOKEN_S)
    turns.abort(0)
    first = turns.wait()[0]
    assert (len(first.token_ids), first.finish_reason, first.versions) == (4, "abort", [[3, 4]])
    clock.sleep(1.0)  # new weights
    again, start = opened(version=4, interrupted=kept), clock.now
    again.submit(0, [*PROMPT, *first.token_ids], 77, 96)
    second = again.wait()[0]
    assert (len(second.token_ids), second.token_ids[-1], second.finish_reason) == (6, EOS, "stop")
    assert clock.now - start == pytest.approx(5.5 * TOKEN_S, abs=0.02)


def test_what_has_no_slot_or_no_token_yet_begins_again_with_its_seed(clock):
    kept = {}
    turns = opened(slots=1, interrupted=kept)
    for sequence in (0, 1):
        turns.submit(sequence, PROMPT, 5 + sequence, 100)
    for sequence in (0, 1):
        turns.abort(sequence)
    assert [done.token_ids for done in turns.wait().values()] == [[], []]
    again = opened(slots=2, interrupted=kept)
    for sequence in (0, 1):
        again.submit(sequence, PROMPT, 5 + sequence, 100)
    assert [len(done.token_ids) for done in [*again.wait().values(), *again.wait().values()]] == [5, 6]


def test_a_sample_ends_where_its_room_does(clock):
    turns = opened()
    turns.submit(0, PROMPT, 9, 4)
    done = turns.wait()[0]
    assert (len(done.token_ids), done.finish_reason) == (4, "length")
