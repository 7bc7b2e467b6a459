"""Rounds of generation that end when enough groups are complete, against a token-by-token simulation."""

from __future__ import annotations

import asyncio
import itertools
import random
import time
from types import SimpleNamespace
from typing import Any

import pytest
import torch.distributed as dist

from megarl.data.trajectory import PLAIN, Trajectory
from megarl.envs import Action, Environment, Step
from megarl.envs.host import Host
from megarl.rollout.first_complete import Complete, _StoreTally, first_complete
from megarl.rollout.groups import Group, GroupGenerator
from megarl.system.comm import WorkerGroup
from megarl.system.errors import WorkerError
from megarl.system.store import SharedStore
from megarl.system.tracing import phase
from tests.envs.playing import rules_of
from tests.rollout.scripted import ScriptedEngine, rule
from tests.rollout.test_groups import EOS, MOST, SAMPLING, group, scripted, seeds_of

ALONE: Any = SimpleNamespace(dp_group=WorkerGroup.alone(), dp_size=1)
SAMPLES = 2
WINDOW = 2  # tokens of each sample in a window of the scripted engine, which looks after every token


class Simulation:
    """The same rounds, token by token: tokens, versions and number of segments of every sample."""

    def __init__(self) -> None:
        self.samples: dict[int, list[tuple[list[int], list[list[int]], int]]] = {}

    def is_over(self, number: int) -> bool:
        return all(t and (t[-1] in EOS or len(t) == MOST) for t, _, _ in self.samples[number])

    def round(self, version: int, wanted: int, required: set[int]) -> list[int]:
        """Generate with weights `version`; the numbers of the first `wanted` groups."""
        before = {number: [len(t) for t, _, _ in samples] for number, samples in self.samples.items()}
        order = sorted(number for number in self.samples if self.is_over(number))
        while len(order) < wanted or not required <= set(order):
            for number in sorted(self.samples):
                for place in range(SAMPLES):
                    self.draw(number, place, before[number][place], version)
            order += sorted(n for n in self.samples if n not in order and self.is_over(n))
        self.samples = {
            number: [
                (t, versions, segments + (len(t) > before[number][place]))
                for place, (t, versions, segments) in enumerate(samples)
            ]
            for number, samples in self.samples.items()
        }
        return sorted(sorted(order, key=lambda number: (number not in required, order.index(number)))[:wanted])

    def draw(self, number: int, place: int, begun: int, version: int) -> None:
        tokens, versions, segments = self.samples[number][place]
        seed = seeds_of(number, SAMPLES)[place](segments)
        for _ in range(WINDOW):
            if tokens and (tokens[-1] in EOS or len(tokens) == MOST):
                return
            tokens.append(rule([number, *tokens[:begun]], seed, len(tokens) - begun, version)[0])
            if not versions or versions[-1][0] != version:
                versions.append([version, 0])
            versions[-1][1] += 1


@pytest.mark.parametrize("seed", range(5))
def test_rounds_choose_the_groups_that_are_complete_first_and_continue_the_others(seed):
    drawn = random.Random(seed)
    made, simulated, number = ScriptedEngine(), Simulation(), 0
    groups = scripted(made, slots=40)
    ready: dict[int, list[Trajectory]] = {}
    carried = set[int]()
    for version in range(6):
        made.weight_version, wanted = version, drawn.randint(2, 4)
        for _ in range(drawn.randint(wanted, 6)):
            groups.add(group(number, [number], SAMPLES))
            simulated.samples[number] = [([], [], 0) for _ in range(SAMPLES)]
            number += 1
        required = carried if version % 2 else set()
        wanted = max(wanted, len(required))
        complete = first_complete(groups, ALONE, wanted, required, ready, by_steps=True)
        chosen = complete.first(wanted, lambda n: 0 if n in required else 1)  # noqa: B023
        assert chosen == simulated.round(version, wanted, required)
        for n in chosen:
            for sample, (tokens, versions, _) in zip(
                complete.trajectories.pop(n), simulated.samples.pop(n), strict=True
            ):
                assert (sample.token_ids, sample.versions, sample.ended_by) == (tokens, versions, PLAIN)
        ready, carried = complete.trajectories, set(simulated.samples)


def test_groups_of_one_window_go_by_number_and_older_ones_come_first():
    complete = Complete({}, {4: 1, 2: 1, 9: 0, 7: 3})
    assert complete.first(2, lambda number: 0) == [2, 9]
    assert complete.first(2, lambda number: 0 if number == 7 else 1) == [7, 9]


def test_a_group_that_is_dropped_frees_its_slots():
    groups = scripted(ScriptedEngine(steps=lambda sequence: 1 if sequence > 1 else MOST), slots=4)
    for number in range(2):
        groups.add(group(number, [number], SAMPLES))
    first_complete(groups, ALONE, 1, (), {}, by_steps=True)
    assert list(groups.partial()) == [1]
    assert [len(trajectory.token_ids) for trajectory in groups.drop(1)] == [WINDOW, WINDOW]
    assert (groups.busy, groups.free) == (False, 4)


class Slow(Environment):
    """Sleeps as long as its row says, then ends the episode."""

    def reset(self, row: dict[str, Any], seed: int) -> None:
        self.seconds = row["seconds"]

    async def step(self, action: Action) -> Step:
        await asyncio.sleep(self.seconds)
        return Step(reward=1.0, done=True)


def test_by_the_clock_a_slow_environment_delays_its_own_group_and_a_dropped_one_nobody():
    host = Host(Slow, Slow.Settings())
    groups = GroupGenerator(ScriptedEngine(lambda sequence: MOST), SAMPLING, EOS, 2, 100, rules_of(host, turns=1))

    def add(number: int, seconds: float) -> None:
        groups.add(Group(number, [number], seeds_of(number, 1), row={"seconds": seconds}))

    add(0, 0.0)
    add(1, 0.4)
    first = first_complete(groups, ALONE, 1, (), {}, by_steps=False)
    assert list(first.trajectories) == [0]
    groups.drop(1)
    add(2, 0.0)  # in the slot of the dropped group, whose environment would reply now
    time.sleep(0.5)
    assert list(first_complete(groups, ALONE, 1, (), {}, by_steps=False).trajectories) == [2]
    add(3, 0.2)
    add(4, 0.0)
    both = first_complete(groups, ALONE, 1, (), {}, by_steps=True)
    assert list(both.trajectories) == [3, 4], "every round of turns waits for all environments"
    groups.close()
    host.close()


def test_replicas_on_servers_name_one_that_counts_no_more(monkeypatch):
    """Two replicas in one process: the second one counts once, and then hangs."""
    store = SharedStore(dist.HashStore(), "rank 0 of the world", "60 s")
    alone, tallies = WorkerGroup.alone(), []
    for rank in (0, 1):
        monkeypatch.setattr("megarl.rollout.first_complete._rounds", itertools.count(7))
        world: Any = SimpleNamespace(name="the world", rank=rank, ranks=(0, 1), deadline_s=0.3, store=lambda: store)
        layout: Any = SimpleNamespace(world=world, mp_group=alone, rank=rank, is_lead=True, dp_rank=rank, dp_size=2)
        tallies.append(_StoreTally(layout, (2, 0)))
    assert not tallies[1].add(0, 0)

    def go_on() -> None:
        end = time.monotonic() + 60
        while time.monotonic() < end:
            tallies[0].add(0, 0)
            time.sleep(0.02)

    with (
        phase("rollout"),
        pytest.raises(WorkerError, match=r"rank 0 of the world timed out .* phase rollout: ") as late,
    ):
        go_on()
    assert str(late.value).endswith("of rank 1 in phase idle")
    tallies[0].close()
    assert not any(store.check([f"complete/7/{key}"]) for key in ("groups", "required", "progress/1", "where/1"))
