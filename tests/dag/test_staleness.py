"""Which groups begin and make up a step, and when weights go: policies as tables, and in random orders of events."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megarl.config.load import load_config
from megarl.dag.staleness import (
    AsReady,
    InOrder,
    PolicyError,
    StalenessPolicy,
    StalenessSettings,
    choose,
    make_policy,
    policy_of,
)
from megarl.system.errors import ConfigError
from tests.half_step import HALF_STEP


def policy(order: str, k: int, groups: int = 2) -> StalenessPolicy:
    """As a process makes it."""
    sizes = (f"async.max_staleness={k}", f"data.batch_size={groups}", "trainer.steps=10")
    return policy_of(load_config("grpo_quickstart", [f"async.order={order}", *sizes]))


@pytest.mark.parametrize(
    ("k", "oldest", "last_step"),
    [
        (0, [0, 1, 2, 3, 4, 5], [1, 2, 3, 4, 5, 6]),
        (1, [0, 0, 1, 2, 3, 4], [2, 3, 4, 5, 6, 6]),
        (2, [0, 0, 0, 1, 2, 3], [3, 4, 5, 6, 6, 6]),
    ],
)
def test_k_bounds_the_age_of_a_step(k, oldest, last_step):
    for kind in (InOrder, AsReady):
        one = kind(k, 4, 6)
        assert [one.oldest(step) for step in range(1, 7)] == oldest
        assert [one.last_step(version) for version in range(6)] == last_step
        assert [one.may_begin(version) for version in range(6)] == [4 * step for step in last_step]
        assert one.capacity == 4 * (1 + k)
        assert [one.steps_ahead(step) for step in (1, 5, 6, 7)] == [k, min(k, 1), 0, 0]


@pytest.mark.parametrize(
    ("k", "validated", "sampled_with"), [(0, [], [1, 2, 3, 4, 5]), (2, [], [1, 2, 5]), (2, [3], [1, 2, 3, 5])]
)
def test_weights_that_nothing_is_sampled_with_do_not_go(k, validated, sampled_with):
    for kind in (InOrder, AsReady):
        one = kind(k, 4, 5)
        assert [v for v in range(1, 6) if one.samples_with(v, validates=v in validated)] == sampled_with


@pytest.mark.parametrize(
    ("version", "begun", "under_way", "go"),
    [(0, 8, 0, True), (0, 8, 1, False), (0, 7, 0, False), (1, 8, 0, False), (1, 12, 0, True), (9, 20, 0, True)],
)
def test_weights_may_go_when_nothing_is_sampled_with_those_before_them_and_nothing_will_be(
    version, begun, under_way, go
):
    for kind in (InOrder, AsReady):
        assert kind(1, 4, 5).weights_may_go(version, begun, under_way) == go


@pytest.mark.parametrize("k", [0, 1, 2, 3])
@pytest.mark.parametrize("steps", [1, 5, 9])
def test_weights_must_go_before_a_step_that_needs_them(k, steps):
    in_order, as_ready, partial = InOrder(k, 4, steps), AsReady(k, 4, steps), AsReady(k, 4, steps, partial=True)
    for step in range(1, steps + 1):
        for version in range(step - 1):
            if in_order.samples_with(version + 1):  # others are not sent
                # Samples of `step + 1` are generated while `step` is trained, with exactly the weights step - k.
                assert in_order.weights_must_go(version, step) == (version < step - k)
            assert as_ready.weights_must_go(version, step) == (version < step - 1 - k)
            assert partial.weights_must_go(version, step)
    for one in (in_order, as_ready):  # after the last step the newest ones go
        assert all(one.weights_must_go(version, steps + 1) for version in range(steps))


@pytest.mark.parametrize(("k", "copies"), [(0, 0), (1, 0), (2, 2), (3, 3)])
def test_only_in_order_weights_wait_as_copies(k, copies):
    assert (InOrder(k, 4, 9).copies, AsReady(k, 4, 9).copies) == (copies, 0)


@pytest.mark.parametrize(
    ("step", "under_way", "finished", "in_order", "as_ready"),
    [
        pytest.param(1, {0: [2, 3]}, {0: [0, 1]}, [0, 1], [0, 1], id="the first ones are finished"),
        pytest.param(1, {0: [0, 2]}, {0: [1, 3]}, None, [1, 3], id="others are finished"),
        pytest.param(1, {0: [0, 1, 2]}, {0: [3]}, None, None, id="too few are finished"),
        pytest.param(2, {0: [0]}, {0: [1], 1: [4, 5]}, None, None, id="group 0 could not be used by any later step"),
        pytest.param(2, {}, {0: [0, 1], 1: [4, 5]}, [0, 1], [0, 1], id="old ones first"),
        pytest.param(2, {}, {0: [7], 1: [4, 5]}, [4, 5], [7, 4], id="old ones first, whatever their number"),
        pytest.param(2, {1: [1, 2]}, {1: [3, 4]}, None, [3, 4], id="those that are left fit into step 3"),
        pytest.param(2, {1: [1, 2, 5]}, {1: [3, 4]}, None, None, id="those that are left do not fit into step 3"),
    ],
)
def test_groups_of_a_step(step, under_way, finished, in_order, as_ready):
    assert InOrder(1, 2, 10).forms_step(step, under_way, finished) == in_order
    assert AsReady(1, 2, 10).forms_step(step, under_way, finished) == as_ready


class Run:
    """Groups of a run that goes by a policy; `draw` decides what happens next."""

    def __init__(self, one: StalenessPolicy, draw: random.Random) -> None:
        self.policy, self.draw = one, draw
        self.trained = self.version = self.begun = 0
        self.under_way: dict[int, set[int]] = {}
        self.finished: dict[int, set[int]] = {}
        self.used: dict[int, list[int]] = {}  # versions of the groups of every step
        self.numbers: list[int] = []

    def begin(self) -> bool:
        for number in range(self.begun, self.policy.may_begin(self.version)):
            self.under_way.setdefault(self.version, set()).add(number)
            self.begun += 1
        return False  # it is no event that others wait for

    def finish(self) -> bool:
        for version, some in sorted(self.under_way.items(), key=lambda _: self.draw.random()):
            for number in some:
                some.remove(number)
                self.finished.setdefault(version, set()).add(number)
                return True
        return False

    def send(self) -> bool:
        """New weights: one after the other in order, else the newest."""
        fresh = [v for v in range(self.version + 1, self.trained + 1) if self.policy.samples_with(v)]
        may = self.policy.weights_may_go(self.version, self.begun, sum(map(len, self.under_way.values())))
        if not fresh or not (may or self.policy.partial):
            return False
        self.version = fresh[0] if isinstance(self.policy, InOrder) else fresh[-1]
        return True

    def train(self) -> bool:
        step = self.trained + 1
        waits = self.version < self.trained and self.policy.weights_must_go(self.version, step)
        if waits and any(self.policy.samples_with(v) for v in range(self.version + 1, step)):
            return False
        chosen = choose(self.policy, step, self.under_way, self.finished)
        if chosen is None:
            return False
        self.used[step] = [version for number in chosen for version, some in self.finished.items() if number in some]
        for some in self.finished.values():
            some.difference_update(chosen)
        self.numbers += chosen
        self.trained = step
        return True


@settings(max_examples=50, deadline=None)
@given(st.sampled_from(["in_order", "as_ready", "partial", "own"]), *[st.integers(1, 4)] * 3, st.integers(0, 2**32))
def test_nothing_is_older_than_k_nothing_is_lost_and_nobody_waits_for_ever(order, k, groups, steps, seed):
    orders = {"own": HALF_STEP, "partial": "as_ready"}
    values = StalenessSettings(orders.get(order, order), k, groups, steps, order == "partial")
    run = Run(make_policy(values), random.Random(seed))
    while run.trained < steps:
        run.begin()
        events = sorted([run.finish, run.send, run.train], key=lambda _: run.draw.random())
        assert any(event() for event in events), "everybody waits"
    assert sorted(run.numbers) == list(range(groups * steps))
    for step, versions in run.used.items():
        assert len(versions) == groups
        assert all(run.policy.oldest(step) <= version < step for version in versions)
        if order == "in_order":
            assert set(versions) == {run.policy.oldest(step)}
    if order == "in_order":
        assert run.numbers == sorted(run.numbers)


# -- policies of a user ----------------------------------------------------------------------------------------------


def test_a_policy_of_a_user_is_a_class_in_a_file(monkeypatch):
    own = policy(HALF_STEP, 3, groups=4)
    assert [own.may_begin(version) for version in range(3)] == [6, 10, 14]
    assert own.describe().startswith("HalfStep, at most 3 steps stale; at most (1 + 3) * 4 = 16 groups")
    monkeypatch.chdir(Path(__file__).parents[1])
    assert policy("half_step.py:HalfStep", 3, groups=4) is own  # relative to the current folder


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ("raise RuntimeError('no such device')", ["does not import", "no such device", "own.py:1"]),
        ("Other = 3", ["has no 'Policy'"]),
        ("def Policy(*_): ...", ["not a staleness policy", "derive it from AsReady"]),
        (
            "from megarl.dag.staleness import InOrder\nclass Policy(InOrder): ...",
            ["cannot be derived from InOrder"],
        ),
        ("from megarl.dag.staleness import StalenessPolicy\nclass Policy(StalenessPolicy): ...", ["lacks forms_step"]),
        (
            "from megarl.dag.staleness import AsReady\nclass Policy(AsReady):\n"
            "    def may_begin(self, version): return version * self.groups",
            ["may_begin(0) is 0; allowed: 2 to 6"],
        ),
        (
            "from megarl.dag.staleness import AsReady\nclass Policy(AsReady):\n"
            "    def may_begin(self, version): return 1000",
            ["may_begin(0) is 1000; allowed: 2 to 6"],
        ),
        (
            "from megarl.dag.staleness import AsReady\nclass Policy(AsReady):\n"
            "    def forms_step(self, step, under_way, finished): return None",
            ["forms_step(1) waits although no group is in flight"],
        ),
        (
            "from megarl.dag.staleness import AsReady\nclass Policy(AsReady):\n"
            "    def forms_step(self, step, under_way, finished): return [0]",
            ["forms_step(1) of the policy Policy returns [0]: 1 groups", "2 different groups"],
        ),
        (
            "from megarl.dag.staleness import AsReady\nclass Policy(AsReady):\n"
            "    def forms_step(self, step, under_way, finished): return finished[max(finished)][-2:]",
            ["leaves groups that would be more than 2 steps stale; groups left by version: {0: 4"],
        ),
        (
            "from megarl.dag.staleness import AsReady\nclass Policy(AsReady):\n"
            "    def forms_step(self, step, under_way, finished):\n        return finished[7]",
            ["forms_step(1) of the policy Policy raises KeyError: 7", "own.py:4: return finished[7]"],
        ),
    ],
)
def test_a_policy_by_which_no_run_could_go_is_refused_at_the_start(tmp_path, source, words):
    file = tmp_path / "own.py"
    file.write_text(source)
    with pytest.raises(ConfigError) as error:
        policy(f"{file}:Policy", 2)
    assert error.value.where == "async.order"
    for word in words:
        assert word in str(error.value)


def test_a_choice_is_held_to_k_in_every_step():
    class Newest(AsReady):
        def forms_step(self, step, under_way, finished):
            return sorted(finished[max(finished)])[: self.groups]

    assert choose(Newest(1, 2, 9), 2, {}, {0: [], 1: [4, 5]}) == [4, 5]
    with pytest.raises(
        PolicyError, match=r"forms_step\(2\) .* more than 1 step stale; groups left by version: \{0: 1, 1: 0\}"
    ):
        choose(Newest(1, 2, 9), 2, {0: [3]}, {1: [4, 5]})
