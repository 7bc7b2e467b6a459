"""When a replica calls the buffer."""

from __future__ import annotations

from megarl.disaggregated.call_batcher import CallBatcher


def batching(places: int = 32, most: int = 256, segment_s: float = 32.0) -> CallBatcher:
    """After a stretch of so many seconds, at time 0."""
    batcher = CallBatcher(places, most)
    batcher.begin(-segment_s)
    batcher.begin(0.0)
    return batcher


def due(batcher: CallBatcher, now: float, missing: int = 0, *, finished: bool = True, empty: bool = False) -> bool:
    return batcher.is_due(now, missing, finished=finished, empty=empty)


def test_a_call_is_put_off_for_a_32nd_of_a_stretch():
    batcher = batching(segment_s=32.0)
    assert not due(batcher, 10.0)
    assert not due(batcher, 10.9)
    assert due(batcher, 11.0)
    assert due(batcher, 11.5), "until there has been one"
    batcher.called()
    assert not due(batcher, 11.6)


def test_it_is_never_put_off_for_more_than_two_seconds():
    batcher = batching(segment_s=1e6)
    assert not due(batcher, 0.0)
    assert due(batcher, 2.0)


def test_in_the_first_stretch_nothing_is_put_off():
    batcher = CallBatcher(32, 256)
    batcher.begin(0.0)
    assert due(batcher, 5.0)


def test_there_is_no_call_without_a_reason():
    assert not due(batching(), 1e6, finished=False, empty=True)


def test_a_replica_with_an_empty_place_calls_at_once():
    assert due(batching(), 0.0, empty=True)
    assert due(batching(), 0.0, 1, finished=False, empty=True)


def test_a_replica_that_has_none_in_hand_for_the_next_place_calls_at_once():
    assert not due(batching(places=32), 0.0, 3)
    assert due(batching(places=32), 0.0, 4)
    assert not due(batching(places=32), 0.0, 4, finished=False), "no place gets empty soon"
    assert not due(batching(places=32, most=32), 0.0), "it never has any in hand"


def test_it_asks_for_what_it_has_places_for_and_takes_others_in_hand_only_after_that():
    batcher = batching(places=32)
    assert batcher.missing(32, 0) == 32
    assert batcher.missing(0, 3) == 0
    batcher.called()
    assert batcher.missing(0, 0) == 4
    assert batcher.missing(2, 0) == 6
    assert batcher.missing(0, 5) == 0
    batcher.begin(1.0)
    assert batcher.missing(32, 0) == 32, "and so in every segment"


def test_no_replica_holds_in_hand_what_another_one_has_a_place_for():
    """Four replicas of 16 places come to a weight update; B = 64 groups may begin. The last one calls later."""
    left, drawn = 64, []
    replicas = [batching(places=16, most=32) for _ in range(4)]
    for place, batcher in enumerate(replicas):
        began = 0
        for now in (0.0, 0.01, 0.02) if place < 3 else (0.03,):
            most = batcher.missing(16 - began, 0)
            if due(batcher, now, most, finished=False, empty=began < 16):
                began, left = began + min(most, left), left - min(most, left)
                batcher.called()
        drawn.append(began)
    assert drawn == [16, 16, 16, 16]


def test_it_has_an_eighth_of_its_places_in_hand_if_it_may_hold_so_many():
    assert CallBatcher(32, 256).in_hand == 4
    assert CallBatcher(32, 33).in_hand == 1
    assert CallBatcher(32, 32).in_hand == 0
    assert CallBatcher(7, 256).in_hand == 0
