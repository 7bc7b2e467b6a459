"""Who has made progress when, by what workers say."""

from __future__ import annotations

from megarl.disaggregated.buffer.progress import Ping, ProgressTable


def test_of_every_other_team_the_worker_that_moved_last_is_told() -> None:
    table = ProgressTable(["train", "ref", "critic"], now=100.0)
    table.ping("ref", 0, Ping(5, "step/ref_logp", 3, ""), 110.0)
    table.ping("ref", 1, Ping(1, "step/take", 3, "mail 'm'"), 112.0)
    table.ping("ref", 0, Ping(5, "step/ref_logp", 3, ""), 115.0)  # still alive, no further
    told = table.others("train", 120.0)
    assert [(s.team, s.rank, s.silent_s) for s in told] == [("ref", 1, 8.0), ("critic", 0, 20.0)]
    assert str(told[0]) == (
        "team 'ref' rank 1: in phase step/take at step 3, waiting for mail 'm', last progress 8 s ago"
    )
    assert str(told[1]) == "team 'critic' rank 0: has not connected to the buffer, 20 s after it started"


def test_whoever_moves_again_was_silent_no_longer() -> None:
    table = ProgressTable(["train", "ref"], now=0.0)
    table.ping("ref", 0, Ping(5, "a", 1, ""), 1.0)
    table.ping("ref", 0, Ping(6, "b", 1, ""), 9.0)
    assert table.others("train", 10.0)[0].silent_s == 1.0
