"""A replica's clock, against the schedule that it stands for."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megarl.simulation.replica import make_replicas
from megarl.simulation.seconds import Line, Table
from tests.simulation.ideal import makespan

ONE = Table(Line(1.0))
GROUPS = st.lists(st.lists(st.integers(1, 9), min_size=2, max_size=2), min_size=1, max_size=6)


def replica(groups, slots, seconds=ONE):
    (made,) = make_replicas(seconds, slots, prompt=10)
    for number, tokens in enumerate(groups):
        made.add(number, tokens)
    return made


@given(GROUPS, st.integers(1, 6))
def test_samples_take_the_slot_that_is_free_first(groups, slots):
    tokens = [one for group in groups for one in group]
    assert replica(groups, slots).finish() == pytest.approx(makespan(tokens, slots))


@settings(max_examples=13)
@given(GROUPS, st.integers(1, 6), st.lists(st.floats(0.1, 4), max_size=8))
def test_it_does_not_matter_in_which_pieces_time_passes(groups, slots, pieces):
    seconds = Table(Line(0.5, 0.25), prefill_s=Line(0.0, 0.01))
    whole, cut, over = replica(groups, slots, seconds), replica(groups, slots, seconds), []
    total = whole.finish()
    for piece in pieces:
        over += cut.advance(piece)
    over += cut.advance(max(0.0, total - sum(pieces)) + 1e-3)
    assert sorted(over) == list(range(len(groups)))


def test_more_samples_at_a_time_are_slower_each():
    seconds = Table(Line(1.0, 0.5))
    assert replica([[4, 4]], 2, seconds).finish() == 4 * 2.0
    assert replica([[4, 2]], 2, seconds).finish() == 2 * 2.0 + 2 * 1.5
    assert replica([[4, 4]], 1, seconds).finish() == 8 * 1.5


def test_the_next_event_is_a_group_that_is_over_or_room_that_is_wanted():
    made = replica([[2, 5], [3, 9]], 4)
    assert made.until_event(0) == 5
    assert made.until_event(1) == 2
    assert made.advance(5) == [0]
    assert made.until_event(0) == 4


def test_what_ran_on_a_dead_engine_begins_again():
    made = replica([[4]], 2)
    made.advance(3)
    made.fail(restart_s=10)
    assert made.finish() == 10 + 4


def test_new_weights_read_prompts_and_tokens_again():
    made = replica([[4]], 2, Table(Line(1.0), prefill_s=Line(0.0, 0.1)))
    made.advance(1.0 + 2)  # the prompt of 10 tokens, and two tokens
    made.reread()
    assert made.finish() == pytest.approx(12 * 0.1 + 2)
