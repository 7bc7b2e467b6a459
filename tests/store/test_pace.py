"""When a replica calls the store."""

from __future__ import annotations

from megarl.store.pace import Pace


def paced(places: int = 32, most: int = 256, stretch_s: float = 32.0) -> Pace:
    """After a stretch of so many seconds, at time 0."""
    pace = Pace(places, most)
    pace.begin(-stretch_s)
    pace.begin(0.0)
    return pace


def due(pace: Pace, now: float, missing: int = 0, *, finished: bool = True, idle: bool = False) -> bool:
    return pace.is_due(now, missing, finished=finished, idle=idle)


def test_a_call_is_put_off_for_a_32nd_of_a_stretch():
    pace = paced(stretch_s=32.0)
    assert not due(pace, 10.0)
    assert not due(pace, 10.9)
    assert due(pace, 11.0)
    assert due(pace, 11.5), "until there has been one"
    pace.called()
    assert not due(pace, 11.6)


def test_it_is_never_put_off_for_more_than_two_seconds():
    pace = paced(stretch_s=1e6)
    assert not due(pace, 0.0)
    assert due(pace, 2.0)


def test_in_the_first_stretch_nothing_is_put_off():
    pace = Pace(32, 256)
    pace.begin(0.0)
    assert due(pace, 5.0)


def test_there_is_no_call_without_a_reason():
    assert not due(paced(), 1e6, finished=False, idle=True)


def test_a_replica_that_draws_nothing_calls_at_once():
    assert due(paced(), 0.0, idle=True)


def test_a_replica_that_lacks_an_eighth_of_its_prompts_calls_at_once():
    assert not due(paced(places=32), 0.0, 3)
    assert due(paced(places=32), 0.0, 4)
    assert due(paced(places=2), 0.0, 1), "one at least"


def test_it_has_an_eighth_of_its_places_in_hand_if_it_may_hold_so_many():
    assert Pace(32, 256).in_hand == 4
    assert Pace(32, 33).in_hand == 1
    assert Pace(32, 32).in_hand == 0
    assert Pace(7, 256).in_hand == 0
