"""What becomes of a server that outlives its trainer: trainer processes, keepers, receiver processes."""

import contextlib
import itertools
import json
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from megarl.rollout.sglang.api import ServerApi
from megarl.rollout.sglang.keeper import MIXED, RESTORING
from megarl.sync.receiver import UpdateStep
from megarl.system.errors import ServerError
from tests.dist import fresh_parallel, run_distributed
from tests.models.tiny import build_tiny, save_tiny
from tests.sync.receivers import fleet_of, receivers, server_receiver, weight_sync
from tests.sync.test_updater import SETTINGS, assert_holds, push_twice, state_of


def wait_for_log(folder: Path, text: str) -> str:
    """The keeper's log, when `text` stands in it."""
    end, log = time.monotonic() + 240, folder / "sync" / "keeper.log"
    while text not in log.read_text():
        assert time.monotonic() < end, f"no {text!r} in:\n{log.read_text()}"
        time.sleep(0.05)
    return log.read_text()


def make_sync(folder: str, run_dir: str, urls: list[str], transport: str):
    """This process as the trainer of external servers."""
    from megarl.config.sync import SyncConfig

    fresh_parallel()
    chunks = build_tiny(folder)
    config = SyncConfig(**(SETTINGS | {"transport": transport}))
    fleet = fleet_of(urls, external=True)
    return weight_sync(chunks, fleet, config, run_dir)


def add_one(sync) -> None:
    with torch.no_grad():
        for param in sync.chunks[0].parameters():
            param.add_(1.0)


def push_and_die(folder: str, run_dir: str, urls: list[str], transport: str, version: int, step: str) -> None:
    """The trainer is killed at `step` of `version`: at its transport's second `put`, or before its first `commit`."""
    import os
    import signal

    sync = make_sync(folder, run_dir, urls, transport)
    if version == 2:
        sync.push(1)
        add_one(sync)
    action, calls = getattr(sync.transport, step), iter(range(100))

    def dying(*args) -> None:
        if next(calls) == (1 if step == "put" else 0):
            os.kill(os.getpid(), signal.SIGKILL)
        action(*args)

    setattr(sync.transport, step, dying)
    sync.push(version)


@pytest.mark.procs
@pytest.mark.parametrize(
    ("transport", "version", "step", "serves"),
    [
        pytest.param("tensor", 2, "put", "default", marks=pytest.mark.campaign("durability")),
        ("distributed", 2, "put", "default"),
        pytest.param("delta", 2, "put", "default", marks=pytest.mark.campaign("durability")),
        ("disk", 2, "put", "1"),  # nothing of the new version was read
        ("disk", 2, "commit", "1"),  # perhaps something was
        ("disk", 1, "put", "default"),  # nothing is known of what the server held before
    ],
)
def test_a_server_whose_trainer_dies_in_an_update_serves_one_version(tmp_path, transport, version, step, serves):
    save_tiny(tmp_path / "model", "qwen3", vocab_size=20_000, num_hidden_layers=2)  # several buckets
    model, run_dir = str(tmp_path / "model"), str(tmp_path)
    with receivers(tmp_path / "r", 1, {0: f"from:{model}"}) as urls:
        with pytest.raises(AssertionError, match="-9"):
            run_distributed(push_and_die, 1, 120, model, run_dir, urls, transport, version, step)
        log = wait_for_log(
            tmp_path, "it was only paused" if (transport, version, step) == ("disk", 2, "put") else "again"
        )
        state = state_of(urls[0])
        assert (state["version"], state["paused"], state["open"]) == (serves, False, False), log
        assert_holds(urls[0], tmp_path / "model", tmp_path, dtype=torch.bfloat16 if serves == "1" else torch.float32)
        cases = [({}, {"transport": transport})]
        (((first, *_),),) = run_distributed(push_twice, 1, 120, model, run_dir, urls, cases)
        assert first["updated"] == [0]
        assert_holds(urls[0], tmp_path / "model", tmp_path, plus=1.0)
        assert not state_of(urls[0])["paused"]
    if transport == "disk":
        assert sorted(path.name for path in (tmp_path / "sync").glob("*v0*")) == ["v00000001", "v00000002"]


@pytest.mark.procs
def test_a_server_that_was_started_with_random_weights_stays_paused(tmp_path):
    save_tiny(tmp_path / "model", "qwen3", vocab_size=20_000, num_hidden_layers=2)
    model, run_dir = str(tmp_path / "model"), str(tmp_path)
    with receivers(tmp_path / "r", 1, {0: "refuse:0"}) as urls:
        with pytest.raises(AssertionError, match="-9"):
            run_distributed(push_and_die, 1, 120, model, run_dir, urls, "tensor", 2, "put")
        log = wait_for_log(tmp_path, "STAYS PAUSED")
        assert "load format dummy" in log
        state = state_of(urls[0])
        assert (state["version"], state["paused"]) == (MIXED, True)
        cases = [({}, {"transport": "tensor"})]
        (((first, *_),),) = run_distributed(push_twice, 1, 120, model, run_dir, urls, cases)
        assert first["updated"] == [0]


def push_in_turn(folder: str, run_dir: str, urls: list[str]) -> None:
    """Two trainers of one server, both at version 1; the first one's weights have not changed when it has its turn."""
    first = make_sync(folder, run_dir, urls, "delta")
    first.push(1)
    other = make_sync(folder, run_dir, urls, "tensor")
    add_one(other)
    other.push(1)
    first.push(2)
    first.close()
    other.close()


@pytest.mark.procs
def test_a_version_of_another_run_is_no_base_of_a_delta(tmp_path):
    save_tiny(tmp_path / "model", "qwen3", vocab_size=2_000, num_hidden_layers=2)
    with receivers(tmp_path / "r", 1) as urls:
        run_distributed(push_in_turn, 1, 120, str(tmp_path / "model"), str(tmp_path), urls)
        assert_holds(urls[0], tmp_path / "model", tmp_path)


def end_in_different_ways(folder: str, run_dir: str, urls: list[str]) -> dict:
    """One update fails, and the trainer closes; another trainer's update does not."""
    found = {}
    for way in ("failed", "whole"):
        sync = make_sync(folder, run_dir, urls, "tensor")
        assert sync.push(1).updated == [0]
        if way == "failed":
            add_one(sync)
            deliver, calls = sync.transport.deliver, iter(range(100))

            def failing(*args, deliver=deliver, calls=calls) -> None:
                if next(calls) == 1:
                    raise ServerError("server 0", urls[0], "bucket", "out of luck")
                deliver(*args)

            sync.transport.deliver = failing
            assert list(sync.push(2).failed) == [0]
            assert state_of(urls[0])["paused"]
        sync.close()
        found[way] = [
            sync.receivers.keeper._process.wait(60),
            state_of(urls[0])["version"],
            state_of(urls[0])["paused"],
        ]
    return found


@pytest.mark.procs
def test_a_trainer_that_ends_leaves_no_keeper_and_no_paused_server(tmp_path):
    save_tiny(tmp_path / "model", "qwen3", vocab_size=20_000, num_hidden_layers=2)
    model = str(tmp_path / "model")
    with receivers(tmp_path / "r", 1, {0: f"from:{model}"}) as urls:
        (found,) = run_distributed(end_in_different_ways, 1, 120, model, str(tmp_path), urls)
    assert found == {"failed": [0, "default", False], "whole": [0, "1", False]}


@pytest.mark.procs
def test_an_update_waits_for_the_keeper_of_an_earlier_trainer(tmp_path, monkeypatch):
    def name(version: str) -> None:
        payload = {"new_version": version, "abort_all_requests": False}
        api.call("/update_weight_version", payload, deadline_s=30, phase="test")

    with receivers(tmp_path / "r", 1) as urls:
        api = ServerApi(urls[0])
        name(f"{RESTORING} 1")
        step = UpdateStep("update to version 3", 60)
        waiting = threading.Thread(target=server_receiver(api).pause, args=("retract", step))
        waiting.start()
        waiting.join(1.0)
        assert not state_of(urls[0])["paused"]
        name("default")
        waiting.join(60)
        assert state_of(urls[0])["paused"]
        name(f"{RESTORING} 2")  # by a keeper that is gone
        clock = SimpleNamespace(monotonic=itertools.count(step=40).__next__, sleep=lambda seconds: None)
        monkeypatch.setattr("megarl.rollout.sglang.receiver.time", clock)
        server_receiver(api).pause("retract", step)
        assert state_of(urls[0])["version"] == "taken over"


def test_a_server_that_another_trainer_has_since_is_left_alone(tmp_path):
    from megarl.rollout.sglang.keeper import KeeperState

    with receivers(tmp_path, 1) as urls:
        api, watch = ServerApi(urls[0], None, "server 0"), KeeperState()
        opened = {"event": "open", "url": urls[0], "api_key": None, "name": "server 0"}
        loading = {"event": "loading", "url": urls[0], "versions": ["default", "3"]}
        watch.read_events(json.dumps(message) for message in (opened, loading))
        api.call(
            "/update_weight_version", {"new_version": "8", "abort_all_requests": False}, deadline_s=60, phase="test"
        )
        watch.restore_servers(60.0)
        found = state_of(urls[0])
        assert found["version"] == "8"
        assert "/pause_generation" not in found["log"]


def test_a_keeper_that_ended_fails_the_update(tmp_path):
    from megarl.rollout.sglang.keeper import Keeper

    keeper, api = Keeper(tmp_path, 5.0), ServerApi("http://127.0.0.1:9", None, "server 0")
    try:
        keeper._process.kill()
        keeper._process.wait(30)
        with pytest.raises(ServerError, match=r"server 0 .* the keeper ended; see .*keeper\.log"):
            keeper.open(api)
    finally:
        with contextlib.suppress(OSError):
            keeper.close()
