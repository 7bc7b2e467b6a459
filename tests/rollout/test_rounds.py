"""Turns of one episode that are sampled side by side: the episode is the one in which they follow each other."""

from __future__ import annotations

import json
import random
from dataclasses import asdict, replace
from typing import Any, ClassVar

import pytest

from megarl.config.rollout import SamplingConfig
from megarl.data.trajectory import Trajectory
from megarl.envs import Action, Environment, Step
from megarl.envs.host import Host
from megarl.envs.protocol import Continuation, Ending
from megarl.rollout.groups import Group, GroupGenerator
from tests.envs.playing import EOS, rules_of
from tests.rollout.scripted import ScriptedEngine

ROOM, TURNS, TOKENS, LONGEST = 6, 12, 100, 120
STOPS = [EOS, *range(5, 40, 5)]
BASES = [1000 * number + 100 * sample for number in range(5) for sample in range(2)]  # seeds of the first turns


class Fan(Environment):
    """Asks for one to four turns at a time, each after any earlier turn or after none; what follows from all turns."""

    has_simultaneous_turns: ClassVar[bool] = True
    may_drop_turns: ClassVar[bool] = True
    left: ClassVar[set[int]] = set()  # places of turns that are dropped

    def reset(self, row: dict[str, Any], seed: int) -> Any:
        self.seed, self.said = seed, list[list[int]]()
        return self._following()

    def step(self, action: Action) -> Step:
        turns = (action, *action.beside)
        assert len(turns) == self.asked
        self.said += [list(turn.token_ids) for turn in turns]
        if len(self.said) >= TURNS:
            return Step(Ending((3,), 5), float(self._drawn().random()), True, {"said": float(len(self.said))})
        return Step(self._following())

    def _drawn(self) -> random.Random:
        return random.Random(json.dumps([self.seed, self.said]))

    def _following(self) -> Continuation:
        draw = self._drawn()
        self.asked = draw.randint(1, 4)
        first, *others = (
            Continuation(
                [draw.randrange(6, 9) for _ in range(draw.randint(1, 3))],
                draw.choice([None, *range(len(self.said))]),
                draw.choice([None, 3]),
            )
            for _ in range(self.asked)
        )
        return replace(first, beside=tuple(others))

    @property
    def dropped_turns(self) -> set[int]:  # type: ignore[override]
        return self.left


@pytest.fixture(scope="module")
def host():
    made = Host(Fan, Fan.Settings())
    yield made
    made.close()


def groups_of(engine: ScriptedEngine, host: Host, slots: int, together: bool = True) -> GroupGenerator:
    rules = replace(rules_of(host, turns=99, tokens=TOKENS), has_simultaneous_turns=together, may_drop_turns=True)
    return GroupGenerator(engine, SamplingConfig(max_new_tokens=ROOM), STOPS, slots, LONGEST, rules)


def asked(number: int, samples: int = 2) -> Group:
    seeds = [lambda k, base=1000 * number + 100 * i: base + k for i in range(samples)]
    return Group(number, [9], seeds, f"g{number}", {}, number)


def played(engine: ScriptedEngine, host: Host, slots: int, together: bool) -> list[list[dict[str, Any]]]:
    groups = groups_of(engine, host, slots, together)
    for number in range(slots // 2):
        groups.add(asked(number))
    episodes = [fields_of(one) for samples in groups.finish() for one in samples]
    groups.close()
    return episodes


def fields_of(episode: Trajectory) -> list[dict[str, Any]]:
    return [asdict(lane) for lane in episode.all_lanes]


@pytest.mark.parametrize("slots", [2, 10])
def test_turns_side_by_side_are_those_of_one_after_the_other(host, slots):
    beside, alone = ScriptedEngine(), ScriptedEngine()
    episodes = played(beside, host, slots, True)
    assert episodes == played(alone, host, slots, False)
    seeds = {tuple(tokens): set[int]() for _, tokens, *_ in alone.submitted}
    for _, tokens, seed, _ in alone.submitted:
        seeds[tuple(tokens)].add(seed)
    for base, lane in ((base, lane) for base, lanes in zip(BASES, episodes, strict=False) for lane in lanes):
        for number, start in zip(lane["turn_numbers"], lane["turn_starts"], strict=True):
            assert base + number in seeds[(*lane["prompt_ids"], *lane["token_ids"][:start])]
    key = lambda turn: turn[1:]  # noqa: E731 - the same turns in other slots
    assert sorted(map(key, beside.submitted)) == sorted(map(key, alone.submitted))
    assert {slot for slot, *_ in alone.submitted} == set(range(slots)) < {slot for slot, *_ in beside.submitted}


@pytest.mark.parametrize("seed", range(8))
def test_interrupted_turns_go_on_with_seeds_of_their_own(host, seed):
    pace = random.Random(seed)
    engine = ScriptedEngine(lambda slot: pace.choice([0, 1, 1, 3]), lambda slot: pace.choice([0, 0, 1]))
    groups, episodes = groups_of(engine, host, 4), []
    for number in range(2):
        groups.add(asked(number))
    while groups.busy:
        engine.weight_version += 1
        groups.open()
        for _ in range(pace.randint(1, 3)):
            episodes += [one for _, samples in groups.wait(lambda: pace.random() < 0.3) for one in samples]
        groups.interrupt()
    assert len(episodes) == groups.free == 4
    assert sorted(groups._free_sides) == list(range(4, 8))
    for episode in episodes:
        ends = {n: lane.turn(k) for lane in episode.all_lanes for k, n in enumerate(lane.turn_numbers)}
        assert sorted(ends) == list(range(int(episode.info["said"])))
    sampled = [(seed, *tokens) for _, tokens, seed, _ in engine.submitted]
    by_seed: dict[int, set[tuple[int, ...]]] = {}
    for number, *tokens in sampled:
        by_seed.setdefault(number, set()).add(tuple(tokens))
    assert {len(contexts) for contexts in by_seed.values()} == {1}  # a turn without tokens keeps its seed
    used = {base: sum(base <= number < base + 100 for number in by_seed) for base in (0, 100, 1000, 1100)}
    assert sorted(used.values()) == sorted(episode.segments for episode in episodes)


def test_a_dropped_turn_ends_and_the_others_go_on(host, monkeypatch):
    monkeypatch.setattr(Fan, "left", {1})
    groups = groups_of(ScriptedEngine(), host, 2)
    groups.add(asked(0))
    for episode in [one for samples in groups.finish() for one in samples]:
        lanes = {lane.turn_numbers[-1]: lane for lane in episode.all_lanes}
        cut = {number for number, lane in lanes.items() if lane.finish_reason == "abort"}
        assert cut
        assert cut != set(lanes)
        numbers = {number for lane in episode.all_lanes for number in lane.turn_numbers}
        assert numbers == set(range(int(episode.info["said"])))
    groups.close()
