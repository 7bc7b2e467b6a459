"""A store that dies at any moment answers what it would have answered, and forgets what is finished."""

from __future__ import annotations

import json
import random
import tempfile
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megarl.config.model import ParallelConfig
from megarl.dag.placement import Handover, Placement, TeamPlan
from megarl.dag.stage import Role
from megarl.disaggregated.buffer.core import Core, GroupInfo, StoreError
from megarl.disaggregated.buffer.flow import Finished
from megarl.disaggregated.buffer.journal import Ack, DurableCore
from megarl.staleness import StalenessSettings
from tests.disaggregated.buffer.teams import by_hand
from tests.half_step import HALF_STEP

BOTH, BACK = "rollout>critic+ref", "ref_logp>train"
PLACED = by_hand(train=2)
WORKERS = [("train", 0), ("train", 1), ("ref", 0), ("critic", 0)]


def new() -> Core:
    return Core(PLACED, 4, "tokens")


def groups(*ordinals: int) -> list[GroupInfo]:
    return [GroupInfo(f"u{k}", k, (f"u{k}#0", f"u{k}#1"), 10 + k) for k in ordinals]


class Workers:
    """All workers of a run with a store in a journal, beside a core that never dies."""

    def __init__(self, path: Path, room: int, new: Callable[[], Core] = new) -> None:
        self.path, self.room, self.new = path, room, new
        self.core = new()
        self.serials: dict[tuple[str, int], int] = defaultdict(int)
        self.given: dict[tuple[str, int], dict[int, list[str]]] = defaultdict(dict)
        self.kept: dict[tuple[str, int], set[int]] = defaultdict(set)
        self.starts: dict[str, int] = defaultdict(int)
        self.open()

    def open(self) -> None:
        """The store dies, or begins."""
        self.store = DurableCore(self.new, self.path, "s", self.room)

    def give_again(self) -> None:
        """What a worker does with an acknowledgement of the store."""
        for worker in list(self.serials):
            ack = self.heed(worker, whole=True)
            assert ack.heard == self.serials[worker]
            for serial in ack.lacking:
                self.store.bind(*worker, serial, self.given[worker][serial])
            assert self.store.ack(*worker).lacking == []

    def heed(self, worker: tuple[str, int], *, whole: bool = False) -> Ack:
        """Let go of what the store says that nobody needs; what it says."""
        ack, kept = self.store.ack(*worker, whole=whole), self.kept[worker]
        kept -= set(ack.gone) if ack.held is None else kept - set(ack.held)
        return ack

    def change(self, worker: tuple[str, int], dies: str, method: str, *arguments: Any, count: int = 0) -> Any:
        """One call, which the core and the store answer alike; its answer, or the message of the error."""
        self.serials[worker] += 1
        serial = self.serials[worker]
        refs = [f"{worker[0]}/{worker[1]}/{serial}/{index}" for index in range(count)]
        self.given[worker][serial] = refs
        if refs:
            self.kept[worker].add(serial)
        want = told(lambda: self._directly(method, arguments, refs))
        call = (*worker, serial, json.dumps([method, *arguments]), refs)
        found = told(lambda: self.store.change(*call))
        if isinstance(want, str):
            assert found == want
        else:
            assert found == (want if method == "swap" else (want, []) if method == "open_flow" else (None, want or []))
        if dies == "after":  # nobody heard the answer
            self.open()
            again = told(lambda: self.store.change(*call))
            assert again == (found if isinstance(found, str) else (found[0], None))
            self.give_again()
        self.heed(worker)
        return want

    def _directly(self, method: str, arguments: tuple[Any, ...], refs: list[str]) -> Any:
        if method == "give":
            return self.core.give(*arguments, refs)
        if method == "swap":
            team, rank, some, keys, *rest = arguments
            parts = {key: refs[place * len(some) :][: len(some)] for place, key in enumerate(keys)}
            return self.core.swap(team, rank, some, parts, *rest)
        return getattr(self.core, method)(*arguments)

    def ask(self, method: str, *arguments: Any) -> Any:
        """One question; both answer the same, and this is it."""
        want = told(lambda: getattr(self.core, method)(*arguments))
        found = {"fetch": self.store.fetch, "unused": self.store.unused}
        there = found.get(method, lambda *args: self.store.ask(method, *args))
        assert told(lambda: there(*arguments)) == want
        return want

    def held(self) -> dict[tuple[str, int], list[int]]:
        """What the core that never dies holds: numbers of calls by worker."""
        found: dict[tuple[str, int], set[int]] = {worker: set() for worker in self.serials}
        for step in self.core._steps.values():
            for sent in step.sent_by_key.values():
                for ref in sent.refs.values():
                    team, rank, serial, _ = ref.split("/")
                    found[team, int(rank)].add(int(serial))
        return {worker: sorted(serials) for worker, serials in found.items()}


def told(call: Any) -> Any:
    try:
        return call()
    except StoreError as error:
        return str(error)


STEP = st.integers(1, 2)
CALLS = st.one_of(
    st.tuples(st.just("give"), st.integers(0, 1), STEP, st.sampled_from([(), (0, 2), (0, 2), (1, 3), (0, 1, 2, 3)])),
    st.tuples(st.just("back"), STEP, st.sampled_from([(0, 1, 2, 3), (0, 2), (1, 3)])),
    st.tuples(st.just("done"), st.sampled_from(WORKERS), STEP),
    st.tuples(st.just("post"), st.sampled_from(["m", "w/1", "w/2", "w/3"])),
    st.tuples(st.just("restart"), st.sampled_from(["train", "ref"]), st.booleans()),
    st.tuples(st.just("read"), st.sampled_from(["m", "w/1", "w/2", "w/3"])),
    st.tuples(st.just("assignment"), st.sampled_from(["ref", "critic"]), STEP),
    st.tuples(
        st.just("fetch"),
        st.sampled_from(["ref", "train"]),
        STEP,
        st.sampled_from([BOTH, BACK]),
        st.sampled_from([(), ("u0",), ("u0", "u2")]),
    ),
)


def play(workers: Workers, call: Any, dies: str) -> None:
    kind, *rest = call
    if dies in ("before", "torn"):
        if dies == "torn":
            with workers.path.open("ab") as file:
                file.write(b'00c0ffee ["train",0,')
        workers.open()
        workers.give_again()
    if kind == "give":
        rank, step, some = rest
        workers.change(("train", rank), dies, "give", "train", rank, step, BOTH, groups(*some), count=len(some))
    elif kind == "back":
        step, some = rest
        workers.change(("ref", 0), dies, "give", "ref", 0, step, BACK, groups(*some), count=len(some))
    elif kind == "done":
        worker, step = rest
        workers.change(worker, dies, "done", *worker, step)
    elif kind == "post":
        workers.change(("ref", 0), dies, "post", rest[0], "text", workers.starts["ref"] > 0)
    elif kind == "restart":
        team, repeated = rest
        workers.starts[team] += 1
        for _ in range(1 + repeated):  # its launcher did not hear the answer
            workers.ask("restart_team", team, workers.starts[team])
    elif kind == "assignment":
        team, step = rest
        workers.ask("assignment", team, step, "rollout", 0)
    elif kind == "fetch":
        team, step, key, uids = rest
        workers.ask("fetch", team, step, key, list(uids))
    else:
        workers.ask(kind, *rest)


@settings(deadline=None, max_examples=150)
@given(
    calls=st.lists(st.tuples(CALLS, st.sampled_from(["", "", "", "before", "after", "torn"])), max_size=60),
    room=st.sampled_from([0, 400, 1 << 20]),
)
def test_a_store_that_dies_at_any_moment_answers_as_one_that_does_not(calls: list[Any], room: int) -> None:
    with tempfile.TemporaryDirectory() as folder:
        workers = Workers(Path(folder) / "j", room)
        for call, dies in calls:
            play(workers, call, dies)
            held = workers.held()
            assert all(workers.kept[worker].issuperset(held[worker]) for worker in held)
        workers.open()
        workers.give_again()
        assert {worker: sorted(workers.kept[worker]) for worker in workers.serials} == workers.held()
        never = vars(workers.core) | {"_steps": None}
        assert vars(workers.store._core) | {"_steps": None} == never
        assert list(workers.store._core._steps) == list(workers.core._steps)


def drive(workers: Workers, steps: range, dies: str = "") -> None:
    """Whole steps, as a run has them."""
    for step in steps:
        for rank in range(2):
            play(workers, ("give", rank, step, (rank, rank + 2)), dies)
        play(workers, ("assignment", "ref", step), dies)
        play(workers, ("assignment", "critic", step), dies)
        play(workers, ("fetch", "ref", step, BOTH, ("u0", "u3")), dies)
        play(workers, ("back", step, (0, 1, 2, 3)), dies)
        workers.change(("ref", 0), dies, "post", f"w/{step}", "text")
        for worker in WORKERS:
            play(workers, ("done", worker, step), dies)


@pytest.mark.parametrize("dies", ["before", "after", "torn"])
def test_a_store_may_die_at_every_call_of_a_run(tmp_path: Path, dies: str) -> None:
    workers = Workers(tmp_path / "j", 2000)
    drive(workers, range(1, 20), dies)
    assert workers.held() == {worker: [] for worker in WORKERS}


def test_answers_say_once_what_nobody_needs_any_more(tmp_path: Path) -> None:
    workers = Workers(tmp_path / "j", 1 << 20)
    drive(workers, range(1, 4))
    for rank in range(2):
        play(workers, ("give", rank, 4, (rank,)), "")
    assert workers.heed(("train", 0)) == (workers.serials["train", 0], [], [], None), "it was told of the others"
    assert workers.heed(("ref", 0)).gone != []
    assert {worker: sorted(workers.kept[worker]) for worker in workers.serials} == workers.held()
    assert workers.store.ack("ref", 0).gone == []


def test_the_journal_is_as_long_as_what_is_alive(tmp_path: Path) -> None:
    workers, sizes = Workers(tmp_path / "j", 4000), set()
    for step in range(1, 300):
        drive(workers, range(step, step + 1))
        sizes.add(workers.path.stat().st_size)
    assert max(sizes) < 40_000
    assert min(sizes) < 10_000


def test_bytes_whose_references_are_not_there_yet_are_waited_for(tmp_path: Path) -> None:
    workers = Workers(tmp_path / "j", 1 << 20)
    for rank in range(2):
        play(workers, ("give", rank, 1, (rank,)), "")
    workers.open()
    assert workers.store.fetch("ref", 1, BOTH, ["u0"]) is None
    assert workers.store.ack("train", 0, whole=True) == (1, [], [1], [1])
    workers.store.bind("train", 0, 1, ["again"])
    assert workers.store.fetch("ref", 1, BOTH, ["u0"]) == ["again"]
    assert workers.store.fetch("ref", 1, BOTH, ["u0", "u1"]) is None


def test_a_call_that_never_arrived_is_an_error(tmp_path: Path) -> None:
    workers = Workers(tmp_path / "j", 1 << 20)
    post = json.dumps(["post", "m", "text"])
    workers.store.change("ref", 0, 1, post)
    with pytest.raises(StoreError, match=r"team 'ref' rank 0: this is its call 3, and the last .* knows of is 1"):
        workers.store.change("ref", 0, 3, post)
    with pytest.raises(StoreError, match=r"mail 'm' has been posted before"):
        workers.store.change("ref", 0, 2, post)


# -- samples that come as they get ready ------------------------------------------------------------------------------

DRAW, TRAIN = ("draw", 0), [("train", 0), ("train", 1)]
FLOWING = Placement(
    (
        TeamPlan("train", (Role.ACTOR,), 2, 0, ParallelConfig(), ("train",)),
        TeamPlan("draw", (Role.ROLLOUT,), 1, 2, ParallelConfig(), ("rollout", "reward")),
    ),
    (
        Handover("rollout", "draw", ("response_ids",), ("train",), "rollout"),
        Handover("reward", "draw", ("rewards",), ("train",), "rollout"),
    ),
)
KEYS = [one.key for one in FLOWING.handovers]
STEPS = 6


@settings(deadline=None, max_examples=60)
@given(
    seed=st.integers(0, 2**32),
    room=st.sampled_from([0, 400, 1 << 20]),
    policy=st.sampled_from(["as_ready", HALF_STEP]),
)
def test_steps_are_formed_of_the_same_groups_whenever_the_store_dies(seed: int, room: int, policy: str) -> None:
    order = random.Random(seed)

    def dies() -> str:
        died = order.choice(["", "", "before", "after"])
        if died == "before":
            workers.open()
            workers.give_again()
        return died

    with tempfile.TemporaryDirectory() as folder:
        workers = Workers(
            Path(folder) / "j", room, lambda: Core(FLOWING, 2, "dealt", StalenessSettings(policy, 1, 2, STEPS))
        )
        workers.change(DRAW, dies(), "open_flow", 0, 3, [[1, 0]], [0])
        drawn, step = [1], 0
        while step < STEPS:
            dies()
            workers.ask("unused", order.randint(0, step))
            order.shuffle(drawn)
            useless = [drawn.pop()] if drawn and order.random() < 0.1 else []
            count = order.randint(0, len(drawn))
            over = [Finished(number, *groups(number), "{}") for number in drawn[:count]]
            arguments = ("draw", 0, over, KEYS, useless, step, order.randint(0, 3))
            more, _ = workers.change(DRAW, dies(), "swap", *arguments, count=count * len(KEYS))
            drawn = drawn[count:] + more
            if workers.ask("fetch", "train", step + 1, order.choice(KEYS), []) is not None:
                step += 1
                for team, rank in TRAIN:
                    dies()
                    mine = workers.ask("assignment", team, step, "rollout", rank)
                    for key in KEYS:
                        workers.ask("fetch", team, step, key, [group.uid for group in mine])
                    assert workers.ask("read", f"formed/{step}") is not None
                    arrive = ("arrive", "train", rank, f"update/{step}")
                    workers.change((team, rank), dies(), *arrive)
                    workers.change((team, rank), dies(), "done", team, rank, step)
                assert workers.ask("read", f"update/{step}") is not None
        assert workers.ask("flow_state")["again"] == []
        assert workers.store._core._steps == {}


def test_a_policy_that_chooses_what_is_too_old_ends_the_run_with_its_name(tmp_path) -> None:
    file = tmp_path / "late.py"
    file.write_text(
        "from megarl.staleness import AsReady\n"
        "class Late(AsReady):\n"
        "    def forms_step(self, step, under_way, finished):\n"
        "        return super().forms_step(step, under_way, finished) if step < 6 else [0, 0]\n"
    )
    core = Core(FLOWING, 2, "dealt", StalenessSettings(f"{file}:Late", 1, 2, 20))
    core.open_flow(0, 0, [], [])

    def finish_all_of(step: int) -> None:
        core.assignment("train", step, "rollout", 0)
        numbers, _ = core.swap("draw", 0, [], {}, [], step - 1, 9)
        over = [Finished(number, groups(number)[0], "{}") for number in numbers]
        core.swap("draw", 0, over, {key: [None] * len(over) for key in KEYS}, [], step - 1, 0)

    for step in range(1, 6):
        finish_all_of(step)
    with pytest.raises(StoreError, match=r"async.order: forms_step\(6\) of the policy Late names \[0, 0\]"):
        finish_all_of(6)
