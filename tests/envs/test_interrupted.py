"""Episodes that come and go: interrupted, resumed in another process, with environments that take their time."""

from __future__ import annotations

import asyncio
import itertools
import json
import random
import threading
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, replace
from typing import Any, ClassVar

import pytest
import torch

from megarl.config.rollout import SamplingConfig
from megarl.data.trajectory import Trajectory
from megarl.envs import Action, Environment, Step
from megarl.envs.host import Host
from megarl.rollout.groups import Group, GroupGenerator
from tests.campaigns import split
from tests.envs.playing import EOS, rules_of
from tests.rollout.scripted import ScriptedEngine, rule
from tests.rollout.test_groups import after

MOST, TOKENS, LONGEST = 6, 24, 40
SAMPLING = SamplingConfig(max_new_tokens=MOST)
STOPS = [EOS, *range(5, 40, 5)]  # turns are short, and many end by themselves


class Chain(Environment):
    """Says tokens that follow from its seed and all that was said; `stepped` counts how often it was asked what."""

    stepped: ClassVar[Counter[tuple[int, int]]] = Counter()
    pause_s: ClassVar[Callable[[], float]] = staticmethod(lambda: 0.0)

    async def reset(self, row: dict[str, Any], seed: int) -> list[int]:
        await asyncio.sleep(self.pause_s())
        self.state, self.name = seed, row["name"]
        return first(seed)

    async def step(self, action: Action) -> Step:
        self.stepped[self.name, action.turn] += 1
        await asyncio.sleep(self.pause_s())
        self.state = following(self.state, action.token_ids)
        return answer(self.state)


def first(seed: int) -> list[int]:
    return [6 + seed % 3, 7]


def following(state: int, said: list[int]) -> int:
    return random.Random(repr((state, list(said)))).randrange(10**6)


def answer(state: int) -> Step:
    return Step([6 + state % 5] * (1 + state % 2), reward=float(state % 7), done=state % 4 == 0, info={"state": 1.0})


@pytest.fixture(scope="module")
def host():
    made = Host(Chain, Chain.Settings())
    yield made
    made.close()


def asked(number: int, samples: int) -> Group:
    """Segment k of sample i of group g has the seed 1000 g + 10 i + k."""
    seeds = [lambda k, base=1000 * number + 10 * i: base + k for i in range(samples)]
    return Group(number, [9], seeds, f"g{number}", {"name": number}, number)


def groups_of(made: ScriptedEngine, host: Host, slots: int = 8, **limits: Any) -> GroupGenerator:
    settings = {"turns": 4, "tokens": TOKENS, "replayable": True, **limits}
    return GroupGenerator(made, SAMPLING, STOPS, slots, LONGEST, rules_of(host, **settings))


def check(number: int, place: int, t: Trajectory) -> None:
    """It is what its segments sample, one for each version of a turn, and what the environment says to that."""
    assert t.prompt_ids == first(number)
    state, before, segment, rewards = number, [*t.prompt_ids], 0, []
    runs = list(itertools.chain.from_iterable([version] * count for version, count in t.versions))
    for turn, (start, end) in enumerate(zip(t.turn_starts, t.turn_ends, strict=True)):
        assert start == len(before) - len(t.prompt_ids)
        for version, tokens in itertools.groupby(range(start, end), lambda at: runs[at]):
            context = [*before]
            for count, at in enumerate(tokens):
                sampled = rule(context, 1000 * number + 10 * place + segment, count, version)
                assert (t.token_ids[at], t.logprobs[at]) == sampled
                before.append(t.token_ids[at])
            segment += 1
        state = following(state, t.turn(turn))
        said = answer(state)
        rewards.append(said.reward)
        observation = t.observation(turn)
        assert observation == (said.observation if turn + 1 < t.turns else [])
        before += observation
        assert said.done == (t.ended_by == "done" and turn + 1 == t.turns)
    assert (t.turn_rewards, t.info, t.segments) == (rewards, {"state": float(t.turns)}, segment)
    assert len(t.token_ids) <= TOKENS
    assert t.ended_by in ("done", "turns", "tokens")


def through_json(kept: dict[int, list[Trajectory]]) -> dict[int, list[Trajectory]]:
    text = json.dumps({number: [asdict(one) for one in some] for number, some in kept.items()})
    return {int(number): [Trajectory(**one) for one in some] for number, some in json.loads(text).items()}


@pytest.mark.parametrize("replayable", [True, False])
@pytest.mark.parametrize("seed", split("agents", range(25), range(8)))
def test_any_order_of_calls_gives_every_episode_once_and_as_its_segments_and_environment_make_it(
    host, seed, replayable
):
    """Every `open` has a version of its own, so the runs of a turn are its segments. When answers come varies."""
    pace, slots = random.Random(seed), 1 + seed % 6
    Chain.pause_s, Chain.stepped = staticmethod(lambda: pace.choice([0, 0, 0.001])), Counter()
    made = ScriptedEngine(steps=lambda slot: pace.choice([0, 1, 1, 2, 5]), late=lambda slot: pace.choice([0, 0, 1, 9]))
    groups = groups_of(made, host, slots, replayable=replayable)
    is_open, restarts, numbers = False, 0, itertools.count()
    under_way: dict[int, int] = {}
    done: dict[int, list[Trajectory]] = {}

    def take(found: list[tuple[int, list[Trajectory]]]) -> None:
        for number, samples in found:
            assert len(samples) == under_way.pop(number)
            assert number not in done
            done[number] = samples
            for place, trajectory in enumerate(samples):
                check(number, place, trajectory)

    for _ in range(30):
        call = pace.choice(["add", "add", "wait", "look", "turn", "turn", "restart"])
        if call == "add" and groups.free:
            number = next(numbers)
            under_way[number] = pace.randint(1, groups.free)
            groups.add(asked(number, under_way[number]))
        elif call == "wait":
            take(groups.wait())
        elif call == "look" and is_open:
            take(groups.wait(after(pace.randint(1, 4))))
        elif call == "turn":
            if is_open:
                groups.interrupt()
            else:
                made.weight_version += 1
                groups.open()
            is_open = not is_open
        elif call == "restart" and not is_open:
            kept, restarts = through_json(groups.partial()), restarts + 1
            groups.close()
            groups = groups_of(made, host, slots, replayable=replayable)
            for number, samples in kept.items():
                groups.add(asked(number, under_way[number]), samples)
        assert groups.busy == bool(under_way)
        assert 0 <= groups.free <= slots
    if not is_open:
        made.weight_version += 1
        groups.open()
    while groups.busy:
        take(groups.wait())
    assert (under_way, groups.free) == ({}, slots)
    groups.close()
    if not restarts:
        turns = Counter((number, turn) for number, some in done.items() for one in some for turn in range(one.turns))
        assert Chain.stepped == turns, "an environment is asked once for every turn, whatever is interrupted"


def opened(made: ScriptedEngine, host: Host, **limits: Any) -> GroupGenerator:
    groups = groups_of(made, host, **limits)
    groups.open()
    return groups


def until_idle(groups: GroupGenerator) -> list[Trajectory]:
    found = []
    while groups.busy:
        found += [one for _, samples in groups.wait() for one in samples]
    return found


class Gate(Chain):
    """Thinks about the turns of group 0 until it is let go."""

    go: ClassVar[threading.Event]

    def step(self, action: Action) -> Any:  # type: ignore[override]
        if self.name == 0:
            assert self.go.wait(120)
        return super().step(action)


def test_an_environment_that_thinks_keeps_no_other_episode_from_going_on():
    Chain.pause_s, Gate.go, slow = staticmethod(lambda: 0.0), threading.Event(), Host(Gate, Gate.Settings())
    groups = opened(ScriptedEngine(), slow)
    for number in range(4):
        groups.add(asked(number, 2))
    over: list[int] = []
    while len(over) < 3:
        over += [number for number, _ in groups.wait()]
    assert sorted(over) == [1, 2, 3]
    groups.interrupt()  # while it thinks
    groups.open()
    Gate.go.set()
    for place, trajectory in enumerate(until_idle(groups)):
        check(0, place, trajectory)
    groups.close()
    slow.close()


def test_a_turn_that_was_not_answered_is_answered_in_the_new_environment(host):
    Gate.go, slow, made = threading.Event(), Host(Gate, Gate.Settings()), ScriptedEngine()
    groups = opened(made, slow)
    groups.add(asked(0, 4))
    groups.wait(lambda: len(made.submitted) == 4 and not made.opened[0].turns)
    groups.interrupt()
    kept = through_json(groups.partial())[0]
    groups.close()
    Gate.go.set()
    slow.close()
    assert all(one.is_unanswered for one in kept)
    made.weight_version, Chain.stepped = 1, Counter()
    groups = opened(made, host)
    groups.add(asked(0, 4), kept)
    found = until_idle(groups)
    for place, trajectory in enumerate(found):
        check(0, place, trajectory)
    assert Chain.stepped == Counter((0, turn) for one in found for turn in range(one.turns))
    groups.close()


def all_begun(made: ScriptedEngine) -> bool:
    """Whether four sequences have begun and one that has been answered is in another turn."""
    turns = made.opened[0].turns.values()
    return len({sequence for sequence, *_ in made.submitted}) == 4 and any(len(turn.before) > 2 for turn in turns)


def begun(host: Host) -> tuple[ScriptedEngine, list[Trajectory]]:
    """Episodes of group 1 that have answered turns and are in another one."""
    Chain.pause_s = staticmethod(lambda: 0.0)
    for _ in range(60):
        made = ScriptedEngine()
        groups = opened(made, host)
        groups.add(asked(1, 4))
        groups.wait(lambda made=made: all_begun(made))
        groups.interrupt()
        kept = groups.partial().get(1, [])
        groups.close()
        if any(one.turn_rewards and one.in_turn for one in kept):
            return made, kept
    raise AssertionError("no episode was in its second turn")


def test_recorded_turns_are_played_into_a_new_environment(host):
    made, kept = begun(host)
    Chain.stepped, asked_for = Counter(), len(made.submitted)
    made.weight_version = 1
    groups = opened(made, host)
    groups.add(asked(1, 4), kept)
    found = until_idle(groups)
    for place, (was, now) in enumerate(zip(kept, found, strict=True)):
        check(1, place, now)
        assert now.token_ids[: len(was.token_ids)] == was.token_ids
    turns = Counter(
        (1, turn) for one, was in zip(found, kept, strict=True) if not was.ended_by for turn in range(one.turns)
    )
    assert Chain.stepped == turns
    assert all(len(tokens) > 2 for _, tokens, *_ in made.submitted[asked_for:][:1]), "it goes on where it was"
    groups.close()


def test_an_environment_that_cannot_be_played_again_begins_again(host):
    made, kept = begun(host)
    made.weight_version = 1
    groups = opened(made, host, replayable=False)
    groups.add(asked(1, 4), kept)
    for place, (was, now) in enumerate(zip(kept, until_idle(groups), strict=True)):
        check(1, place, now)
        assert was.ended_by or now.versions == [[1, len(now.token_ids)]]
    groups.close()


def test_an_episode_whose_environment_says_something_else_the_second_time_begins_again(host, capsys):
    """As where its settings changed before the run was resumed."""
    made, kept = begun(host)
    made.weight_version = 1
    groups = opened(made, host)
    groups.add(replace(asked(1, 4), env_seed=4), kept)  # first(4) == first(1), and nothing after it is
    found = until_idle(groups)
    changed = [now for was, now in zip(kept, found, strict=True) if was.turn_rewards and not was.ended_by]
    assert changed
    assert all(one.versions == [[1, len(one.token_ids)]] and not one.error for one in changed)
    assert capsys.readouterr().out.count("begins again: its environment now answers") == len(changed)
    groups.close()


class Fails(Chain):
    """Answers nothing any more."""

    async def step(self, action: Action) -> Step:
        raise ConnectionError("no service")


def test_an_episode_whose_environment_fails_where_it_had_answered_begins_again(capsys):
    """The environment's failure is one of the new episode, which has other turns."""
    broken = Host(Fails, Fails.Settings())
    groups = GroupGenerator(ScriptedEngine(), SAMPLING, STOPS, 8, LONGEST, rules_of(broken, "mark", replayable=True))
    groups.add(asked(1, 1), [between_turns()])
    groups.open()
    [found] = until_idle(groups)
    assert (found.ended_by, found.turns, found.turn_starts) == ("error", 1, [0])
    assert "g1#0 begins again" in capsys.readouterr().out
    groups.close()
    broken.close()


def between_turns() -> Trajectory:
    """Episode 0 of group 1, which waits for its third turn."""
    made, state = Trajectory(first(1)), 1
    for _ in range(2):
        made.add_segment([9] * (MOST - 1) + [STOPS[0]], [-1.0] * MOST, [[0, MOST]])
        made.end_turn("stop")
        state = following(state, made.last_turn)
        said = answer(state)
        assert not said.done
        made.turn_rewards.append(said.reward)
        made.add_observation(said.observation)
    return made


LOWER = [{"tokens": 16}, {"tokens": 15}, {"tokens": 8}, {"turns": 2}, {"prompt_tokens": 1}]


@pytest.mark.parametrize("limits", LOWER)
def test_what_is_beyond_limits_that_were_lowered_begins_again(host, limits):
    made, kept = ScriptedEngine(), between_turns()
    assert len(kept.token_ids) == 16
    made.weight_version = 1
    rules = rules_of(host, "mark", **{"turns": 4, "tokens": TOKENS, "replayable": True, **limits})
    groups = GroupGenerator(made, SAMPLING, STOPS, 8, LONGEST, rules)
    assert groups.add(asked(1, 1), [kept]) == ("prompt_tokens" not in limits), "told, or found out by the environment"
    groups.open()
    [found] = until_idle(groups)
    assert {version for version, _ in found.versions} == {1}
    assert len(found.token_ids) <= limits.get("tokens", TOKENS)
    assert found.turns <= limits.get("turns", 4)
    assert ("max_prompt_tokens" in found.error) == ("prompt_tokens" in limits)
    groups.close()


def test_an_episode_whose_environment_was_taken_away_is_no_plain_answer():
    made, one_turn = ScriptedEngine(), Trajectory([9])
    made.weight_version = 1
    one_turn.add_segment([7, 8], [-1.0, -2.0], [[0, 2]])
    elsewhere, over = replace(one_turn.copy(), prompt_ids=[6]), between_turns()
    over.end("turns")
    groups = GroupGenerator(made, SAMPLING, STOPS, 8, LONGEST)
    groups.add(asked(1, 4), [between_turns(), elsewhere, over, one_turn])
    groups.open()
    *begun, gone_on = until_idle(groups)
    for place, found in enumerate(begun):
        assert (found.prompt_ids, found.turns, all(found.sampled)) == ([9], 1, True)
        assert found.versions == [[1, len(found.token_ids)]]
        assert found.token_ids[0] == rule([9], 1000 + 10 * place, 0, 1)[0]
    assert (gone_on.token_ids[:2], gone_on.versions[0]) == ([7, 8], [0, 2])
    groups.close()


class Takes(Chain):
    """Takes its row apart."""

    async def reset(self, row: dict[str, Any], seed: int) -> list[int]:
        self.tasks = row.pop("tasks")
        row["name"] = 0
        return [self.tasks.pop()]

    async def step(self, action: Action) -> Step:
        return Step(done=True)


def test_an_environment_may_change_its_row(host):
    """Neither the other samples of the prompt nor a later beginning see it."""
    taking = Host(Takes, Takes.Settings())
    row = {"name": 1, "tasks": [3, 4]}
    groups = opened(ScriptedEngine(), taking)
    groups.add(replace(asked(1, 3), row=row))
    assert [one.prompt_ids for one in until_idle(groups)] == [[4]] * 3
    assert row == {"name": 1, "tasks": [3, 4]}
    groups.close()
    taking.close()


class Says(Environment):
    """Two tokens, after a while."""

    async def step(self, action: Action) -> Step:
        await asyncio.sleep(0.002)
        return Step([7, 8])


def test_log_probs_of_interrupted_turns_are_those_of_a_full_pass():
    """On the embedded engine, whose other sequences decode while an environment thinks."""
    from tests.dist import single_process
    from tests.rollout.cases import STOP, build, engine, full_forward, make_requests, sampled

    single_process()
    chunks, says = build("qwen3"), Host(Says, Says.Settings())
    rules = rules_of(says, turns=3, tokens=70, prompt_tokens=40)
    groups = GroupGenerator(engine(chunks, max_running=8), sampled(), STOP, 9, 110, rules)
    asked_for = make_requests(count=3)
    groups.open()
    for number, request in enumerate(asked_for):
        seeds = [lambda k, seed=seed: seed + 100_000 * k for seed in request.seeds]
        groups.add(Group(number, request.prompt_ids, seeds))
    segments, turns = 0, 0
    while groups.busy:
        for number, samples in groups.wait(after(2)):
            for one in samples:
                segments, turns = segments + one.segments, turns + one.turns
                for turn, (start, end) in enumerate(zip(one.turn_starts, one.turn_ends, strict=True)):
                    before = [*asked_for[number].prompt_ids, *one.token_ids[:start]]
                    expected = full_forward(chunks[0], before, one.turn(turn))
                    found = torch.tensor(one.logprobs[start:end])
                    torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)
        groups.interrupt()
        groups.open()
    groups.close()
    says.close()
    assert segments > turns > sum(len(request.seeds) for request in asked_for)


def test_an_answer_is_no_episode_of_an_environment_that_was_added(host):
    made, answered = ScriptedEngine(), Trajectory(first(1))
    plain = GroupGenerator(made, SAMPLING, STOPS, 8, LONGEST)
    plain.add(Group(1, first(1), [lambda k: k]))
    plain.open()
    [(_, [answered])] = plain.wait()
    plain.close()
    made.weight_version = 1
    groups = groups_of(made, host)
    assert groups.add(asked(1, 2), [answered, between_turns()]) == 1
    groups.open()
    [(_, [again, kept])] = groups.wait()
    assert {version for version, _ in again.versions} == {1}
    check(1, 0, again)
    assert {version for version, _ in kept.versions} == {0, 1}, "it goes on"
    groups.close()


def test_time_counts_only_while_it_is_open(host, monkeypatch):
    clock = [0.0]
    monkeypatch.setattr("megarl.rollout.groups.time.monotonic", lambda: clock[0])
    made = ScriptedEngine(steps=lambda slot: 0)  # nothing comes
    groups = opened(made, host, seconds=10.0)
    groups.add(asked(1, 1))
    groups.wait(after(20))
    clock[0] = 8.0
    groups.interrupt()
    clock[0] = 1000.0  # new weights come
    groups.open()
    assert groups.wait(after(20)) == []
    clock[0] = 1002.5
    [(_, [cut])] = groups.wait()
    assert (cut.ended_by, cut.finish_reason, cut.sampled) == ("seconds", "abort", [False])
    groups.close()


def test_time_goes_on_in_another_process(host, monkeypatch):
    clock = [0.0]
    monkeypatch.setattr("megarl.rollout.groups.time.monotonic", lambda: clock[0])
    groups = opened(ScriptedEngine(steps=lambda slot: 1), host, seconds=10.0)
    groups.add(asked(1, 1))
    groups.wait(after(2))
    clock[0] = 8.0
    groups.interrupt()
    kept = through_json(groups.partial())
    assert kept[1][0].segments > 0
    groups.close()
    later = groups_of(ScriptedEngine(steps=lambda slot: 0), host, seconds=10.0)
    assert later.add(asked(1, 1), kept[1]) == 0
    later.open()
    assert later.wait(after(20)) == []
    clock[0] = 10.5
    [(_, [cut])] = later.wait()
    assert cut.ended_by == "seconds"
    later.close()
