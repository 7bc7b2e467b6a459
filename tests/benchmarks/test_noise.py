"""What counts as slower: of seconds that are made up, and of code that is really run."""

from __future__ import annotations

import random
import statistics
import time

import pytest

from megarl.benchmarks.noise import APART, LEAST, apart, in_turn

pytestmark = pytest.mark.alone


def rounds(rng, number=10, noise=0.03, factor=1.0):
    return [factor * rng.lognormvariate(0, noise) for _ in range(number)]


def test_the_same_seconds_are_not_slower():
    judged = in_turn([1.0] * 5, [1.0] * 5)
    assert (judged.ratio, judged.low, judged.high, judged.slower) == (1, 1, 1, False)


def test_a_tenth_is_found_and_nothing_else_in_a_hundred_sessions():
    rng, found, false = random.Random(1), 0, 0
    for _ in range(50):
        false += in_turn(rounds(rng), rounds(rng)).slower
        found += in_turn(rounds(rng, factor=1.1), rounds(rng)).slower
    assert false == 0
    assert found > 47


def test_what_disturbs_both_of_a_pair_does_not_count():
    rng = random.Random(2)
    disturbed = [rng.uniform(1, 3) for _ in range(10)]
    then = [one * two for one, two in zip(disturbed, rounds(rng), strict=True)]
    now = [one * two for one, two in zip(disturbed, rounds(rng, factor=1.1), strict=True)]
    assert in_turn(now, then).slower
    assert not apart(now, then).slower


def test_faster_is_told_and_no_regression():
    judged = in_turn([0.8] * 5, [1.0] * 5)
    assert judged.faster
    assert not judged.slower


def test_sessions_apart_are_judged_by_what_sessions_of_one_commit_differed_by():
    rng = random.Random(3)
    then, now = rounds(rng, noise=0.005), rounds(rng, noise=0.005, factor=1.07)
    quiet = [rounds(rng, noise=0.005) for _ in range(5)]
    loud = [rounds(rng, noise=0.005, factor=1 + 0.05 * at) for at in range(5)]
    assert apart(now, then).limit == 1 + APART
    assert not apart(now, then).slower
    assert apart(now, then, quiet).slower
    assert apart(now, then, quiet).limit == pytest.approx(1 + LEAST, abs=0.02)
    assert not apart(now, then, loud).slower


def work(loops: int) -> float:
    """CPU-seconds of a piece of work: the least of three, as a step of a benchmark is a median of several."""
    found = []
    for _ in range(3):
        began, total = time.process_time(), 0.0
        for number in range(loops):
            total += (number & 7) * 0.5
        found.append(time.process_time() - began)
    return min(found)


def session(now: int, then: int, number: int = 15):
    pairs = [(work(now), work(then)) if at % 2 else tuple(reversed((work(then), work(now)))) for at in range(number)]
    return in_turn([one for one, _ in pairs], [other for _, other in pairs])


def test_a_planted_tenth_of_real_work_is_found_and_repeats_of_the_same_code_are_silent():
    loops = 100_000
    assert [session(loops, loops).slower for _ in range(2)] == [False] * 2
    planted = session(loops * 11 // 10, loops)
    assert planted.slower
    assert planted.ratio == pytest.approx(1.1, abs=0.05)
    assert statistics.median([planted.low, planted.high]) > 1
