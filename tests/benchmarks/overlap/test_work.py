"""What a run has to do."""

from __future__ import annotations

import statistics

import pytest

from megarl.benchmarks.overlap.ideal import makespan
from megarl.benchmarks.overlap.work import CASES, SEED, TOKEN_S, Work
from megarl.rollout.seeds import env_seed


def test_samples_are_log_normal_and_their_own(tmp_path):
    balanced = CASES["balanced"]
    seconds = [s for number in range(2000) for s in balanced.seconds(number)]
    assert statistics.fmean(seconds) == pytest.approx(balanced.mean_s, rel=0.03)
    assert min(seconds) >= TOKEN_S
    assert max(seconds) <= balanced.longest * TOKEN_S
    balanced.write(tmp_path)
    assert Work.read(tmp_path).seconds(7) == balanced.seconds(7) != balanced.seconds(8)


def test_phases_are_balanced_where_the_case_says_so():
    mean = {
        name: statistics.fmean(makespan(work.step_seconds(step), work.slots) for step in range(1, 201))
        for name, work in CASES.items()
    }
    assert mean["balanced"] == pytest.approx(CASES["balanced"].training_s, rel=0.1)
    assert mean["tails"] > 2 * CASES["tails"].training_s


def test_an_environment_takes_the_seconds_of_its_sample_and_decoding_those_of_a_token():
    work = CASES["environments"]
    seconds = [work.answer_s(env_seed(SEED, "train-0-3"), sample) for sample in range(work.samples)]
    assert work.seconds(3) == [TOKEN_S + each for each in seconds]
    assert len(set(seconds)) > 1
