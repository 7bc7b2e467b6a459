"""The pipeline without overheads: closed formulas for equal samples, and a clock that ticks for others."""

from __future__ import annotations

import statistics
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megarl.rollout.seeds import Seeds
from tests.simulation.ideal import CASES, SEED, TOKEN_S, Work, flowing, in_order, makespan, synchronous


@dataclass(frozen=True)
class Listed(Work):
    """Samples whose seconds are given, by prompt; None: 3 each."""

    listed: list[list[int]] | None = None

    def seconds(self, number):
        return [3.0] * self.samples if self.listed is None else [float(s) for s in self.listed[number]]


def work(training: float, listed: list[list[int]] | None = None, groups=2, samples=2, slots=4) -> Listed:
    return Listed(groups, samples, slots, 1.0, 0.5, 100, training, listed=listed)


def steady(ends: list[float]) -> float:
    """Seconds of a step in the long run: where the cycle of weight updates is any number of steps up to 4."""
    return (ends[-13] - ends[-25]) / 12


def test_samples_are_log_normal_and_their_own():
    balanced = CASES["balanced"]
    seconds = [s for number in range(2000) for s in balanced.seconds(number)]
    assert statistics.fmean(seconds) == pytest.approx(balanced.mean_s, rel=0.03)
    assert min(seconds) >= TOKEN_S
    assert max(seconds) <= balanced.longest * TOKEN_S
    assert balanced.seconds(7) != balanced.seconds(8)


def test_phases_are_balanced_where_the_case_says_so():
    mean = {
        name: statistics.fmean(makespan(work.step_seconds(step), work.slots) for step in range(1, 201))
        for name, work in CASES.items()
    }
    assert mean["balanced"] == pytest.approx(CASES["balanced"].training_s, rel=0.1)
    assert mean["tails"] > 2 * CASES["tails"].training_s


def test_an_environment_takes_the_seconds_of_its_sample_and_decoding_those_of_a_token():
    work = CASES["environments"]
    seconds = [work.answer_s(Seeds(SEED).env("train-0-3"), sample) for sample in range(work.samples)]
    assert work.seconds(3) == [TOKEN_S + each for each in seconds]
    assert len(set(seconds)) > 1


def test_samples_take_the_slot_that_is_free_first():
    assert makespan([3, 1, 1, 2], slots=2) == 4
    assert makespan([3, 1, 1, 2], slots=9) == 3


@pytest.mark.parametrize("training", [1.0, 3.0, 5.0])
def test_equal_samples_have_a_closed_formula(training):
    equal = work(training)
    assert steady(synchronous(equal, 40)) == 3 + training
    for lag in (1, 2, 3):
        assert steady(in_order(equal, 40, lag)) == max(3, training)
        assert steady(flowing(equal, 40, lag, partial=True)) == max(3, training)
        assert steady(flowing(equal, 40, lag, partial=False)) == max(3, training)


def test_two_steps_by_hand():
    listed = [[1, 1], [4, 1], [2, 2], [1, 1]]  # step 1 draws prompts 0 and 1, step 2 the others
    assert synchronous(work(2, listed), 2) == [6, 10]
    assert in_order(work(2, listed), 2) == [6, 8]
    # k = 2: step 2 is drawn at 4, step 3 at 8, both with weights 0. Step 4 needs weights 1, which are there from 3 on
    # and go at 8, before step 3 is trained: it is drawn at 9, and training waits for nothing more.
    longer = [[1, 1], [1, 1], [3, 1], [1, 1], [4, 1], [1, 1], [1, 1], [1, 1]]
    assert in_order(work(2, longer), 4, 2) == [3, 6, 10, 12]
    # prompts 0 and 3 are through at 1, prompts 2 and 1 at 2 and 4: step 1 is of 0 and 3, and step 2 begins at 4
    assert flowing(work(2, listed, slots=8), 2, 1, partial=True) == [3, 6]


def test_ordered_steps_wait_for_every_slow_sample_and_flowing_ones_do_not():
    tails = CASES["tails"]
    ends = {lag: flowing(tails, 30, lag, partial=True) for lag in (1, 2, 4)}
    assert in_order(tails, 30)[-1] > 1.5 * ends[2][-1]
    assert ends[1][-1] >= ends[2][-1] >= ends[4][-1] >= 30 * tails.training_s


@dataclass
class Ticking:
    """A second at a time, without the buffer's own rules: each is asked for as it is stated."""

    work: Listed
    steps: int
    lag: int
    partial: bool
    now: int = 0
    version: int = 0
    begun: int = 0
    trained: int = 0
    busy_until: int | None = None
    is_open: bool = False
    asked: bool = False
    over: bool = False  # a step is trained, and the trainer may wait to send weights
    versions: dict[int, int] = field(default_factory=dict)
    left: dict[int, list[int]] = field(default_factory=dict)  # seconds of samples under way, by group
    ready: set[int] = field(default_factory=set)
    ends: list[int] = field(default_factory=list)

    def run(self) -> list[float]:
        while True:
            for _ in range(6):  # until nothing changes
                self.draw()
                self.train()
            if len(self.ends) == self.steps:
                return [float(end) for end in self.ends]
            self.now += 1
            assert self.now < 10_000, "everybody waits"
            for number, samples in list(self.left.items()):
                self.left[number] = [s - 1 for s in samples if s > 1]
                if not self.left[number]:
                    del self.left[number]
                    self.ready.add(number)
            if self.busy_until == self.now:
                self.busy_until, self.over = None, True
                self.trained += 1

    def draw(self) -> None:
        if self.is_open:
            return
        size = self.work.groups
        while (
            not self.asked
            and self.begun < min((self.version + 1 + self.lag) * size, self.steps * size)
            and sum(map(len, self.left.values())) + self.work.samples <= self.work.slots
        ):
            self.versions[self.begun] = self.version
            self.left[self.begun] = [int(s) for s in self.work.seconds(self.begun)]
            self.begun += 1
        self.is_open = not self.left or (self.asked and self.partial)

    def train(self) -> None:
        if self.busy_until is not None or (self.trained == self.steps and not self.over):
            return
        if self.over:
            if self.partial or self.trained - self.version > self.lag or self.trained == self.steps:
                self.asked = True
            if self.asked and not self.is_open:
                return
            if self.is_open:
                self.push()
            self.over = False
            self.ends.append(self.now)
            return
        chosen = sorted(self.ready, key=lambda number: (self.versions[number], number))[: self.work.groups]
        if len(chosen) < self.work.groups or not self.all_fit(chosen):
            return
        for number in chosen:
            assert self.trained - self.versions.pop(number) <= self.lag
            self.ready.remove(number)
        if self.is_open and self.version < self.trained:
            self.push()
        self.busy_until = self.now + int(self.work.training_s)

    def all_fit(self, chosen: list[int]) -> bool:
        """Every later step has room for all groups whose last step it is, and for those of the steps before."""
        step = self.trained + 1
        lasts = [min(v + 1 + self.lag, self.steps) for number, v in self.versions.items() if number not in chosen]
        return all(
            sum(last <= later for last in lasts) <= (later - step) * self.work.groups
            for later in range(step, self.steps + 1)
        )

    def push(self) -> None:
        self.version, self.is_open, self.asked = self.trained, False, False


@settings(max_examples=38, deadline=None)
@given(st.data(), st.integers(1, 3), st.integers(1, 3), st.integers(1, 3), st.integers(1, 6), st.booleans())
def test_events_and_a_ticking_clock_end_steps_alike(data, groups, samples, lag, training, partial):
    steps = data.draw(st.integers(1, 6))
    slots = data.draw(st.integers(samples, samples * groups * 2))
    listed = [data.draw(st.lists(st.integers(1, 9), min_size=samples, max_size=samples)) for _ in range(groups * steps)]
    some = work(training, listed, groups, samples, slots)
    assert flowing(some, steps, lag, partial=partial) == Ticking(some, steps, lag, partial).run()
