"""Groups that come and go on servers that answer by rule: replicas make the same calls and are interrupted together."""

from __future__ import annotations

import time
from types import SimpleNamespace
from typing import Any

import pytest

from megarl.data.trajectory import Trajectory
from megarl.envs import Action, Environment, Step
from megarl.envs.host import Host
from megarl.rollout.first_complete import first_complete
from megarl.rollout.groups import Group, GroupGenerator
from megarl.rollout.sglang.engine import Replica
from megarl.system.comm import WorkerGroup, team_world
from tests.dist import run_distributed
from tests.envs.playing import rules_of
from tests.rollout.answers import token
from tests.rollout.fake_servers import FakeServer, servers
from tests.rollout.test_sglang_turns import HINT, SAMPLING, alone, make_engine, started

pytestmark = pytest.mark.procs

ALONE: Any = SimpleNamespace(dp_group=WorkerGroup.alone(), dp_size=1)
HALF = 4  # of the 8 tokens of a sample: what a server has of one that is aborted


def waits_at_first(server: FakeServer, payload: dict[str, Any]) -> str:
    """First stretches end only when they are aborted, but those of group 1, which take a few looks of the client."""
    seed = payload["sampling_params"]["sampling_seed"]
    if seed < 100:
        return "wait" if seed % 10 == 0 else "ok"
    server.lock.release()
    time.sleep(0.7)
    server.lock.acquire()
    return "ok"


def add(stream: GroupGenerator, number: int, samples: int) -> None:
    """Stretch k of sample i of group g has the seed 100 g + 10 i + k."""
    base = 100 * number
    seeds = [lambda turn, seed=base + 10 * i: seed + turn for i in range(samples)]
    stream.add(Group(number, [70, 71 + number], seeds))


def expected(number: int, sample: int, halves: int) -> list[int]:
    """Tokens of a sample of one stretch, or of two halves."""
    prompt, seed = [70, 71 + number], 100 * number + 10 * sample
    first = [token(prompt, seed, place) for place in range(8 // halves)]
    return first if halves == 1 else first + [token([*prompt, *first], seed + 1, place) for place in range(HALF)]


def test_what_was_interrupted_goes_on_from_its_tokens_with_the_next_seed():
    with servers(waits_at_first) as made:
        stream = GroupGenerator(alone(made), SAMPLING, [], 4, 100)
        stream.open()
        add(stream, 0, 2)
        assert stream.wait() == []
        started(made[0], 2)
        stream.interrupt()
        halves = [expected(0, i, 2)[:HALF] for i in range(2)]
        kept = [Trajectory([70, 71]) for _ in halves]
        for trajectory, half in zip(kept, halves, strict=True):
            trajectory.add_segment(half, [-1.0] * HALF, [[1, HALF]])
        assert stream.partial() == {0: kept}
        stream.open()
        while not (found := stream.wait()):
            pass
        stream.close()
    [(_, samples)] = found
    assert [sample.token_ids for sample in samples] == [expected(0, i, 2) for i in range(2)]
    assert [(sample.versions, sample.finish_reason) for sample in samples] == [([[1, 8]], "length")] * 2


def test_a_round_ends_when_enough_groups_are_complete_and_the_others_go_on_in_the_next_one():
    """The first samples of group 0 end only when they are aborted."""
    with servers(waits_at_first) as made:
        stream = GroupGenerator(alone(made), SAMPLING, [], 8, 100)
        for number in range(3):
            add(stream, number, 1)
        complete = first_complete(stream, ALONE, 2, (), {}, by_steps=True)
        assert complete.first(2, lambda number: 0) == [1, 2]
        assert [sample.token_ids for sample in complete.trajectories[1]] == [expected(1, 0, 1)]
        [[kept]] = stream.partial().values()
        assert kept.token_ids == expected(0, 0, 2)[:HALF]
        add(stream, 3, 1)
        complete = first_complete(stream, ALONE, 1, (0,), {}, by_steps=True)
        assert complete.trajectories[0][0].token_ids == expected(0, 0, 2)
        assert complete.first(1, lambda number: number) == [0]
        stream.close()


def test_numbers_of_sequences_are_used_again_and_prompts_are_given_up():
    with servers(lambda server, payload: "ok") as made:
        stream = GroupGenerator(alone(made), SAMPLING, [], 2, 100)
        stream.open()
        for number in range(1, 6):
            add(stream, number, 2)
            while not (found := stream.wait()):
                pass
            [(done, samples)] = found
            assert done == number
            assert [sample.token_ids for sample in samples] == [expected(number, i, 1) for i in range(2)]
        assert not stream._generation._prompts
        stream.close()


class Hints(Environment):
    """Answers two tokens, twice."""

    async def step(self, action: Action) -> Step:
        return Step(HINT, reward=1.0, done=action.turn == 1)


def test_episodes_are_interrupted_inside_a_turn_and_keep_their_environment():
    """The first segment ends only when it is aborted."""
    host, first = Host(Hints, Hints.Settings()), expected(0, 0, 2)
    second = [token([70, 71, *first, *HINT], 2, place) for place in range(8)]
    stops = [first[-1], second[-1]]
    with servers(waits_at_first) as made:
        groups = GroupGenerator(alone(made), SAMPLING, stops, 2, 100, rules_of(host, turns=4, tokens=60))
        groups.open()
        add(groups, 0, 1)
        while not made[0].payloads:
            groups.wait()
        groups.interrupt()
        [[kept]] = groups.partial().values()
        assert (kept.token_ids, kept.in_turn, kept.segments) == (first[:HALF], True, 1)
        groups.open()
        while not (found := groups.wait()):
            pass
        groups.close()
    host.close()
    [(_, [episode])] = found
    assert episode.token_ids == [*first, *HINT, *second]
    assert (episode.ended_by, episode.turn_rewards, episode.segments) == ("done", [1.0, 1.0], 3)


def run_rank(urls: list[str], rank_replica: list[int]) -> Any:
    """Replica 0 draws two groups and replica 1 none. The ranks agree before each call, and are interrupted once."""
    world = team_world(120)
    groups = {
        i: world.subgroup([r for r, at in enumerate(rank_replica) if at == i], "the replica")
        for i in sorted(set(rank_replica))
    }
    index = rank_replica[world.rank]
    engine = make_engine(urls, Replica(index, len(groups), groups[index], world), world.rank == 0)
    stream = GroupGenerator(engine, SAMPLING, [], 4, 100)
    stream.open()
    if index == 0:
        add(stream, 0, 2)
        add(stream, 1, 1)
    found: dict[int, list[list[int]]] = {}
    interrupted = False
    while any(world.all_gather_json(stream.busy)):
        found |= {number: [sample.token_ids for sample in samples] for number, samples in stream.wait()}
        if not interrupted and any(world.all_gather_json(1 in found)):
            stream.interrupt()
            stream.open()
            interrupted = True
    stream.close()
    return [[number, samples] for number, samples in sorted(found.items())]


def test_replicas_wait_and_are_interrupted_together_also_those_that_draw_nothing():
    with servers(waits_at_first) as made:
        first, second, idle = run_distributed(run_rank, 3, 120, [made[0].api.url], [0, 0, 1])
    assert first == second
    assert first == [[0, [expected(0, i, 2) for i in range(2)]], [1, [expected(1, 0, 1)]]]
    assert idle == []


def run_rounds(urls: list[str]) -> Any:
    """Two rounds of two replicas: the second one has nothing left to draw in the second round."""
    world = team_world(120)
    replica = [world.subgroup([rank], "the replica") for rank in range(2)][world.rank]
    layout: Any = SimpleNamespace(
        dp_group=world, mp_group=replica, world=world, rank=world.rank, is_lead=True, dp_rank=world.rank, dp_size=2
    )
    stream = GroupGenerator(
        make_engine(urls, Replica(world.rank, 2, replica, world), world.rank == 0), SAMPLING, [], 4, 100
    )
    for number in (2 * world.rank, 2 * world.rank + 1):
        add(stream, number, 1)
    first = first_complete(stream, layout, 3, (), {}, by_steps=True)
    second = first_complete(stream, layout, 1, [number for number in (0,) if world.rank == 0], {}, by_steps=True)
    rounds = (first.trajectories, second.trajectories)  # in each of them, groups stand in the order of their arrival
    tokens = [samples[0].token_ids for taken in rounds for _, samples in sorted(taken.items())]
    return [sorted(first.windows), sorted(second.windows), tokens]


def test_replicas_on_servers_end_a_round_together_without_waiting_for_each_other():
    with servers(waits_at_first) as made:
        zero, one = run_distributed(run_rounds, 2, 120, [made[0].api.url])
    assert zero == [[1, 2, 3], [0], [expected(1, 0, 1), expected(0, 0, 2)]]
    assert one == [[1, 2, 3], [0], [expected(2, 0, 1), expected(3, 0, 1)]]
