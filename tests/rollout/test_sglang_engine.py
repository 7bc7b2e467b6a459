"""The engine on several ranks: who asks, who learns what, and that nobody waits for ever."""

from __future__ import annotations

import itertools
import time
from pathlib import Path
from typing import Any

import pytest

from megarl.config.rollout import SamplingConfig
from megarl.config.sglang import SGLangConfig
from megarl.rollout.engine import Request
from megarl.rollout.sglang.engine import Replica, SglangEngine
from megarl.rollout.sglang.fleet import Fleet
from megarl.rollout.sglang.launch import WorkerPlace, open_fleet
from megarl.system.comm import WorkerGroup, team_world
from megarl.system.errors import ServerError
from tests.dist import run_distributed
from tests.rollout.answers import PROMPTS, RUN, token
from tests.rollout.fake_servers import WAIT_S, FakeServer, ok, servers

pytestmark = pytest.mark.procs

ALONE = WorkerGroup.alone()
SAMPLING = SamplingConfig(max_new_tokens=8)


def requests(replica: int) -> list[Request]:
    return [Request(prompt, [1000 * replica + 10 * i + k for k in range(3)]) for i, prompt in enumerate(PROMPTS)]


def expected(replica: int) -> list[list[list[int]]]:
    return [[[token(r.prompt_ids, seed, i) for i in range(8)] for seed in r.seeds] for r in requests(replica)]


def acknowledge(fleet: Fleet, version: int) -> None:
    for server in fleet.servers:
        if server.state in ("catching_up", "current"):
            fleet.acknowledge(server, version)


def run_rank(
    urls: list[str], rank_replica: list[int], restarts: int, world: WorkerGroup | None = None
) -> dict[str, Any]:
    """One rank: two replicas at most; rank r belongs to replica rank_replica[r]."""
    import os

    world = world or team_world(120)
    rank = world.rank
    os.environ["FAKE_KEY"] = "key"
    config = SGLangConfig(urls=urls, api_key_env="FAKE_KEY", max_restarts=restarts)
    fleet = open_fleet(config, WorkerPlace(is_first=rank == 0), Path(), Path(), "float32", cuda=False, world=world)
    acknowledge(fleet, 1)
    index = rank_replica[rank]
    members = {i: [r for r, at in enumerate(rank_replica) if at == i] for i in sorted(set(rank_replica))}
    groups = {i: world.subgroup(ranks, "the replica") for i, ranks in members.items()}
    calls: list[int] = []

    def catch_up() -> None:
        calls.append(1)
        acknowledge(fleet, 1)

    replica = Replica(index, len(groups), groups[index], world)
    engine = SglangEngine(config, fleet, replica, catch_up, RUN)
    engine.weight_version = 1
    done = engine.generate(requests(index), SAMPLING, [])
    return {"tokens": [[sample.token_ids for sample in group] for group in done], "catch_ups": len(calls)}


def test_ranks_of_a_replica_get_the_same_and_only_the_first_asks() -> None:
    with servers(ok, ok) as made:
        results = run_distributed(run_rank, 2, 120, [s.api.url for s in made], [0, 0], 3)
        assert [result["tokens"] for result in results] == [expected(0)] * 2
        assert sum(len(server.payloads) for server in made) == 18


def test_replicas_share_out_the_servers() -> None:
    with servers(ok, ok) as made:
        results = run_distributed(run_rank, 2, 120, [s.api.url for s in made], [0, 1], 3)
        assert [result["tokens"] for result in results] == [expected(0), expected(1)]
        seeds = [{p["sampling_params"]["sampling_seed"] // 1000 for p in server.payloads} for server in made]
        assert seeds == [{0}, {1}]


def test_when_one_rank_is_stuck_all_catch_up_and_no_sample_is_lost() -> None:
    def stumbles(server: FakeServer, payload: dict[str, Any]) -> str:
        return "503" if len(server.payloads) == 5 else "ok"

    with servers(stumbles) as made:
        results = run_distributed(run_rank, 2, 120, [made[0].api.url], [0, 1], 3)
        assert [result["tokens"] for result in results] == [expected(0), expected(1)]
        assert [result["catch_ups"] for result in results] == [1, 1]


def test_generation_may_take_longer_than_any_wait_for_another_rank(tmp_path: Path) -> None:
    """No sample is drawn before the ranks of the replica have looked at each other three times while they wait."""

    def dawdles(server: FakeServer, payload: dict[str, Any]) -> str:
        count, end = len(list(tmp_path.iterdir())), time.monotonic() + WAIT_S
        while len(server.payloads) == 1 and len(list(tmp_path.iterdir())) < count + 3:
            assert time.monotonic() < end, "the ranks do not look at each other"
            time.sleep(0.01)
        return "ok"

    with servers(dawdles) as made:
        results = run_distributed(run_noting, 2, 120, [made[0].api.url], str(tmp_path))
        assert [result["tokens"] for result in results] == [expected(0)] * 2


def run_noting(urls: list[str], folder: str) -> dict[str, Any]:
    """Two ranks of one replica; the second one leaves a file for each time that they look at each other."""
    from megarl.rollout.sglang import turns

    turns._CHECK_EVERY_S = 0.05
    world, looks, reduce = team_world(120), itertools.count(), WorkerGroup.all_reduce

    def noted(group: WorkerGroup, *args: Any) -> Any:
        if world.rank == 1:
            Path(folder, f"{next(looks)}").touch()
        return reduce(group, *args)

    WorkerGroup.all_reduce = noted  # type: ignore[method-assign,assignment]
    return run_rank(urls, [0, 0], 3, world=world)


def test_an_error_of_one_rank_is_an_error_of_all() -> None:
    with servers(lambda _, p: "400" if p["sampling_params"].get("sampling_seed", 0) >= 1000 else "ok") as made:
        assert run_distributed(run_refused, 2, 120, [made[0].api.url]) == [400, 400]


def run_refused(urls: list[str]) -> int | None:
    """One replica per rank; the status that the server refused a request with."""
    try:
        run_rank(urls, [0, 1], 3)
    except ServerError as error:
        return error.status
    return None


def test_answers_that_are_none_are_an_error_of_all_ranks_that_names_the_server() -> None:
    """Replica 1's samples have no token, or come from another run, whichever server is asked and however often."""
    for verdict, words in (("empty", "no token"), ("foreign", "'999@another' of another run")):

        def rule(server: FakeServer, payload: dict[str, Any], verdict: str = verdict) -> str:
            return verdict if payload["sampling_params"]["sampling_seed"] >= 1000 else "ok"

        with servers(rule) as made:
            url = made[0].api.url
            for message in run_distributed(run_until_error, 2, 120, [url]):
                assert words in message
                assert url in message


def run_until_error(urls: list[str]) -> str:
    """One replica per rank; what the run ends with."""
    try:
        run_rank(urls, [0, 1], 0)
    except ServerError as error:
        return str(error)
    return "no error"


def test_a_defect_of_one_rank_is_an_error_of_all() -> None:
    with servers(ok) as made:
        first, second = run_distributed(run_defect, 2, 120, [made[0].api.url])
        assert first == "ServerError: the client: generation: KeyError: 'defect'"
        assert second == "KeyError: 'defect'"


def run_defect(urls: list[str]) -> str:
    """One replica per rank; the second one's client has a defect."""
    import torch.distributed as dist

    from megarl.rollout.sglang.client import Dispatch

    async def broken(*_: object) -> None:
        raise KeyError("defect")

    if dist.get_rank() == 1:
        Dispatch.finish = broken  # type: ignore[method-assign,assignment]
    try:
        run_rank(urls, [0, 1], 0)
    except (ServerError, KeyError) as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


def test_a_server_is_asked_only_for_the_version_it_has_acknowledged() -> None:
    with servers(ok, ok) as made:
        urls = [server.api.url for server in made]
        fleet = open_fleet(
            SGLangConfig(urls=urls), WorkerPlace(), None, None, "float32", cuda=False, world=WorkerGroup.alone()
        )  # type: ignore[arg-type]
        engine = SglangEngine(SGLangConfig(urls=urls), fleet, Replica(), lambda: None, RUN)
        assert engine.servers() == {}  # they answer, and nobody knows what they hold
        fleet.acknowledge(fleet.servers[0], 0)
        assert list(engine.servers()) == [0]
        engine.weight_version = 1
        assert engine.servers() == {}
        fleet.acknowledge(fleet.servers[1], 1)
        fleet.mark_failed(fleet.servers[0], "test")
        assert list(engine.servers()) == [1]
        fleet.refresh()
        assert fleet.servers[0].state == "catching_up"  # it answers again, and its weights are unknown
        assert fleet.servers[0].version is None
