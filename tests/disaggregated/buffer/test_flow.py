"""Which prompts may be drawn, and which finished groups make up a step."""

from __future__ import annotations

import random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megarl.dag.staleness import PolicyError, StalenessSettings
from megarl.disaggregated.buffer.core import GroupInfo
from megarl.disaggregated.buffer.flow import Flow
from tests.half_step import HALF_STEP, WAITS_AT_STEP


def info(number: int) -> GroupInfo:
    return GroupInfo(f"p{number}", 0, (f"p{number}#0",), 1)


def flow_of(groups: int, lag: int, steps: int, order: str = "as_ready") -> Flow:
    return Flow(StalenessSettings(order, lag, groups, steps))


def opened(groups: int = 2, lag: int = 1, steps: int = 100, step: int = 0, order: str = "as_ready") -> Flow:
    flow = flow_of(groups, lag, steps, order)
    flow.open(step, step * groups, {}, [])
    return flow


def finish(flow: Flow, *numbers: int) -> None:
    for number in numbers:
        flow.finish(number, info(number), {}, None)


def numbers_of(flow: Flow) -> list[int] | None:
    formed = flow.form()
    return None if formed is None else [group.number for group in formed]


def waiting_for_group_0() -> Flow:
    """Step 2 would be of groups that are ready, but for group 0, of version 0, which it is the last to use."""
    flow = opened(groups=2, lag=1)
    flow.admit(0, 4)
    finish(flow, 1, 2)
    assert numbers_of(flow) == [1, 2]
    flow.admit(1, 2)
    finish(flow, 3, 4, 5)
    assert flow.form() is None
    return flow


def test_as_many_groups_begin_as_may_still_be_used():
    flow = opened(groups=2, lag=1)
    assert flow.admit(0, 3) == [0, 1, 2]
    assert flow.admit(0, 9) == [3]
    assert flow.admit(0, 9) == []
    assert flow.admit(1, 9) == [4, 5]


def test_a_policy_of_a_user_admits():
    flow = opened(groups=4, lag=3, order=HALF_STEP)
    assert flow.admit(0, 99) == [0, 1, 2, 3, 4, 5]
    finish(flow, 0, 1, 2, 4)
    assert not flow.drained(0)
    assert numbers_of(flow) == [0, 1, 2, 4]
    finish(flow, 3, 5)
    assert flow.drained(0)
    assert flow.admit(1, 99) == [6, 7, 8, 9]


def test_a_policy_that_waits_where_nothing_can_come_ends_the_run():
    flow = opened(groups=2, lag=1, order=WAITS_AT_STEP)
    for version in range(8):
        finish(flow, *flow.admit(version, 99))
        assert flow.form()
    assert flow.form() is None, "newer weights may still bring a group"
    finish(flow, *flow.admit(8, 1))
    assert flow.form() is None, "one more group may begin"
    number, *_ = flow.admit(8, 99)
    assert flow.form() is None, "a group is under way"
    finish(flow, number)
    with pytest.raises(PolicyError, match=r"forms_step\(9\) of the policy \S*WaitsAtStep waits with 4 finished groups"):
        flow.form()


def test_nothing_begins_that_no_step_of_the_run_needs():
    flow = opened(groups=2, lag=3, steps=2)
    assert flow.admit(0, 9) == [0, 1, 2, 3]


def test_a_step_is_of_those_that_are_ready():
    flow = opened(groups=2, lag=2)
    flow.admit(0, 4)
    finish(flow, 3)
    assert flow.form() is None
    finish(flow, 1)
    assert numbers_of(flow) == [1, 3]


def test_a_step_waits_for_a_slow_group_that_would_be_too_old_for_the_next_one():
    flow = waiting_for_group_0()
    finish(flow, 0)
    assert numbers_of(flow) == [0, 3]


def test_what_is_put_twice_or_was_not_handed_out_is_refused():
    flow = opened()
    flow.admit(0, 1)
    finish(flow, 0)
    with pytest.raises(ValueError, match="already been handed over"):
        finish(flow, 0)
    with pytest.raises(ValueError, match="was not admitted"):
        finish(flow, 7)


def test_a_step_does_not_wait_for_a_group_that_is_of_no_use():
    flow = waiting_for_group_0()
    flow.reject(0)
    assert numbers_of(flow) == [3, 4]
    assert flow.admit(1, 9) == [6]  # another one in its place
    with pytest.raises(ValueError, match="is not in flight"):
        flow.reject(0)


def test_it_is_drained_when_nothing_is_under_way_and_nothing_may_begin():
    flow = opened(groups=1, lag=1)
    assert not flow.drained(0)
    flow.admit(0, 2)
    finish(flow, 0)
    assert not flow.drained(0)
    finish(flow, 1)
    assert flow.drained(0)
    assert not flow.drained(1)


def test_it_opens_once_and_gives_nothing_before():
    flow = flow_of(2, 1, 10)
    with pytest.raises(ValueError, match="not open"):
        flow.admit(0, 1)
    flow.open(0, 0, {}, [])
    with pytest.raises(ValueError, match="is already open"):
        flow.open(0, 0, {}, [])


def test_what_a_checkpoint_has_is_used_first_and_what_is_too_old_now_is_drawn_again():
    flow = flow_of(2, 1, 10)
    late = flow.open(3, 20, {10: 1, 11: 2, 12: 2, 13: 3, 14: 3}, again=[9])
    assert late == [10]  # with k = 1 version 1 is for step 3 at the latest
    assert flow.again == [9, 10]
    finish(flow, 11, 12)
    assert numbers_of(flow) == [11, 12]
    assert flow.admit(3, 9) == []  # 3 * 2 trained, and 4 begun: (3 + 1 + 1) * 2
    assert flow.admit(4, 9) == [9, 10]
    assert flow.admit(5, 9) == [20, 21]


@settings(max_examples=60, deadline=None)
@given(
    *(st.integers(1, 5), st.integers(1, 4), st.integers(1, 12), st.integers(1, 9), st.integers(0, 2**32)),
    *(st.booleans(), st.integers(0, 9), st.sampled_from(["as_ready", HALF_STEP])),
)
def test_nothing_is_lost_used_twice_or_too_old_and_nobody_waits_for_ever(
    groups, lag, steps, room, seed, jumps, deaths, order
):
    """A rollout that holds `room` groups, whose order of finishing is drawn, beside a trainer; some versions are
    skipped, and some groups are put long after they are finished, as late as when nothing else is left to do. The run
    is killed now and then, and goes on from its newest checkpoint."""
    draw = random.Random(seed)
    flow = opened(groups, lag, steps, order=order)
    version, trained, used, running, put_off = 0, 0, dict[int, int](), dict[int, int](), dict[int, int]()
    saved: Any = (0, 0, {}, [], {})
    for _ in range(10_000):
        if trained == steps:
            break
        may = flow.admit(version, room - len(running))
        running |= dict.fromkeys(may, version)
        moved = bool(may)
        if deaths and draw.random() < 0.1:
            trained, number, finished, again, running = saved
            flow, version, put_off, deaths = flow_of(groups, lag, steps, order), trained, {}, deaths - 1
            assert flow.open(trained, number, finished | running, again) == []
            for number, began in finished.items():
                flow.finish(number, info(number), {}, str(began))
            used, running, moved = {number: at for number, at in used.items() if at <= trained}, dict(running), True
        if running and draw.random() < 0.6:
            number = draw.choice(sorted(running))
            put_off[number] = running.pop(number)
            moved = True
        elif put_off and (not running or draw.random() < 0.3):
            for number, began in put_off.items():
                flow.finish(number, info(number), {}, str(began))
            put_off = {}
            moved = True
        elif (formed := flow.form()) is not None:
            trained += 1
            for group in formed:
                assert group.number not in used
                assert trained - 1 - group.version <= lag
                used[group.number] = trained
            if draw.random() < 0.3:
                finished = {group.number: group.version for group in flow.finished}
                saved = (trained, flow.next, finished, list(flow.again), running | put_off)
            moved = True
        if version < trained and (not jumps or draw.random() < 0.3 or (not moved and not running and not put_off)):
            version = trained
            moved = True
        assert moved or running, "everybody waits"
    assert trained == steps
    assert sorted(used) == list(range(groups * steps))


@pytest.mark.parametrize("lag", [1, 2, 3])
def test_a_run_of_k_more_steps_uses_all_that_a_checkpoint_has(lag):
    flow = opened(groups=2, lag=lag, steps=50)
    begun: dict[int, int] = {}
    for version in range(3):  # step `version + 1` is trained before there are newer weights, as at a checkpoint
        fresh = flow.admit(version, 99)
        begun |= dict.fromkeys(fresh, version)
        finish(flow, *fresh)
        for number in numbers_of(flow):
            del begun[number]
    assert len(begun) == 2 * lag
    short = flow_of(2, lag, 3 + lag)
    assert short.open(3, flow.next, begun, flow.again) == []
    assert short.admit(3, 99) == []
    finish(short, *begun)
    assert sorted(number for _ in range(lag) for number in numbers_of(short)) == sorted(begun)
    assert short.form() is None
