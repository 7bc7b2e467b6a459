"""A server on several machines: one process on each, which start, fail and start again together."""

from __future__ import annotations

import dataclasses
import os
import signal
import sys
import time
from pathlib import Path

import pytest

from megarl.config.sglang import SGLangConfig
from megarl.rollout.sglang.fleet import Fleet
from megarl.rollout.sglang.launch import WorkerPlace, open_fleet
from megarl.system.compat.sglang import TESTED
from megarl.system.errors import ServerError
from tests.dist import fresh_parallel, run_distributed, world
from tests.models.tiny import build_tiny, save_tiny
from tests.rollout.servers import need_interpreter
from tests.sync.receivers import weight_sync

pytestmark = pytest.mark.procs
PROMPT = [5, 17, 99, 4, 42]
# A node process that notes its command line and answers /health; with a file `broken` there, node 1 ends instead.
NODE = """#!/bin/sh
[ "$1" = -I ] && echo {version} && exit
case "$*" in *"--node-rank 1"*) [ -e "{folder}/broken" ] && exit 3 ;; esac
echo "$*" >> "{folder}/commands"
echo "$SGLANG_ZMQ_ALLOWED_PEERS $SGLANG_ZMQ_SOURCE_IP" >> "{folder}/peers"
while [ "$1" != --port ]; do shift; done
exec "{python}" -m http.server --bind 127.0.0.1 --directory "{folder}" "$2"
"""


def open_one(folder: str) -> Fleet:
    """A server of two node processes; this rank stands for a machine."""
    config = SGLangConfig(python=f"{folder}/python", tp_size=2, attention_dp=2, nnodes=2, start_timeout_s=120)
    place = WorkerPlace(world().rank, 2, True, 1)
    path = Path(folder)
    return open_fleet(config, place, path, path, "float32", cuda=False, host="127.0.0.1", world=world())


def wait_noted(folder: str, node: int, times: int) -> None:
    """Wait until so many processes of a node have noted their command lines."""
    file, end = Path(folder, "commands"), time.monotonic() + 120
    while not file.exists() or file.read_text().count(f"--node-rank {node}") < times:
        assert time.monotonic() < end, f"node {node} has not started {times} times"
        time.sleep(0.01)


def lose_node_1(folder: str) -> dict:
    """Kill the process of node 1, and look at the server on the other rank, too."""
    with open_one(folder) as fleet:
        process, server = fleet._owned[0], fleet.servers[0]
        found = {"url": server.api.url, "state": server.state, "log": process.spec.log.name}
        before = process.pid
        wait_noted(folder, process.spec.node, 1)
        world().barrier()
        if process.spec.node == 1:
            os.killpg(process.pid, signal.SIGKILL)
            while process.pid is not None:
                time.sleep(0.01)
        found["ended"] = [lost.why for lost in fleet.ended()]
        world().barrier()
        fleet.refresh()
        fleet.wait_started()
        found |= {"again": server.state, "restarts": server.restarts, "why": server.why}
        found["another"] = process.pid not in (None, before)
        wait_noted(folder, process.spec.node, 2)
        return found


def fail_to_start(folder: str) -> tuple[str, bool]:
    """Return what the rank says of a server whose node 1 ends by itself."""
    try:
        open_one(folder)
    except ServerError as error:
        return str(error)
    return "it came up"


def write_python(folder: Path) -> Path:
    python = folder / "python"
    python.write_text(NODE.format(version=TESTED, folder=folder, python=sys.executable))
    python.chmod(0o755)
    (folder / "health").write_text("{}")
    return folder


def value(command: str, name: str) -> str:
    words = command.split()
    return words[words.index(name) + 1]


def test_a_node_process_that_ends_takes_its_server_down_and_all_start_again(tmp_path: Path) -> None:
    first, second = run_distributed(lose_node_1, 2, 240, str(write_python(tmp_path)))
    assert first["url"] == second["url"]  # that of node 0, on both machines
    assert [one["log"] for one in (first, second)] == ["server_0.log", "server_0_node1.log"]
    assert first["ended"] == []
    assert "the process of node 1 of 2, on 127.0.0.1, ended; see" in second["ended"][0]
    for one in (first, second):
        assert (one["state"], one["again"], one["restarts"], one["another"]) == ("catching_up", "catching_up", 1, True)
    commands = (tmp_path / "commands").read_text().splitlines()
    starts = [sorted(commands[:2], key=lambda c: value(c, "--node-rank")), commands[2:]]
    meetings = [{value(command, "--dist-init-addr") for command in start} for start in starts]
    assert [len(start) for start in starts] == [2, 2]
    assert [len(meeting) for meeting in meetings] == [1, 1]
    assert meetings[0] != meetings[1]
    assert [value(command, "--node-rank") for command in starts[0]] == ["0", "1"]
    assert [value(command, "--attn-dp-size") for command in commands] == ["2"] * 4
    assert (tmp_path / "peers").read_text().splitlines() == ["127.0.0.1 127.0.0.1"] * 4


def test_a_node_process_that_ends_by_itself_is_named_on_every_rank(tmp_path: Path) -> None:
    (tmp_path / "broken").touch()
    for said in run_distributed(fail_to_start, 2, 240, str(write_python(tmp_path))):
        assert "no server is left" in said
        assert "the process of node 1 of 2, on 127.0.0.1, ended (exit code 3)" in said


def serve(folder: str, groups: int) -> list[dict]:
    """Fill a real server by each transport that reaches it, take node 1 away, and fill it again; reports and tokens.

    `groups`: attention groups of the server's ranks.
    """
    from megarl.config.sync import SyncConfig
    from megarl.rollout.sglang.probe import greedy_probe

    fresh_parallel(tp=2)
    model, run = f"{folder}/model", Path(folder)
    chunks, world_ = build_tiny(model, tp=2), world()
    sizes = {"tp_size": 2, "attention_dp": groups, "nnodes": 2, "max_total_tokens": 4096, "context_length": 128}
    config = SGLangConfig(**sizes, start_timeout_s=500)
    place, found = WorkerPlace(world_.rank, 2, True, 1), []

    def note(report) -> None:
        tokens = greedy_probe(fleet.servers[0].api, PROMPT, 8, 120.0).token_ids if world_.rank == 0 else []
        found.append(dataclasses.asdict(report) | {"tokens": tokens, "state": fleet.servers[0].state})
        world_.barrier()

    with open_fleet(
        config, place, run, Path(model), "float32", cuda=False, random_weights=True, host="127.0.0.1", world=world_
    ) as fleet:
        for version, transport in enumerate(("disk", "distributed", "shards", "auto"), 1):
            if transport == "auto":  # as on the trainer's GPUs: its ranks receive for those of the server
                fleet.config = config.model_copy(update={"colocated": True})
            settings = SyncConfig(transport=transport, verify="every", timeout_s=200.0, bucket_mb=5)
            sync = weight_sync(chunks, fleet, settings, folder, 2, groups)
            note(sync.push(version))
        if world_.rank == 1:
            os.killpg(fleet._owned[0].pid, signal.SIGKILL)
            while fleet._owned[0].pid is not None:
                time.sleep(0.01)
        world_.barrier()
        fleet.refresh()
        fleet.wait_started()
        note(sync.catch_up())
        sync.close()
    return found


@pytest.mark.servers
@pytest.mark.campaign("servers")
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("groups", [1, 2])
def test_a_real_server_on_two_machines_holds_all_weights_on_every_rank(tmp_path: Path, groups: int) -> None:
    import torch
    from transformers import AutoModelForCausalLM

    need_interpreter()
    # Widths of 32 x tp: a CPU server pads others, and their checksums differ.
    save_tiny(tmp_path / "model", "qwen3", tie_word_embeddings=False, intermediate_size=128)
    first, second = run_distributed(serve, 2, 1100, str(tmp_path), groups)
    wanted = AutoModelForCausalLM.from_pretrained(tmp_path / "model", dtype=torch.float32).generate(
        torch.tensor([PROMPT]), max_new_tokens=8, do_sample=False, eos_token_id=None, pad_token_id=0
    )[0, len(PROMPT) :]
    for mine, theirs in zip(first, second, strict=True):
        assert mine["tokens"] == wanted.tolist()
        for one in (mine, theirs):
            assert (one["updated"], one["failed"], one["state"]) == ([0], {}, "current")
            assert one["verified"] > 0
    assert [one["transport"] for one in first] == ["disk", "distributed", "shards", "shards", "shards"]
