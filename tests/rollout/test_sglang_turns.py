"""Turns of episodes, each sent and aborted by itself, on servers that answer by rule (fake_servers.py)."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest

from megarl.config.rollout import SamplingConfig
from megarl.config.sglang import SGLangConfig
from megarl.data.trajectory import Trajectory
from megarl.envs import Action, Environment, Step
from megarl.envs.host import Host
from megarl.rollout.engine import Completion, Request
from megarl.rollout.sglang.engine import Replica, SglangEngine
from megarl.rollout.sglang.launch import WorkerPlace, open_fleet
from megarl.rollout.sglang.turns import ServerTurns
from megarl.system.comm import WorkerGroup, team_world
from megarl.system.errors import ServerError
from tests.data.templates import tokenizer_of
from tests.dist import run_distributed
from tests.envs import playing
from tests.envs.playing import group, rules_of
from tests.rollout.answers import RUN, token
from tests.rollout.fake_servers import WAIT_S, FakeServer, ok, servers
from tests.rollout.test_sglang_engine import acknowledge

pytestmark = pytest.mark.procs

SAMPLING = SamplingConfig(max_new_tokens=8)
TALKS = [[70], [71, 71], [71, 71], [72]]  # sequences 1 and 2 begin alike
HINT = [5, 6]
TURNS = 3


def make_engine(
    urls: list[str], replica: Replica, is_first: bool = True, tokenizer: Any = None, **config: Any
) -> SglangEngine:
    import os
    from pathlib import Path

    os.environ["FAKE_KEY"] = "key"
    settings = SGLangConfig(urls=urls, api_key_env="FAKE_KEY", **config)
    place = WorkerPlace(is_first=is_first)
    fleet = open_fleet(settings, place, Path(), Path(), "float32", cuda=False, world=replica.world)
    acknowledge(fleet, 1)
    engine = SglangEngine(settings, fleet, replica, lambda: acknowledge(fleet, 1), RUN, tokenizer)
    engine.weight_version = 1
    return engine


def alone(made: list[FakeServer], **config: Any) -> SglangEngine:
    return make_engine([server.api.url for server in made], Replica(), **config)


def converse(engine: SglangEngine, talks: list[list[int]], turns: int = TURNS) -> list[list[tuple[list[int], int]]]:
    """`turns` turns of every talk: (tokens before, seed) of each, checked by the servers' rule. Turn t of talk i has
    the seed 10 i + t."""
    generation = engine.open(SAMPLING, [], len(talks), 100)
    said: list[list[tuple[list[int], int]]] = [[] for _ in talks]
    before = [list(talk) for talk in talks]
    live = len(talks)
    for i, talk in enumerate(talks):
        generation.submit(i, talk, 10 * i, 8)
    try:
        while generation.any_busy(live > 0):
            for i, done in generation.wait().items():
                seed = 10 * i + len(said[i])
                assert done.token_ids == [token(before[i], seed, place) for place in range(8)]
                assert (done.finish_reason, done.versions) == ("length", [[1, 8]])
                said[i].append((before[i], seed))
                if len(said[i]) == turns:
                    generation.forget(i)
                    live -= 1
                    continue
                before[i] = [*before[i], *done.token_ids, *HINT]
                generation.submit(i, before[i], 10 * i + len(said[i]), 8)
    finally:
        generation.close()
    return said


def test_all_turns_of_episodes_that_begin_alike_go_to_one_server():
    with servers(ok, ok) as made:
        said = converse(alone(made), TALKS)
        assert all(len(turns) == TURNS for turns in said)
        homes = [{p["input_ids"][0] for p in server.payloads} for server in made]
        assert homes[0] | homes[1] == {70, 71, 72}
        assert not homes[0] & homes[1]
        assert sum(len(server.payloads) for server in made) == TURNS * len(TALKS)


def test_what_a_server_samples_after_a_stop_string_is_dropped():
    """In turns and in whole calls."""
    tokenizer = tokenizer_of("bytes")
    with servers(ok) as made:
        engine = alone(made, tokenizer=tokenizer)
        free = [token([70], 50, place) for place in range(8)]  # a letter each
        strings, end = [tokenizer.decode(free[2:4])], 4
        sampling = SamplingConfig(max_new_tokens=8, stop=strings)
        [[whole]] = engine.generate([Request([70], [50])], sampling, [])
        generation = engine.open(sampling, [], 1, 100)
        generation.submit(0, [70], 50, 8)
        [turn] = collect(generation, 1).values()
        generation.close()
        for done in (whole, turn):
            assert (done.token_ids, done.finish_reason, done.versions) == (free[:end], "stop", [[1, end]])
            assert len(done.logprobs) == end


def test_an_episode_keeps_its_server_when_connections_end_that_were_idle_between_its_turns(
    monkeypatch: pytest.MonkeyPatch,
):
    monkeypatch.setattr("megarl.rollout.sglang.client._IDLE_S", 0.05)
    monkeypatch.setattr("megarl.rollout.sglang.client.Dispatch._watch", no_watch)  # which has connections, too
    with servers(ok, ok) as made:
        for server in made:
            server.keeps = True
        engine = alone(made)
        generation = engine.open(SAMPLING, [], 2, 100)
        for turn in range(TURNS):
            for i, first in enumerate((70, 72)):
                generation.submit(i, [first, turn], turn, 8)
            collect(generation, 2)
            time.sleep(0.2)  # the environment thinks
            for server in made:
                server.end_idle()
        generation.close()
        assert [sorted(p["input_ids"][0] for p in server.payloads) for server in made] == [[70] * TURNS, [72] * TURNS]
        assert len(engine.servers()) == 2


def test_a_server_that_nobody_asked_while_the_process_stood_still_is_not_lost(
    monkeypatch: pytest.MonkeyPatch,
):
    """The clock jumps by an hour while a turn is under way, and servers take a while to say that they are well."""
    jumped = threading.Event()
    clock = SimpleNamespace(monotonic=lambda: time.monotonic() + 3600 * jumped.is_set())
    monkeypatch.setattr("megarl.rollout.sglang.client.time", clock)
    monkeypatch.setattr("megarl.rollout.sglang.client._HEALTH_EVERY_S", 0.05)

    def held(server: FakeServer, payload: dict[str, Any]) -> str:
        jumped.set()
        looks = server.looks
        server.lock.release()
        until(lambda: server.looks >= looks + 2)  # the first one may have been on its way before
        server.lock.acquire()
        return "ok"

    with servers(held) as made:
        made[0].health_s = 0.3
        generation = alone(made).open(SAMPLING, [], 1, 100)
        generation.submit(0, [70], 0, 8)
        collect(generation, 1)
        generation.close()
        assert len(made[0].payloads) == 1


def test_a_long_turn_holds_up_no_other_episode():
    """The first turn of episode 0 is answered only after the last turn of episode 3 has come."""
    last = threading.Event()

    def rule(server: FakeServer, payload: dict[str, Any]) -> str:
        if payload["sampling_params"]["sampling_seed"] == 30 + TURNS - 1:
            last.set()
        return "ok"

    def held(server: FakeServer, payload: dict[str, Any]) -> str:
        if payload["sampling_params"]["sampling_seed"] == 0:
            server.lock.release()
            assert last.wait(WAIT_S)
            server.lock.acquire()
        return rule(server, payload)

    with servers(held, held) as made:
        assert all(len(turns) == TURNS for turns in converse(alone(made), TALKS))


def started(made: FakeServer, count: int) -> None:
    """Wait until so many requests have come."""
    until(lambda: len(made.payloads) >= count)


def until(condition: Callable[[], bool]) -> None:
    """Wait until it is true."""
    end = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < end, f"not within {WAIT_S} s"
        time.sleep(0.01)


async def no_watch(*_: object) -> None:
    """In the place of a client's watch."""


def collect(generation: Any, count: int) -> dict[int, Completion]:
    found: dict[int, Completion] = {}
    while len(found) < count:
        assert generation.any_busy(True)
        found |= generation.wait()
    return found


class Patient(Environment):
    """Two turns. Episode 0 is answered in its first turn only after the last episode has come to its end."""

    last: ClassVar[threading.Event]

    def reset(self, row: dict[str, Any], seed: int) -> None:
        self.number = row["number"]

    def step(self, action: Action) -> Step:
        if self.number == 3 and action.turn == 1:
            self.last.set()
        if self.number == 0 and action.turn == 0:
            assert self.last.wait(WAIT_S)
        return Step([5, 6], reward=1.0, done=action.turn == 1)


def play(engine: SglangEngine, seconds: float | None, stops: Sequence[int]) -> list[Trajectory]:
    """Episodes of TALKS with the environment above."""
    host = Host(Patient, Patient.Settings(), 100.0)
    rules = rules_of(host, turns=4, tokens=100, seconds=seconds)
    groups = [group(f"{i}", {"number": i}, talk, 0, lambda turn: turn) for i, talk in enumerate(TALKS)]
    try:
        return playing.play(engine, rules, groups, SAMPLING, stops)
    finally:
        host.close()


def noted(monkeypatch: pytest.MonkeyPatch, name: str) -> list[int]:
    """Sequences that this method of turns on servers was called with, from here on."""
    sequences, method = list[int](), getattr(ServerTurns, name)

    def note(self: ServerTurns, sequence: int, *rest: Any) -> None:
        method(self, sequence, *rest)
        sequences.append(sequence)

    monkeypatch.setattr(ServerTurns, name, note)
    return sequences


def test_turns_that_servers_do_not_end_in_time_keep_what_there_is(monkeypatch: pytest.MonkeyPatch):
    """Those of the talks that two requests at a time let begin; the others are one end token that is not trained on.
    The clock jumps to the end of their time when all want to begin and the two have; nothing ends before all are cut.
    """
    Patient.last = threading.Event()
    Patient.last.set()
    begun, cut = noted(monkeypatch, "submit"), noted(monkeypatch, "abort")

    def rule(server: FakeServer, payload: dict[str, Any]) -> str:
        server.lock.release()
        until(lambda: len(cut) == len(TALKS))
        server.lock.acquire()
        return "wait"

    def now() -> float:
        return time.monotonic() + 3600 * (len(begun) == len(TALKS) and len(made[0].payloads) == 2)

    monkeypatch.setattr("megarl.rollout.groups.time", SimpleNamespace(monotonic=now))
    with servers(rule) as made:
        played = play(alone(made, max_concurrency=2), 3000.0, [2])
    assert [(t.ended_by, t.finish_reason) for t in played] == [("seconds", "abort")] * 4
    assert sorted(t.sampled for t in played) == [[False]] * 2 + [[True] * 4] * 2
    for trajectory in played:
        kept = [token(trajectory.prompt_ids, 0, place) for place in range(4)]
        assert trajectory.token_ids == (kept if trajectory.sampled[0] else [2])


def test_an_environment_that_takes_its_time_holds_up_no_other_episode():
    Patient.last = threading.Event()
    with servers(ok) as made:
        played = play(alone(made), None, range(1000))  # whatever is drawn ends a turn
    assert [(t.ended_by, t.turns, t.turn_rewards) for t in played] == [("done", 2, [1.0, 1.0])] * 4
    assert all(t.sampled == [True] * 8 + [False] * 2 + [True] * 8 for t in played)


def test_an_aborted_turn_keeps_what_the_server_had_and_one_that_waited_has_nothing():
    with servers(lambda s, p: "ok" if p["sampling_params"]["sampling_seed"] == 0 else "wait") as made:
        engine = alone(made, max_concurrency=2)
        generation = engine.open(SAMPLING, [], 3, 100)
        for i in range(3):
            generation.submit(i, [20 + i], i, 8)
        assert list(collect(generation, 1)) == [0]
        started(made[0], 3)
        generation.submit(3, [30], 3, 8)
        assert generation.wait(lambda: True) == {}
        generation.submit(4, [31], 4, 8)  # not even sent
        for sequence in (3, 4, 1, 2):  # first those that wait for the others' places
            generation.abort(sequence)
        cut = collect(generation, 4)
        generation.close()
        for sequence in (1, 2):
            kept = [token([20 + sequence], sequence, place) for place in range(4)]
            assert (cut[sequence].token_ids, cut[sequence].logprobs) == (kept, [-1.0] * 4)
        for sequence in (3, 4):
            assert (cut[sequence].token_ids, cut[sequence].logprobs) == ([], [])
        assert {done.finish_reason for done in cut.values()} == {"abort"}
        assert set(made[0].aborts) == {p["rid"] for p in made[0].payloads if p["sampling_params"]["sampling_seed"]}


def test_an_answer_that_comes_before_the_abort_is_whole():
    with servers(ok) as made:
        generation = alone(made).open(SAMPLING, [], 1, 100)
        generation.submit(0, [20], 0, 8)
        assert generation.any_busy(True)
        started(made[0], 1)
        done = generation.wait()
        generation.close()
        assert (done[0].finish_reason, len(done[0].token_ids)) == ("length", 8)


def test_turns_of_a_server_that_dies_finish_on_another_and_it_is_asked_no_more():
    def dies(server: FakeServer, payload: dict[str, Any]) -> str:
        return "die" if len(server.payloads) > 2 else "ok"

    with servers(dies, ok) as made:
        engine = alone(made)
        assert all(len(turns) == TURNS for turns in converse(engine, TALKS))
        assert list(engine.servers()) == [1]


def test_when_no_server_is_left_they_are_waited_for_and_no_turn_is_lost():
    def stumbles(server: FakeServer, payload: dict[str, Any]) -> str:
        return "503" if len(server.payloads) in (3, 7) else "ok"

    with servers(stumbles) as made:
        assert all(len(turns) == TURNS for turns in converse(alone(made), TALKS))


def run_rank(urls: list[str], rank_replica: list[int], world: WorkerGroup | None = None) -> Any:
    """One rank of a replica; its turns, or what it ended with."""
    world = world or team_world(120)
    groups = {
        i: world.subgroup([r for r, at in enumerate(rank_replica) if at == i], "the replica")
        for i in sorted(set(rank_replica))
    }
    index = rank_replica[world.rank]
    engine = make_engine(urls, Replica(index, len(groups), groups[index], world), world.rank == 0, max_restarts=1)
    try:
        return converse(engine, [[talk[0] + 50 * index] * len(talk) for talk in TALKS])
    except ServerError as error:
        return str(error)


def test_ranks_of_a_replica_learn_the_same_and_only_the_first_asks():
    with servers(ok) as made:
        first, second = run_distributed(run_rank, 2, 120, [made[0].api.url], [0, 0])
        assert first == second
        assert len(made[0].payloads) == TURNS * len(TALKS)


def test_a_replica_waits_for_no_other():
    """The first turn of each episode of replica 0 is answered only after the last turn of replica 1 has come."""
    over = threading.Event()

    def slow(server: FakeServer, payload: dict[str, Any]) -> str:
        server.lock.release()
        assert over.wait(WAIT_S)
        server.lock.acquire()
        return "ok"

    def quick(server: FakeServer, payload: dict[str, Any]) -> str:
        if len(server.payloads) == TURNS * len(TALKS):
            over.set()
        return "ok"

    with servers(slow, quick) as made:
        found = run_distributed(run_counting, 2, 120, [server.api.url for server in made], [0, 1])
        assert [[len(turns) for turns in said] for said, _ in found] == [[TURNS] * len(TALKS)] * 2
        assert [meetings for _, meetings in found] == [1, 1]  # at the end


def run_counting(urls: list[str], rank_replica: list[int]) -> Any:
    """The turns of one rank, and how often all ranks met while it generated them."""
    world, meetings = team_world(120), 0
    meet = world.all_gather_json

    def counted(value: Any) -> list[Any]:
        nonlocal meetings
        meetings += isinstance(value, dict) and "busy" in value
        return meet(value)

    world.all_gather_json = counted  # type: ignore[method-assign]
    return run_rank(urls, rank_replica, world), meetings


def rank_failures(rule: Callable[[FakeServer, dict[str, Any]], str]) -> list[Any]:
    with servers(rule) as made:
        return run_distributed(run_rank, 2, 120, [made[0].api.url], [0, 1])


def test_when_one_rank_is_stuck_all_catch_up():
    found = rank_failures(lambda server, payload: "503" if len(server.payloads) == 5 else "ok")
    assert [[len(turns) for turns in said] for said in found] == [[TURNS] * len(TALKS)] * 2


def test_a_refused_request_of_one_rank_is_an_error_of_all():
    for message in rank_failures(lambda server, payload: "400" if payload["input_ids"][0] > 100 else "ok"):
        assert "HTTP 400" in message


def test_an_answer_of_other_weights_is_an_error_that_names_the_server():
    for message in rank_failures(lambda server, payload: "foreign" if payload["input_ids"][0] > 100 else "ok"):
        assert "'999@another' of another run" in message
