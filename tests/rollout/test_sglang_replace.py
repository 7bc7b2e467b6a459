"""Servers that hang are replaced while samples are generated. The servers: process_server.py."""

from __future__ import annotations

import contextlib
import io
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import psutil
import pytest

from megarl.config.rollout import SamplingConfig
from megarl.config.sglang import SGLangConfig
from megarl.rollout.engine import Request
from megarl.rollout.sglang import turns as turns_module
from megarl.rollout.sglang.api import ServerApi
from megarl.rollout.sglang.client import Dispatch
from megarl.rollout.sglang.engine import Replica, SglangEngine
from megarl.rollout.sglang.fleet import Fleet, Server
from megarl.rollout.sglang.launch import WorkerPlace, open_fleet
from megarl.rollout.sglang.probe import probe_servers
from megarl.rollout.sglang.turns import TurnClient
from megarl.sync.protocol import version_tag
from megarl.system.comm import WorkerGroup, team_world
from megarl.system.compat import sglang
from megarl.system.errors import ServerError
from tests.dist import run_distributed
from tests.rollout.answers import PROMPTS, RUN, token
from tests.rollout.test_sglang_engine import acknowledge

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="processes are stopped")
ALONE = WorkerGroup.alone()
SAMPLING = SamplingConfig(max_new_tokens=8)
PYTHON = """#!/bin/sh
[ "$1" = -I ] && echo {version} && exit
shift
cd {root} && exec {python} -S -m tests.rollout.process_server {folder} "$@"
"""


@contextlib.contextmanager
def fleet_of(folder: Path, world: WorkerGroup, **config: Any) -> Iterator[tuple[Fleet, SGLangConfig]]:
    """Servers that answer and are at version 1. Collective over `world`, whose first rank owns them."""
    python = folder / "python"
    if world.rank == 0:
        root = Path(__file__).parents[2]
        text = PYTHON.format(version=sglang.TESTED, root=root, python=sys.executable, folder=folder)
        python.write_text(text)
        python.chmod(0o755)
    world.barrier()
    settings = {"python": str(python), "colocated": True, "health_timeout_s": 2.0, "max_concurrency": 1}
    made = SGLangConfig(**{**settings, **config})
    place = WorkerPlace(is_first=world.rank == 0)
    with open_fleet(made, place, folder, folder, "float32", cuda=False, world=world) as fleet:
        acknowledge(fleet, 1)
        yield fleet, made


def scheduler(folder: Path, server: Server) -> int:
    return int((folder / f"scheduler_{urlsplit(server.api.url).port}").read_text())


def asked(folder: Path, server: Server) -> list[int]:
    """Seeds of the samples that this server was asked for."""
    file = folder / f"asked_{urlsplit(server.api.url).port}"
    return [int(line) for line in file.read_text().split()] if file.exists() else []


def has_ended(pid: int) -> bool:
    """Whether a process that was killed is gone; nobody may have waited for it, and it may take a while."""
    end = time.monotonic() + 60
    while time.monotonic() < end:
        try:
            if psutil.Process(pid).status() == psutil.STATUS_ZOMBIE:
                return True
        except psutil.NoSuchProcess:
            return True
        time.sleep(0.02)
    return False


def watch_only(url: str) -> Callable[..., Any]:
    """A client's watch of the server there; the others may take their time to say that they live."""
    watch = Dispatch._watch

    async def look(self: Dispatch, number: int, server: ServerApi) -> None:
        if server.url == url:
            await watch(self, number, server)

    return look


def requests(rank: int) -> list[Request]:
    """Two prompts of an even seed, and of an odd one each: the latter are drawn only when the folder is open."""
    return [Request(PROMPTS[i], [2 * (10 * rank + i) + i % 2]) for i in range(4)]


def expected(rank: int) -> list[list[list[int]]]:
    return [[[token(r.prompt_ids, seed, i) for i in range(8)] for seed in r.seeds] for r in requests(rank)]


def refuse(times: int) -> None:
    """In the place of `recover`: no rank is stuck."""
    raise AssertionError("a rank was stuck")


def one_hangs(text: str) -> dict[str, Any]:
    """Rank r draws on server r. The scheduler of server 1 is stopped when its first sample is done; the last samples of
    both ranks are drawn only when rank 1 knows of another server in its place."""
    folder, world = Path(text), team_world(120)
    turns_module._CHECK_EVERY_S = 0.2
    said = io.StringIO()
    with fleet_of(folder, world, servers=2) as (fleet, config), contextlib.redirect_stdout(said):
        hung, was, calls = scheduler(folder, fleet.servers[1]), fleet.servers[1], list[int]()
        before = was.api.url
        Dispatch._watch = watch_only(before)  # type: ignore[method-assign]

        def catch_up() -> None:
            calls.append(1)
            acknowledge(fleet, 1)

        def advance(samples: int) -> None:
            if world.rank == 1 and not (folder / "stopped").exists():
                os.kill(hung, signal.SIGSTOP)
                (folder / "stopped").touch()

        replica = Replica(world.rank, 2, world.subgroup([world.rank], "a replica"), world)
        engine = SglangEngine(config, fleet, replica, catch_up, RUN)
        engine.weight_version = 1
        engine.recover = refuse  # type: ignore[method-assign]
        add = TurnClient.add

        def add_and_open(self: TurnClient, servers: dict[int, ServerApi]) -> None:
            add(self, servers)
            if 1 in servers and servers[1].url != before:
                (folder / "open").touch()

        TurnClient.add = add_and_open  # type: ignore[method-assign,assignment]
        drawn = engine.generate(requests(world.rank), SAMPLING, [], advance)
        return {
            "tokens": [[sample.token_ids for sample in group] for group in drawn],
            "states": [[server.state, server.restarts] for server in fleet.servers],
            "catch_ups": len(calls),
            "other": was.api.url != before,
            "asked": len(asked(folder, fleet.servers[1])),
            "gone": has_ended(hung),
            "said": said.getvalue(),
        }


@pytest.mark.procs
def test_a_server_whose_scheduler_hangs_is_replaced_while_the_others_draw(tmp_path: Path) -> None:
    results = run_distributed(one_hangs, 2, 120, str(tmp_path))
    for rank, result in enumerate(results):
        assert result["tokens"] == expected(rank)
        assert result["states"] == [["current", 0], ["current", 1]]
        assert (result["catch_ups"], result["other"], result["gone"]) == (1, True, True)
        assert result["asked"] > 0  # the new one has drawn some of the samples
    assert results[0]["said"].count("server 1 has failed and was killed; restart 1 of 3 follows") == 1
    assert "no sign of life from its scheduler (/health_generate) for 2 s" in results[0]["said"]


@contextlib.contextmanager
def alone(
    folder: Path, catch_up: Callable[[Fleet], None] | None, **config: Any
) -> Iterator[tuple[Fleet, SglangEngine]]:
    with fleet_of(folder, ALONE, **config) as (fleet, settings):
        update = None if catch_up is None else lambda: catch_up(fleet)
        engine = SglangEngine(settings, fleet, Replica(), update, RUN)
        engine.weight_version = 1
        yield fleet, engine


def test_turns_go_on_on_the_server_that_came_in_the_place_of_one_that_hung(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr("megarl.rollout.sglang.turns._CHECK_EVERY_S", 0.2)
    (tmp_path / "open").touch()
    with alone(tmp_path, lambda fleet: acknowledge(fleet, 1), servers=2) as (fleet, engine):
        monkeypatch.setattr(Dispatch, "_watch", watch_only(fleet.servers[0].api.url))
        monkeypatch.setattr(engine, "recover", refuse)
        os.kill(scheduler(tmp_path, fleet.servers[0]), signal.SIGSTOP)
        generation, turns = engine.open(SAMPLING, [], 2, 10**6), [0, 0]
        before = {i: [70 + i] for i in range(2)}
        for i, tokens in before.items():
            generation.submit(i, tokens, i, 8)
        while generation.any_busy(not asked(tmp_path, fleet.servers[0]) or fleet.servers[0].restarts == 0):
            time.sleep(0.1)  # the other server would answer thousands of turns meanwhile
            for i, done in generation.wait().items():
                assert done.token_ids == [token(before[i], turns[i], place) for place in range(8)] or turns[i] == 0
                turns[i] += 1
                generation.forget(i)
                before[i] = [70 + i, turns[i]]
                generation.submit(i, before[i], turns[i], 8)
        generation.close()
        assert [server.restarts for server in fleet.servers] == [1, 0]


def test_a_server_that_hangs_more_often_than_it_may_is_an_error_that_names_it(tmp_path: Path, capsys: Any) -> None:
    (tmp_path / "open").touch()

    def stop_again(fleet: Fleet) -> None:
        os.kill(scheduler(tmp_path, fleet.servers[0]), signal.SIGSTOP)
        acknowledge(fleet, 1)

    with alone(tmp_path, stop_again, servers=1, max_restarts=1, health_timeout_s=1.0) as (fleet, engine):
        stop_again(fleet)
        with pytest.raises(ServerError, match=r"server 0 .*no server is left.*started again 1 time: no sign of life"):
            engine.generate(requests(0), SAMPLING, [])
        assert "it is given up (rollout.sglang.max_restarts=1)" in capsys.readouterr().out
        assert has_ended(scheduler(tmp_path, fleet.servers[0]))


def test_memory_is_not_left_to_a_server_that_hangs(tmp_path: Path, capsys: Any) -> None:
    from megarl.rollout.sglang.memory import ServerMemory
    from megarl.system.offload_schedule import WEIGHTS

    with alone(tmp_path, None, servers=1, max_restarts=0) as (fleet, _):
        stopped = fleet._owned[0].pid
        os.kill(stopped, signal.SIGSTOP)
        ServerMemory(fleet, 0.5, ALONE).hold(WEIGHTS)
        assert "memory (/abort_request): no answer within 0.5 s" in fleet.servers[0].why
        assert has_ended(stopped)


def test_a_server_that_answers_no_probe_is_killed(tmp_path: Path, capsys: Any) -> None:
    with alone(tmp_path, None, servers=1, max_restarts=0) as (fleet, _):
        stopped = fleet._owned[0].pid
        os.kill(stopped, signal.SIGSTOP)
        assert probe_servers(fleet, [0], 20, 0.5, version_tag(1, RUN), ALONE) == []
        assert fleet.servers[0].why == "probe (/generate): no answer within 0.5 s"
        assert has_ended(stopped)
