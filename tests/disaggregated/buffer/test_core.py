"""What the buffer knows: no group lost, none twice, the shares that were promised, and nothing left at the end."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megarl.dag.placement import Handover, Placement
from megarl.disaggregated.buffer.core import KEPT, Core, GroupInfo, HandoverError
from tests.disaggregated.buffer.teams import by_hand as placed

BOTH, BACK = "rollout>critic+ref", "ref_logp>train"


def groups(*ordinals: int, tokens: dict[int, int] | None = None) -> list[GroupInfo]:
    return [GroupInfo(f"u{k}", k, (f"u{k}#0", f"u{k}#1"), (tokens or {}).get(k, 10)) for k in ordinals]


def give(core: Core, team: str, rank: int, step: int, key: str, some: list[GroupInfo]) -> None:
    core.give(team, rank, step, key, some, [f"{key}/{step}/{group.uid}" for group in some])


# -- the way of a step -------------------------------------------------------------------------------------------------


@settings(deadline=None, max_examples=30)
@given(
    train=st.integers(1, 5),
    ref=st.integers(1, 5),
    critic=st.integers(1, 3),
    tp=st.integers(1, 2),
    count=st.integers(1, 17),
    share=st.sampled_from(["dealt", "tokens"]),
    seed=st.integers(0, 2**32),
)
def test_every_group_arrives_once_in_any_order_and_nothing_is_left(train, ref, critic, tp, count, share, seed) -> None:
    order = random.Random(seed)
    placement = placed(train, ref, critic, tp)
    core = Core(placement, count, share)
    steps = [3, 4]
    got: dict[tuple[int, str], list[list[str]]] = {}

    def draw(step: int, replica: int) -> Callable[[], bool]:
        def work() -> bool:
            give(core, "train", replica * tp, step, BOTH, groups(*range(replica, count, train)))
            return True

        return work

    def score(step: int, team: str, part: int) -> Callable[[], bool]:
        def work() -> bool:
            mine = core.assignment(team, step, "rollout", part)
            if mine is None:
                return False
            uids = [group.uid for group in mine]
            refs = core.fetch(team, step, BOTH, uids)
            assert refs is not None
            assert not uids or (refs == [f"{BOTH}/{step}/{uid}" for uid in uids])
            got.setdefault((step, team), []).append(uids)
            if team == "ref":
                give(core, team, part * tp, step, BACK, mine)
            for rank in range(part * tp, part * tp + tp):
                core.done(team, rank, step)
            return True

        return work

    def train_(step: int, replica: int) -> Callable[[], bool]:
        def work() -> bool:
            refs = core.fetch("train", step, BACK, [f"u{k}" for k in range(replica, count, train)])
            if refs is None:
                return False
            for rank in range(replica * tp, replica * tp + tp):
                core.done("train", rank, step)
            return True

        return work

    for step in steps:  # workers of one step come in any order, and those that find nothing come again
        todo = [draw(step, r) for r in range(train)] + [train_(step, r) for r in range(train)]
        todo += [score(step, "ref", p) for p in range(ref)] + [score(step, "critic", p) for p in range(critic)]
        while todo:
            order.shuffle(todo)
            todo = [work for work in todo if not work()]
        for team in ("ref", "critic"):
            assert sorted(uid for part in got[step, team] for uid in part) == sorted(f"u{k}" for k in range(count))
            assert max(map(len, got[step, team])) - min(map(len, got[step, team])) <= 1
        assert core._steps == {}


def test_equal_layouts_get_what_one_team_would_work_on() -> None:
    core = Core(placed(train=2, ref=2), 5, "dealt")
    dealt = {rank: groups(*range(rank, 5, 2)) for rank in (0, 1)}
    for rank in (1, 0):
        give(core, "train", rank, 1, BOTH, dealt[rank])
    assert {part: core.assignment("ref", 1, "rollout", part) for part in (0, 1)} == dealt


@pytest.mark.parametrize(("n", "m", "want"), [(3, 2, [[0, 2, 4], [1, 3]]), (2, 3, [[0, 3], [1, 4], [2]])])
def test_other_layouts_deal_in_the_order_of_the_step(n: int, m: int, want: list[list[int]]) -> None:
    core = Core(placed(train=n, ref=m), 5, "dealt")
    for rank in range(n):
        give(core, "train", rank, 1, BOTH, groups(*range(rank, 5, n)))
    assert [[g.ordinal for g in core.assignment("ref", 1, "rollout", part) or ()] for part in range(m)] == want


def test_a_part_without_groups_is_told_of_one_group() -> None:
    core = Core(placed(ref=3), 2, "dealt")
    give(core, "train", 0, 1, BOTH, groups(0, 1))
    assert core.assignment("ref", 1, "rollout", 2) == []
    assert core.fetch("ref", 1, BOTH, []) == [f"{BOTH}/1/u0"]


def test_a_replica_without_groups_is_waited_for() -> None:
    core = Core(placed(train=2), 1, "dealt")
    give(core, "train", 0, 1, BOTH, groups(0))
    assert core.assignment("ref", 1, "rollout", 0) is None
    assert core.fetch("ref", 1, BOTH, ["u0"]) is None
    assert core.give("train", 1, 1, BOTH, [], []).topics == [("handover", 1, BOTH), ("samples", 1, "rollout")]
    assert core.assignment("ref", 1, "rollout", 0) == groups(0)


def test_shares_of_log_normal_lengths_are_even_in_tokens_and_equal_in_number() -> None:
    lengths = random.Random(7)
    tokens = {k: sum(int(lengths.lognormvariate(6, 1)) for _ in range(8)) for k in range(512)}
    for parts in (3, 8, 32):
        core = Core(placed(ref=parts), 512, "tokens")
        give(core, "train", 0, 1, BOTH, groups(*range(512), tokens=tokens))
        shares = [core.assignment("ref", 1, "rollout", part) or [] for part in range(parts)]
        totals = [sum(group.tokens for group in share) for share in shares]
        assert max(totals) * parts / sum(totals) <= 1.05
        assert max(map(len, shares)) - min(map(len, shares)) <= 1
        assert all(share == sorted(share, key=lambda group: group.ordinal) for share in shares)


def test_tokens_are_shared_by_the_mini_batches_of_the_team_that_takes_them() -> None:
    lengths = random.Random(8)
    tokens = {k: sum(int(lengths.lognormvariate(6, 1)) for _ in range(8)) for k in range(64)}
    plain = placed(ref=4, critic=2)
    teams = tuple(replace(team, cuts=(32,) if team.name == "ref" else ()) for team in plain.teams)
    core = Core(replace(plain, teams=teams), 64, "tokens")
    give(core, "train", 0, 1, BOTH, groups(*range(64), tokens=tokens))
    for name, parts, minis in (("ref", 4, [range(32), range(32, 64)]), ("critic", 2, [range(64)])):
        shares = [core.assignment(name, 1, "rollout", part) or [] for part in range(parts)]
        for mini in minis:
            held = [[group.tokens for group in share if group.ordinal in mini] for share in shares]
            assert {len(share) for share in held} == {len(mini) // parts}
            assert max(map(sum, held)) * parts / sum(map(sum, held)) <= 1.05


# -- what does not fit -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("call", "story"),
    [
        (lambda c: give(c, "train", 0, 1, "x>y", []), "this run has no handover 'x>y'; allowed: rollout>critic"),
        (lambda c: give(c, "ref", 0, 1, BOTH, []), "only team 'train' may hand over these samples"),
        (lambda c: give(c, "train", 0, 1, BOTH, groups(2)), "this rank has already handed over its groups"),
        (
            lambda c: give(c, "train", 1, 1, BOTH, groups(0)),
            "group 'u0' was already handed over by one of the ranks 0",
        ),
        (lambda c: give(c, "train", 1, 1, BOTH, groups(2, 3, 4)), "a step has at most 4 groups"),
        (
            lambda c: give(c, "train", 1, 1, BOTH, groups(2, 2)),
            "2 groups have 1 names, 1 numbers and 2 payloads",
        ),
        (lambda c: give(c, "train", 1, 1, BOTH, [*groups(2), GroupInfo("v", 2, (), 1)]), "2 names, 1 numbers and 2"),
        (
            lambda c: give(c, "train", 1, 1, BOTH, [GroupInfo("v", 0, (), 1)]),
            "groups 'v' and 'u0' both have the number 0",
        ),
        (
            lambda c: give(c, "ref", 0, 1, BACK, groups(0, tokens={0: 9})),
            "group 'u0' differs from the one that an earlier call handed over",
        ),
        (lambda c: c.assignment("ref", 1, "rollout", 1), "team 'ref' has 1 replicas, so it has no replica 1"),
        (lambda c: (c.post("m", "1"), c.post("m", "2")), "message 'm' has already been posted"),
    ],
)
def test_what_does_not_fit_is_refused(call: Callable[[Core], object], story: str) -> None:
    core = Core(placed(train=2), 4, "dealt")
    give(core, "train", 0, 1, BOTH, groups(0, 1))
    with pytest.raises(HandoverError) as refused:
        call(core)
    assert story in str(refused.value)
    give(core, "train", 1, 1, BOTH, groups(2, 3))  # and nothing of it was kept
    assert core.assignment("ref", 1, "rollout", 0) == groups(0, 1, 2, 3)


def test_a_fifth_replica_and_a_finished_step_are_refused() -> None:
    core = Core(placed(), 4, "dealt")
    give(core, "train", 0, 2, BOTH, groups(0))
    with pytest.raises(
        HandoverError, match=r"1 replica, and each of them has already handed over its groups \(ranks: 0\)"
    ):
        give(core, "train", 1, 2, BOTH, groups(1))
    for team in ("train", "ref", "critic"):
        core.done(team, 0, 2)
    readers = r"these samples come too late, because all teams that read them \(critic, ref\) have finished the step"
    with pytest.raises(HandoverError, match=rf"handover 'rollout>.*' of step 1, .*: {readers}"):
        give(core, "train", 0, 1, BOTH, groups(0))


def test_a_group_that_nobody_has_given_is_named() -> None:
    core = Core(placed(), 4, "dealt")
    give(core, "train", 0, 1, BOTH, groups(0))
    with pytest.raises(HandoverError, match="group 'u9' is not one of the 1 groups that team 'train' has handed over"):
        core.fetch("ref", 1, BOTH, ["u0", "u9"])


def test_a_step_without_any_group_is_named() -> None:
    core = Core(placed(), 4, "dealt")
    give(core, "train", 0, 1, BOTH, [])
    with pytest.raises(HandoverError, match="team 'train' has handed over no groups"):
        core.fetch("ref", 1, BOTH, [])


def test_mail_is_for_all_who_read_it() -> None:
    core = Core(placed(), 4, "dealt")
    assert core.read("m") is None
    assert core.post("m", '{"a": null}').topics == [("mail", "m")]
    assert [core.read("m"), core.read("m")] == ['{"a": null}'] * 2


def test_of_a_series_the_last_are_kept() -> None:
    core = Core(placed(), 4, "dealt")
    core.post("engines", "always")
    for step in range(10, 10 * KEPT + 20, 10):
        core.post(f"metrics/ref/{step}", str(step))
        core.post(f"weights/{step}", str(step))
    assert core.read("engines") == "always"
    assert core.read("metrics/ref/20") == "20"
    assert core.read(f"weights/{10 * KEPT + 20}") is None
    with pytest.raises(
        HandoverError,
        match=rf"message 'metrics/ref/10' has been dropped: only the last {KEPT} messages of a series are kept",
    ):
        core.read("metrics/ref/10")
    with pytest.raises(HandoverError, match="message 'weights/10' has already been posted"):
        core.post("weights/10", "0")


# -- queues ------------------------------------------------------------------------------------------------------------


def test_groups_wait_until_each_team_has_taken_them() -> None:
    core = Core(placed(ref=2), 4, "dealt")
    waiting = {"rollout/critic": 0, "rollout/ref": 0, "ref_logp/train": 0}
    assert core.queues() == waiting
    give(core, "train", 0, 1, BOTH, groups(0, 1, 2))
    give(core, "train", 0, 2, BOTH, groups(3))
    assert core.queues() == waiting | {"rollout/critic": 4, "rollout/ref": 4}
    for _ in range(2):  # as two ranks of a replica do
        core.fetch("ref", 1, BOTH, ["u0", "u2"])
    core.fetch("ref", 2, BOTH, [])
    assert core.queues() == waiting | {"rollout/critic": 4, "rollout/ref": 2}
    for team, rank in (("train", 0), ("ref", 0), ("ref", 1), ("critic", 0)):
        core.done(team, rank, 1)
    assert core.queues() == waiting | {"rollout/critic": 1, "rollout/ref": 1}


def test_a_team_that_takes_two_parts_of_a_node_waits_for_a_group_once() -> None:
    teams_ = placed()
    more = Handover("rollout", "train", ("response_mask",), ("ref",), "rollout")
    core = Core(Placement(teams_.teams, (*teams_.handovers, more)), 4, "dealt")
    give(core, "train", 0, 1, BOTH, groups(0, 1))
    give(core, "train", 0, 1, more.key, groups(0, 1))
    core.fetch("ref", 1, BOTH, ["u0", "u1"])
    core.fetch("ref", 1, more.key, ["u0"])
    assert core.queues() == {"rollout/critic": 2, "rollout/ref": 1, "ref_logp/train": 0}


def test_mail_comes_when_all_replicas_have_come_so_far():
    core = Core(placed(train=2), 4, "dealt")
    assert core.arrive("train", 0, "open/1", "{}").topics == ()
    assert core.arrive("train", 0, "open/1", "{}").topics == (), "it says so again"
    assert core.read("open/1") is None
    assert core.arrive("train", 1, "open/1", "{}").topics == [("mail", "open/1")]
    assert core.arrive("train", 1, "open/1", "{}").topics == ()
    assert core.read("open/1") == "{}"
    assert core.arrive("train", 1, "open/2", "{}").topics == (), "each name is for itself"
