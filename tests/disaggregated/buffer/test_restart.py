"""A team that loses its processes and begins again makes what is missing, and nobody gets anything twice."""

from __future__ import annotations

import json
import random
from collections import defaultdict
from collections.abc import Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megarl.disaggregated.buffer.core import Core, GroupInfo, HandoverError
from megarl.disaggregated.buffer.progress import Ping, ProgressTable
from tests.disaggregated.buffer.teams import by_hand

OUT, BACK = "rollout>critic+ref", "ref_logp>train"
STEPS, GROUPS, REPLICAS = 5, 4, 2


def groups(*ordinals: int) -> list[GroupInfo]:
    return [GroupInfo(f"u{k}", k, (f"u{k}#0",), 10 + k) for k in ordinals]


def core() -> Core:
    return Core(by_hand(train=REPLICAS, ref=REPLICAS), GROUPS, "dealt")


def given_by_train(buffer: Core, step: int) -> None:
    for rank in range(REPLICAS):
        buffer.give("train", rank, step, OUT, groups(rank, rank + 2), ["a", "b"])


def given_by_ref(buffer: Core, step: int, ref: str, rank: int) -> None:
    buffer.give("ref", rank, step, BACK, groups(rank, rank + 2), [ref, ref])


def all_done(buffer: Core, step: int) -> None:
    for worker in (("train", 0), ("train", 1), ("ref", 0), ("ref", 1), ("critic", 0)):
        buffer.done(*worker, step)


def test_it_begins_with_the_first_step_that_is_not_over() -> None:
    buffer = core()
    assert buffer.restart_team("ref", 1) is None
    for step in (7, 8, 9):
        given_by_train(buffer, step)
    all_done(buffer, 7)
    for rank in range(REPLICAS):
        buffer.done("ref", rank, 8)
    assert buffer.restart_team("ref", 2) == 7
    assert buffer.fetch("ref", 8, OUT, ["u0"]) == ["a"], "it finds what it takes"


def test_what_it_gave_is_not_found_until_all_of_it_has_come_again() -> None:
    buffer = core()
    given_by_train(buffer, 1)
    for rank in range(REPLICAS):
        given_by_ref(buffer, 1, "lost", rank)
    assert buffer.fetch("train", 1, BACK, ["u0", "u1"]) == ["lost", "lost"]
    buffer.restart_team("ref", 1)
    assert buffer.fetch("train", 1, BACK, ["u2"]) is None
    assert buffer.queues()["ref_logp/train"] == 0
    given_by_ref(buffer, 1, "new", 1)
    assert buffer.fetch("train", 1, BACK, ["u2"]) is None
    given_by_ref(buffer, 1, "new", 0)
    assert buffer.fetch("train", 1, BACK, ["u2"]) == ["new"]
    assert buffer.queues()["ref_logp/train"] == 1, "three of the four are taken"


def test_it_has_to_give_the_same_groups_again() -> None:
    buffer = core()
    given_by_train(buffer, 1)
    given_by_ref(buffer, 1, "lost", 0)
    buffer.restart_team("ref", 1)
    with pytest.raises(HandoverError, match="'u0' differs from the one that an earlier call handed over"):
        buffer.give("ref", 0, 1, BACK, [GroupInfo("u0", 0, ("u0#0",), 99)], ["x"])


def test_a_restart_that_is_told_twice_is_one() -> None:
    buffer = core()
    given_by_train(buffer, 1)
    buffer.restart_team("ref", 1)
    given_by_ref(buffer, 1, "new", 0)
    buffer.restart_team("ref", 1)
    with pytest.raises(HandoverError, match="this rank has already handed over its groups"):
        given_by_ref(buffer, 1, "new", 0)
    buffer.restart_team("ref", 2)
    assert (buffer.starts("ref"), buffer.starts("train")) == (2, 0)
    with pytest.raises(HandoverError, match="has already been restarted 2 times; its restart 1 is outdated"):
        buffer.restart_team("ref", 1)


def test_mail_that_it_posts_again_stays_as_it_was() -> None:
    buffer = core()
    buffer.post("metrics/ref/1", "first")
    assert buffer.post("metrics/ref/1", "second", True).topics == ()
    assert buffer.read("metrics/ref/1") == "first"
    assert buffer.post("metrics/ref/2", "second", True).topics == [("mail", "metrics/ref/2")]


def test_to_those_who_wait_it_moves_until_it_has_had_time_to_start() -> None:
    table = ProgressTable(["train", "ref"], now=0.0)
    table.ping("ref", 1, Ping(5, "step", 1, ""), 1.0)
    table.restart("ref", 50.0, 30.0)
    (told,) = table.others("train", 70.0)
    assert (told.ping, told.silent_s) == (None, 0.0)
    (told,) = table.others("train", 95.0)
    assert (told.ping, told.silent_s) == (None, 15.0)
    table.ping("ref", 0, Ping(1, "start", 0, ""), 96.0)
    assert table.others("train", 100.0)[0].silent_s == 4.0


# -- random deaths ----------------------------------------------------------------------------------------------------

Walk = Iterator[None]


class Run:
    """All workers of a run, which take turns; `alive` is the number of the reference's start whose bytes are there."""

    def __init__(self, ahead: int) -> None:
        self.core, self.alive, self.ahead = core(), 0, ahead
        self.seen: dict[tuple[int, int], list[str]] = {}
        self.trained = [0, 0]
        self.metrics: dict[int, list[str]] = defaultdict(list)

    def train(self, rank: int) -> Walk:
        """Gives the samples of steps, `ahead` before it trains on them, and takes what the reference makes of them."""
        for step in range(1, STEPS + self.ahead + 1):
            if step <= STEPS:
                self.core.give("train", rank, step, OUT, groups(rank, rank + 2), ["a", "b"])
                yield
            if step > self.ahead:
                yield from self._learn(rank, step - self.ahead)

    def _learn(self, rank: int, step: int) -> Walk:
        while (mine := self.core.assignment("train", step, "rollout", rank)) is None:
            yield
        uids = [group.uid for group in mine]
        while True:
            refs = self.core.fetch("train", step, BACK, uids)
            if refs is not None and all(start == self.alive for start, *_ in refs):
                break
            yield
        self.seen[step, rank] = [f"{of}/{uid}" for _, of, uid in refs]
        yield
        while (told := self.core.read(f"metrics/ref/{step}")) is None:
            yield
        self.metrics[step].append(json.loads(told))
        self.core.done("train", rank, step)

    def reference(self, rank: int, start: int, finished: int | None) -> Walk:
        for step in range((finished or 0) + 1, STEPS + 1):
            while (mine := self.core.assignment("ref", step, "rollout", rank)) is None:
                yield
            uids = [group.uid for group in mine]
            while self.core.fetch("ref", step, OUT, uids) is None:
                yield
            self.core.give("ref", rank, step, BACK, mine, [(start, step, uid) for uid in uids])
            yield
            if rank == 0:
                self.core.post(f"metrics/ref/{step}", json.dumps(step), start > 0)
                yield
            self.core.done("ref", rank, step)
            yield

    def critic(self) -> Walk:
        for step in range(1, STEPS + 1):
            while self.core.fetch("critic", step, OUT, [f"u{k}" for k in range(GROUPS)]) is None:
                yield
            self.core.done("critic", 0, step)
            yield


@settings(deadline=None, max_examples=50)
@given(seed=st.integers(0, 2**32), ahead=st.integers(0, 2), deaths=st.integers(0, 6))
def test_whenever_it_dies_every_group_is_scored_and_every_step_ends(seed: int, ahead: int, deaths: int) -> None:
    order, run = random.Random(seed), Run(ahead)
    walks: dict[tuple[str, int], Walk] = {("train", rank): run.train(rank) for rank in range(REPLICAS)}
    walks["critic", 0] = run.critic()
    walks |= {("ref", rank): run.reference(rank, 0, None) for rank in range(REPLICAS)}
    starts, down = 0, False
    for _ in range(5000):
        if down and order.random() < 0.2:  # what it has given is found, and its bytes are gone, until its launcher acts
            finished = run.core.restart_team("ref", starts)
            walks |= {("ref", rank): run.reference(rank, starts, finished) for rank in range(REPLICAS)}
            down = False
        elif not down and starts < deaths and order.random() < 0.03:
            for rank in range(REPLICAS):
                walks.pop(("ref", rank), None)
            starts, down = starts + 1, True
            run.alive = starts
        elif walks:
            who = order.choice(list(walks))
            if next(walks[who], "over") == "over":
                del walks[who]
        elif not down:
            break
    assert not walks
    want = {(step, rank): [f"{step}/u{rank}", f"{step}/u{rank + 2}"] for step in range(1, STEPS + 1) for rank in (0, 1)}
    assert run.seen == want
    assert run.metrics == {step: [step, step] for step in range(1, STEPS + 1)}
    assert run.core._steps == {}
