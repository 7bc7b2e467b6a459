"""Continuous batching simulated without a model."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from megarl.rollout.embedded.scheduler import Scheduler
from megarl.rollout.engine import Request

prompts = st.lists(st.tuples(st.integers(1, 9), st.integers(0, 5)), min_size=1, max_size=8)


def make_requests(shapes: list[tuple[int, int]]) -> list[Request]:
    return [Request([0] * length, list(range(n))) for length, n in shapes]


@given(prompts, st.integers(1, 7), st.integers(1, 20), st.randoms(use_true_random=False))
def test_every_sample_runs_once_with_its_prompt_in_its_row(shapes, slots, budget, random):
    scheduler = Scheduler(make_requests(shapes), slots, budget)
    rows: list[int | None] = [None] * slots  # request whose prompt a row holds
    seen: list[int] = []
    while True:
        admission = scheduler.admit()
        if admission is not None:
            for source, target in admission.copies:
                rows[target] = rows[source]
            for batch in admission.prefills:
                lengths = [shapes[r][0] - 1 for r in batch.requests]
                assert len(lengths) == 1 or max(lengths) * len(lengths) <= budget
                for request, targets in zip(batch.requests, batch.rows, strict=True):
                    for row in targets:
                        rows[row] = request
            seen += [s.id for s in admission.samples]
        running = scheduler.running
        if not running:
            break
        assert len(running) <= slots
        assert all(rows[row] == s.request for row, s in enumerate(running) if s.prompt_tokens > 1)
        done = random.sample(range(len(running)), random.randint(1, len(running)))
        before = list(running)
        for mover, hole in scheduler.finish(done):
            rows[hole] = rows[mover]
        assert {s.id for s in scheduler.running} == {s.id for row, s in enumerate(before) if row not in done}
    assert seen == list(range(sum(n for _, n in shapes)))


def test_samples_of_one_prompt_share_one_prefill():
    scheduler = Scheduler(make_requests([(5, 3), (4, 2)]), 8, 100)
    admission = scheduler.admit()
    assert [(b.requests, b.rows) for b in admission.prefills] == [([1, 0], [[3, 4], [0, 1, 2]])]
    assert admission.copies == []


def test_a_late_sample_copies_the_prompt_of_a_running_sibling():
    scheduler = Scheduler(make_requests([(5, 3)]), 2, 100)
    scheduler.admit()
    scheduler.finish([0])
    admission = scheduler.admit()
    assert admission.prefills == []
    assert admission.copies == [(0, 1)]


def test_nothing_waits_for_a_full_house():
    scheduler = Scheduler(make_requests([(5, 3)]), 2, 100)
    scheduler.admit()
    assert scheduler.admit() is None
