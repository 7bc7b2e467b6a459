"""How long the fleet waits for servers that do not answer, and which servers it does not take."""

from __future__ import annotations

import json
import re
import sys
import tempfile
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from megarl.config.sglang import SGLangConfig
from megarl.rollout.sglang.api import ServerApi
from megarl.rollout.sglang.fleet import Fleet, Server
from megarl.rollout.sglang.launch import WorkerPlace, open_fleet
from megarl.rollout.sglang.server import ServerProcess, ServerSpec
from megarl.system.comm import WorkerGroup
from megarl.system.compat import sglang
from megarl.system.errors import ConfigError, ServerError
from tests.dist import run_distributed, world
from tests.rollout.fake_servers import ok, servers

ALONE = WorkerGroup.alone()
# A server that leaves shared memory; its name is all that the process knows of it.
LEAVES = """#!/bin/sh
[ "$1" = -I ] && echo {version} && exit
touch "$TMPDIR/socket" "{folder}/sgl_shm_${{MEGARL_SERVER_INSTANCE}}_mq_1_a"
touch "{folder}/sglang_loads_${{MEGARL_SERVER_INSTANCE}}_0.shm"
exec sleep 600
"""
# A server that ends so often with {end}, and then answers /health.
ENDS = """#!/bin/sh
[ "$1" = -I ] && echo {version} && exit
echo >> "{folder}/starts"
[ "$(wc -l < "{folder}/starts")" -le {times} ] && {end}
while [ "$1" != --port ]; do shift; done
exec "{python}" -m http.server --bind 127.0.0.1 --directory "{folder}" "$2"
"""


@dataclass(frozen=True)
class Told(ServerApi):
    """`/health` fails after `hold` until it has been asked `late` times; keeps the deadlines it was asked with."""

    late: int = 10**9
    hold: Any = None
    deadlines: list[float] = field(default_factory=list)

    def call(self, path: str, payload: Any = None, *, deadline_s: float, phase: str, method: str = "POST") -> Any:
        self.deadlines.append(deadline_s)
        if self.hold is not None:
            self.hold()
        if len(self.deadlines) <= self.late:
            raise ServerError(self.name, self.url, phase, "not yet")
        return {}


def fleet_of(apis: list[Told], timeout_s: float) -> Fleet:
    servers = [Server(number, api) for number, api in enumerate(apis)]
    return Fleet(servers, SGLangConfig(start_timeout_s=timeout_s), watched=range(len(apis)))


def test_a_server_that_hangs_is_asked_no_longer_than_the_time_that_is_left() -> None:
    apis = [Told("http://127.0.0.1:1", None, f"server {i}") for i in range(2)]
    with pytest.raises(ServerError, match=r"not ready within 2 s \(rollout\.sglang\.start_timeout_s\): not yet"):
        fleet_of(apis, 2.0).wait_started()
    assert all(deadline <= 2.0 for api in apis for deadline in api.deadlines)


def test_servers_that_hang_are_asked_side_by_side() -> None:
    meet = threading.Barrier(3)  # passed only by three at the same time

    def hold() -> None:
        meet.wait(120)

    apis = [Told("http://127.0.0.1:1", None, f"server {i}", late=0, hold=hold) for i in range(3)]
    fleet = fleet_of(apis, 60.0)
    fleet.wait_started()
    assert [server.state for server in fleet.servers] == ["catching_up"] * 3


def test_servers_that_run_already_may_take_as_long_to_answer_as_own_ones() -> None:
    fleet = fleet_of([Told("http://127.0.0.1:1", None, "server 0", late=2)], 60.0)
    fleet.wait_started()
    assert [server.state for server in fleet.servers] == ["catching_up"]
    fleet.mark_failed(fleet.servers[0], "test")
    fleet.refresh()
    assert fleet.servers[0].state == "catching_up"


def fleet_that_ends(folder: Path, end: str, times: int, **config: Any) -> Fleet:
    python = folder / "python"
    python.write_text(ENDS.format(version=sglang.TESTED, folder=folder, times=times, end=end, python=sys.executable))
    python.chmod(0o755)
    (folder / "health").write_text("{}")
    settings = SGLangConfig(python=str(python), start_timeout_s=60, **config)
    spec = ServerSpec(0, settings, folder, "float32", "127.0.0.1", "key", folder / "logs", cuda=False)
    process = ServerProcess(spec)
    process.start()
    return Fleet([Server(0, process.api)], settings, {0: process})


def test_a_server_that_is_killed_while_it_starts_is_started_again(tmp_path: Path, capfd) -> None:
    with fleet_that_ends(tmp_path, "kill -9 $$", 2) as fleet:
        fleet.wait_started()
        assert (fleet.servers[0].state, fleet.servers[0].restarts) == ("catching_up", 2)
    said = capfd.readouterr().out
    assert re.findall(r"restart (\d) of 3 follows .*: the process ended \(signal SIGKILL", said) == ["1", "2"]


@pytest.mark.parametrize(("end", "starts"), [("kill -9 $$", 3), ("exit 3", 1)])
@pytest.mark.parametrize("late", [False, True])
def test_one_that_is_always_killed_or_ends_by_itself_is_given_up(
    tmp_path: Path, end: str, starts: int, late: bool
) -> None:
    """Also when it has ended before anybody looks."""
    with fleet_that_ends(tmp_path, end, 9, max_restarts=2) as fleet:
        while late and fleet._owned[0].pid is not None:
            time.sleep(0.01)
        with pytest.raises(ServerError, match=r"no server is left.*the process ended"):
            fleet.wait_started()
    assert len((tmp_path / "starts").read_text()) == starts
    assert fleet.servers[0].given_up


@pytest.mark.parametrize(
    ("info", "where", "text"),
    [
        (
            {"tp_size": 2},
            "rollout.sglang.tp_size",
            "set rollout.sglang.tp_size=2, or start the server with --tp-size",
        ),
        ({"ep_size": 2}, "rollout.sglang.ep_size", "was started with ep_size 2"),
        ({"dp_size": 2}, "rollout.sglang.urls", "several replicas of the model, whose weights SGLang cannot update"),
        ({"attn_dp_size": 2}, "rollout.sglang.attention_dp", "or start the server with --attn-dp-size 1"),
        ({"dtype": "bfloat16"}, "rollout.dtype", "start the server with --dtype float32"),
        ({"dtype": "half"}, "rollout.dtype", "computes in float16"),
        ({"context_length": 99}, "rollout.sglang.urls", "--context-length 100"),
    ],
)
def test_a_server_that_is_not_what_the_recipe_says_is_refused(info: dict[str, Any], where: str, text: str) -> None:
    with servers(ok, ok) as made:
        made[1].info |= info
        urls = [server.api.url for server in made]
        config, alone = SGLangConfig(urls=urls), WorkerGroup.alone()

        def join() -> None:
            open_fleet(config, WorkerPlace(), None, None, "float32", cuda=False, longest=100, world=alone)  # type: ignore[arg-type]

        with pytest.raises(ConfigError) as caught:
            join()
        assert caught.value.where == where
        assert text in str(caught.value)
        assert f"server 1 at {urls[1]}" in str(caught.value)
        made[1].info |= {
            "tp_size": 1,
            "ep_size": 1,
            "dp_size": 1,
            "attn_dp_size": 1,
            "nnodes": 1,
            "dtype": "float32",
            "context_length": 100,
        }
        join()


def test_a_server_that_keeps_what_it_has_seen_is_refused_for_images() -> None:
    with servers(ok) as made:
        config, alone = SGLangConfig(urls=[made[0].api.url]), WorkerGroup.alone()

        def join(*, images: bool) -> None:
            open_fleet(config, WorkerPlace(), None, None, "float32", cuda=False, images=images, world=alone)  # type: ignore[arg-type]

        join(images=False)
        with pytest.raises(ConfigError, match=r"not started with serve\.py"):
            join(images=True)
        made[0].info |= {"custom_weight_loader": ["megarl_loader.load", "megarl_loader.patch"]}
        join(images=True)


def opened(urls: list[str]) -> str:
    """What this rank learns; only the first asks."""
    try:
        open_fleet(
            SGLangConfig(urls=urls),
            WorkerPlace(is_first=world().rank == 0),
            None,
            None,
            "float32",
            cuda=False,
            world=world(),
        )  # type: ignore[arg-type]
    except ConfigError as error:
        return str(error.where)
    return "taken"


@pytest.mark.procs
def test_every_rank_refuses_it() -> None:
    with servers(ok) as made:
        made[0].info["tp_size"] = 4
        assert run_distributed(opened, 2, 120, [made[0].api.url]) == ["rollout.sglang.tp_size"] * 2


def test_an_address_of_another_machine_is_refused_with_its_key(tmp_path: Path) -> None:
    python = tmp_path / "python"
    python.write_text(f"#!/bin/sh\necho {sglang.TESTED}\n")
    python.chmod(0o755)
    config = SGLangConfig(python=str(python))
    spec = ServerSpec(0, config, tmp_path, "float32", "192.0.2.1", "key", tmp_path / "logs", cuda=False)
    with pytest.raises(ConfigError, match=r"rollout\.sglang\.host"):
        ServerProcess(spec).start()


def test_a_stopped_server_leaves_nothing_and_others_keep_what_is_theirs(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(sglang, "SHARED_MEMORY", tmp_path)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    python = tmp_path / "python"
    python.write_text(LEAVES.format(version=sglang.TESTED, folder=tmp_path))
    python.chmod(0o755)
    config = SGLangConfig(python=str(python))
    spec = ServerSpec(0, config, tmp_path, "float32", "127.0.0.1", "key", tmp_path / "logs", cuda=False)
    stopped, other = ServerProcess(spec), ServerProcess(spec)
    try:
        for server in (stopped, other):
            server.start()
            while len(sglang.shared_memory(server.instance)) < 2:
                server.check()  # raises when it has ended
                time.sleep(0.01)
        stopped.stop(0)
        assert set(tmp_path.glob("sgl*")) == set(sglang.shared_memory(other.instance))
        assert len(sglang.shared_memory(other.instance)) == 2
        assert len(list(tmp_path.glob("megarl-*/socket"))) == 1
    finally:
        stopped.stop(0)
        other.stop()
    assert {path.name for path in tmp_path.iterdir()} == {"python", "logs"}


SAID = {"tp_size": 1, "ep_size": 1, "dp_size": 1, "nnodes": 1, "dtype": "float32", "context_length": None}
NONSENSE = [
    (b"<html>welcome</html>", "no tp_size in its answer"),
    (b"[" * 100_000, "no tp_size in its answer"),
    ([SAID], "no tp_size in its answer"),
    ({}, "no tp_size in its answer"),
    ({name: value for name, value in SAID.items() if name != "dtype"}, "no dtype in its answer"),
    (SAID | {"context_length": "many"}, "context_length is 'many'"),
    (SAID | {"dp_size": [1]}, "dp_size is [1]"),
    ({"success": False, "message": "not now"}, "refused: not now"),
]


def opened_each(urls: list[str]) -> list[list[str]]:
    """For each of these servers what this rank learns; only the first asks."""
    found, place = [], WorkerPlace(is_first=world().rank == 0)
    for url in urls:
        try:
            open_fleet(SGLangConfig(urls=[url]), place, None, None, "float32", cuda=False, world=world())  # type: ignore[arg-type]
        except (ConfigError, ServerError) as error:
            found.append([type(error).__name__, str(error)])
    return found


@pytest.mark.procs
def test_every_rank_learns_that_a_server_answers_nonsense() -> None:
    with servers(*[ok] * len(NONSENSE)) as made:
        for server, (info, _) in zip(made, NONSENSE, strict=True):
            server.info = info
        urls = [server.api.url for server in made]
        for found in run_distributed(opened_each, 2, 120, urls):
            for (kind, text), url, (_, why) in zip(found, urls, NONSENSE, strict=True):
                assert kind == "ConfigError"
                assert text.startswith(
                    f"rollout.sglang.urls: server 0 at {url} does not report its start settings: /server_info"
                )
                assert why in text


def test_a_server_that_comes_back_otherwise_is_not_used() -> None:
    with servers(ok, ok) as made:
        fits, made[1].info = made[1].info, None
        urls = [server.api.url for server in made]
        fleet = open_fleet(
            SGLangConfig(urls=urls), WorkerPlace(), None, None, "float32", cuda=False, world=WorkerGroup.alone()
        )  # type: ignore[arg-type]
        for info, state in ((fits | {"tp_size": 4}, "failed"), (fits, "catching_up")):
            made[1].info = info
            fleet.refresh()
            assert fleet.servers[1].state == state
            assert "was started with tp_size 4" in fleet.servers[1].why


def opened_states(urls: list[str]) -> list[str]:
    """What this rank takes the servers for; only the first asks."""
    place = WorkerPlace(is_first=world().rank == 0)
    try:
        fleet = open_fleet(SGLangConfig(urls=urls), place, None, None, "float32", cuda=False, world=world())  # type: ignore[arg-type]
    except ServerError as error:
        return [str(error)]
    return [server.state for server in fleet.servers]


def test_every_rank_learns_on_which_gpus_a_server_of_another_rank_is(tmp_path: Path) -> None:
    config = SGLangConfig(tp_size=2, colocated=True)
    spec = ServerSpec(
        0, config, tmp_path, "bfloat16", "127.0.0.1", "key", tmp_path, cuda=True, gpus=("5", "2", "0", "7")
    )
    owner, other = (Fleet([Server(0, ServerApi("", None, "server 0"))], config) for _ in range(2))
    owner._owned = {0: SimpleNamespace(spec=spec, api=ServerApi("http://127.0.0.1:1", None, "server 0"), check=str)}  # type: ignore[dict-item]
    owner._check()
    other.adopt(json.loads(json.dumps(owner.reports())))
    assert other.servers[0].gpus == ("5", "2")  # the others it only sees


@pytest.mark.procs
def test_every_rank_learns_that_a_server_is_gone_when_it_is_asked() -> None:
    with servers(ok, ok) as made:
        made[1].info = None
        urls = [server.api.url for server in made]
        assert run_distributed(opened_states, 2, 120, urls) == [["catching_up", "failed"]] * 2
        for (text,) in run_distributed(opened_states, 2, 120, urls[1:]):
            assert text.startswith(f"server 0 at {urls[1]}: start: no server is left")
