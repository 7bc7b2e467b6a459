"""Whole synchronisations: trainer processes to receiver processes, every transport, and what goes wrong."""

import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from megarl.rollout.sglang.api import ServerApi
from megarl.system.errors import ServerError
from tests.campaigns import split
from tests.dist import fresh_parallel, run_distributed
from tests.models.test_layouts import load_folder
from tests.models.tiny import build_tiny, save_tiny
from tests.sync.receivers import fleet_of, receivers, weight_sync

SETTINGS = {"dtype": "bf16", "bucket_mb": 5, "verify": "off", "timeout_s": 60.0}
DEADLINE_S = 8.0  # where one hangs; the others have to be done by then on a slow machine, too


def held_by(url: str, path: Path) -> dict[str, torch.Tensor]:
    ServerApi(url).call("/dump", {"path": str(path)}, deadline_s=60, phase="test")
    return load_file(path)


def state_of(url: str) -> dict:
    """What a receiver says of itself; `version` without the name of the run that counted it."""
    state = ServerApi(url).call("/state", {}, deadline_s=60, phase="test")
    return state | {"version": state["version"].partition("@")[0]}


def assert_holds(
    url: str, folder: Path, tmp_path: Path, plus: float = 0.0, dtype: torch.dtype = torch.bfloat16
) -> None:
    held, expected = held_by(url, tmp_path / "dump.safetensors"), load_folder(folder)
    assert held.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(held[name], (tensor + plus).to(dtype)), name


def push_twice(folder: str, run_dir: str, urls: list[str], cases: list[tuple[dict, dict]]) -> list[list]:
    """For each (layout, settings): push version 1, add 1 to every parameter, push version 2; reports as data."""
    import dataclasses

    from megarl.config.sync import SyncConfig

    found = []
    for layout, settings in cases:
        fresh_parallel(**layout)
        chunks = build_tiny(folder, **layout)
        fleet = fleet_of(urls, colocated=settings.pop("colocated", False))
        sync = weight_sync(chunks, fleet, SyncConfig(**(SETTINGS | settings)), run_dir)
        reports = [sync.push(1)]
        with torch.no_grad():
            for chunk in chunks:
                for param in chunk.parameters():
                    param.add_(1.0)
        reports += [sync.push(2), sync.catch_up()]
        sync.close()
        found.append([dataclasses.asdict(report) for report in reports] + [fleet.told])
    return found


TP2, PP2, DP2 = {"tp": 2}, {"pp": 2}, {}


@pytest.mark.procs
@pytest.mark.parametrize(
    ("transport", "layouts"),
    [
        ("tensor", [TP2]),
        ("distributed", [PP2]),
        ("disk", [DP2]),
        ("delta", [TP2]),
        ("shards", [PP2]),
        *(
            pytest.param(transport, layouts, marks=pytest.mark.campaign("teams"))
            for transport, layouts in (
                ("tensor", [PP2, DP2]),
                ("distributed", [TP2, DP2]),
                ("disk", [TP2, PP2]),
                ("delta", [PP2, DP2]),
                ("shards", [TP2, DP2]),
            )
        ),
    ],
)
def test_every_server_holds_the_new_weights(tmp_path, transport, layouts):
    save_tiny(tmp_path / "model", "qwen3", vocab_size=20_000, num_hidden_layers=2)  # several buckets
    servers = list(range(3 if transport == "shards" else 2))  # shards: more than there are ranks that send
    with receivers(tmp_path / "r", len(servers)) as urls:
        for layout in layouts:
            cases = [(layout, {"transport": transport, "bucket_mb": 5 if transport != "shards" else 1})]
            ranks = run_distributed(push_twice, 2, 120, str(tmp_path / "model"), str(tmp_path), urls, cases)
            for (first, second, third, told), *_ in ranks:
                assert first["updated"] == second["updated"] == servers
                assert (first["failed"], third["updated"]) == ({}, [])
                assert told == [[f"server {i}", v] for v in (1, 2) for i in servers]
            for url in urls:
                assert_holds(url, tmp_path / "model", tmp_path, plus=1.0)
                state = state_of(url)
                assert (state["version"], state["paused"], state["open"]) == ("2", False, False)
    if transport == "disk":
        assert sorted(path.name for path in (tmp_path / "sync").iterdir()) == ["v00000001", "v00000002"]


@pytest.mark.procs
@pytest.mark.parametrize(
    "layout", [TP2, *(pytest.param(layout, marks=pytest.mark.campaign("teams")) for layout in (PP2, DP2))]
)
def test_servers_on_the_trainers_gpus_copy_what_its_ranks_receive(tmp_path, layout):
    save_tiny(tmp_path / "model", "qwen3", vocab_size=20_000, num_hidden_layers=2)
    cases = [(layout, {"transport": "shards", "bucket_mb": 1, "verify": "off", "colocated": True})]
    with receivers(tmp_path / "r", 2) as urls:
        ranks = run_distributed(push_twice, 2, 120, str(tmp_path / "model"), str(tmp_path), urls, cases)
        for ((first, second, *_),) in ranks:
            assert (first["failed"], first["updated"], second["updated"]) == ({}, [0, 1], [0, 1])
        for url in urls:
            assert_holds(url, tmp_path / "model", tmp_path, plus=1.0)


@pytest.mark.procs
@pytest.mark.campaign("durability")
@pytest.mark.parametrize("fault", ["killed:2", "stopped:2", "refuse:2", "hang:2"])
def test_a_server_on_the_trainers_gpus_that_is_gone_does_not_stop_the_others(tmp_path, fault):
    save_tiny(tmp_path / "model", "qwen3", vocab_size=20_000)
    cases = [(TP2, {"transport": "shards", "bucket_mb": 1, "colocated": True})]  # several rounds
    with receivers(tmp_path / "r", 2, {1: fault}) as urls:
        ranks = run_distributed(push_twice, 2, 120, str(tmp_path / "model"), str(tmp_path), urls, cases)
        for ((first, second, _, _),) in ranks:
            assert first["updated"] == second["updated"] == [0]
            assert "update from shard to shard" in first["failed"]["1"]
        assert_holds(urls[0], tmp_path / "model", tmp_path, plus=1.0)


@pytest.mark.procs
@pytest.mark.parametrize("transport", ["tensor", "distributed"])
def test_a_server_that_fails_does_not_stop_the_others(tmp_path, transport):
    save_tiny(tmp_path / "model", "qwen3", vocab_size=20_000, num_hidden_layers=2)
    faults = {0: "die:2", 1: "refuse:2", 2: "hang:2", 3: "open:0"}
    cases = [({"pp": 2}, {"transport": transport, "timeout_s": DEADLINE_S})]
    with receivers(tmp_path / "r", 5, faults) as urls:
        ranks = run_distributed(push_twice, 2, 120, str(tmp_path / "model"), str(tmp_path), urls, cases)
        for ((first, second, _, _),) in ranks:
            assert first["updated"] == second["updated"] == [3, 4]
            assert sorted(first["failed"]) == ["0", "1", "2"]
            assert "no memory left" in first["failed"]["1"]
            assert "within 8 s" in first["failed"]["2"]
        for url in urls[3:]:
            assert_holds(url, tmp_path / "model", tmp_path, plus=1.0)
        assert state_of(urls[1])["paused"]  # answers nothing with half of its weights exchanged
        with pytest.raises(ServerError):
            state_of(urls[0])


@pytest.mark.procs
@pytest.mark.parametrize(
    ("faults", "failed"),
    [
        ({0: "away:0", 1: "away:2"}, [0, 1]),  # these two gather stripes, so they share a cell
        pytest.param({0: "away:0", 1: "away:1"}, [0, 1], marks=pytest.mark.campaign("durability")),
        pytest.param({2: "killed:2"}, [2], marks=pytest.mark.campaign("durability")),
        pytest.param({0: "killed:1", 1: "stopped:2"}, [0, 1], marks=pytest.mark.campaign("durability")),
    ],
)
def test_a_server_that_is_gone_in_a_round_does_not_stop_the_others(tmp_path, faults, failed):
    save_tiny(tmp_path / "model", "qwen3", vocab_size=20_000)
    cases = [({"pp": 2}, {"transport": "shards", "bucket_mb": 1})]  # several rounds
    with receivers(tmp_path / "r", 3, faults) as urls:
        ranks = run_distributed(push_twice, 2, 120, str(tmp_path / "model"), str(tmp_path), urls, cases)
        for ((first, second, _, _),) in ranks:
            assert first["updated"] == second["updated"] == [n for n in range(3) if n not in failed]
            assert sorted(first["failed"]) == [str(number) for number in failed]
            assert all("update from shard to shard" in why for why in first["failed"].values()), first["failed"]
        for number in {0, 1, 2} - set(failed):
            assert_holds(urls[number], tmp_path / "model", tmp_path, plus=1.0)


@pytest.mark.procs
def test_a_server_with_which_no_group_can_be_made_does_not_stop_the_others(tmp_path):
    save_tiny(tmp_path / "model", "qwen3", num_hidden_layers=2)
    faults = {0: "mute:0", 1: "absent:0"}
    cases = [({}, {"transport": "distributed", "timeout_s": DEADLINE_S})]
    with receivers(tmp_path / "r", 3, faults) as urls:
        (((first, second, *_),),) = run_distributed(
            push_twice, 1, 120, str(tmp_path / "model"), str(tmp_path), urls, cases
        )
        assert first["updated"] == second["updated"] == [2]
        for number in ("0", "1"):
            assert first["failed"][number].startswith(f"server {number} at {urls[int(number)]}: group of the update")
        assert "within 8 s" in first["failed"]["0"]
        assert "the trainer's part" in first["failed"]["1"]
        assert_holds(urls[2], tmp_path / "model", tmp_path, plus=1.0)


def push_with_an_error(folder: str, run_dir: str, urls: list[str]) -> list:
    """Something goes wrong at the end of one server's update that is no answer of the server."""
    from megarl.config.sync import SyncConfig

    fresh_parallel()
    chunks = build_tiny(folder)
    config = SyncConfig(**(SETTINGS | {"transport": "disk"}))
    sync = weight_sync(chunks, fleet_of(urls), config, run_dir)
    commit = sync.transport.commit

    def wrong(target) -> None:
        if target.number == 0:
            raise RuntimeError("broken")
        commit(target)

    sync.transport.commit = wrong
    report = sync.push(1)
    return [report.updated, report.failed]


@pytest.mark.procs
def test_whatever_goes_wrong_with_one_server_does_not_stop_the_others(tmp_path):
    save_tiny(tmp_path / "model", "qwen3", num_hidden_layers=2)
    with receivers(tmp_path / "r", 2) as urls:
        run = (str(tmp_path / "model"), str(tmp_path), urls)
        ((updated, failed),) = run_distributed(push_with_an_error, 1, 120, *run)
        why = f"server 0 at {urls[0]}: update to version 1: RuntimeError: broken"
        assert (updated, failed) == ([1], {"0": why})
        assert state_of(urls[0])["paused"]
        assert_holds(urls[1], tmp_path / "model", tmp_path)


@pytest.mark.procs
def test_a_server_that_gives_no_checksums_has_failed_and_the_run_goes_on(tmp_path):
    save_tiny(tmp_path / "model", "qwen3", num_hidden_layers=2)
    with receivers(tmp_path / "r", 1) as urls:  # these know of no /weights_checker
        cases = [({}, {"transport": "tensor", "verify": "every"})]
        (((first, *_),),) = run_distributed(push_twice, 1, 120, str(tmp_path / "model"), str(tmp_path), urls, cases)
        assert (first["updated"], first["verified"]) == ([], 0)
        assert "verification" in first["failed"]["0"]
        assert state_of(urls[0])["paused"]


def push_to_restarted(folder: str, run_dir: str, urls: list[str], transport: str) -> list:
    """Version 1 to the first server; then the second one stands where it stood, as after a restart."""
    from megarl.config.sync import SyncConfig
    from megarl.rollout.sglang.api import ServerApi

    fresh_parallel()
    chunks = build_tiny(folder)
    colocated = transport == "shards, colocated"
    config = SyncConfig(**(SETTINGS | {"transport": transport.partition(",")[0]}))
    fleet = fleet_of(urls[:1], colocated=colocated)
    sync = weight_sync(chunks, fleet, config, run_dir)
    sync.push(1)
    server = fleet.servers[0]
    fleet.mark_failed(server, "gone")
    assert sync.catch_up().updated == []  # a failed server is not touched
    server.api, server.state = ServerApi(urls[1], None, "server 0"), "catching_up"
    return [sync.catch_up().updated, sync.catch_up().updated, server.state, server.version]


@pytest.mark.procs
@pytest.mark.parametrize(
    "transport",
    split(
        "durability",
        ["tensor", "distributed", "disk", "delta", "shards", "shards, colocated"],
        ("tensor", "delta", "shards"),
    ),
)
def test_a_restarted_server_gets_everything(tmp_path, transport):
    save_tiny(tmp_path / "model", "qwen3", vocab_size=20_000, num_hidden_layers=2)
    with receivers(tmp_path / "r", 2) as urls:
        ranks = run_distributed(push_to_restarted, 1, 120, str(tmp_path / "model"), str(tmp_path), urls, transport)
        assert ranks == [[[0], [], "current", 1]]
        assert_holds(urls[1], tmp_path / "model", tmp_path)


def listening_of_group(folder: str, run_dir: str, urls: list[str]) -> list[str]:
    """Addresses on which the store of the update group listens."""
    import psutil

    from megarl.config.sync import SyncConfig

    fresh_parallel()
    chunks = build_tiny(folder)
    config = SyncConfig(**(SETTINGS | {"transport": "distributed"}))
    sync = weight_sync(chunks, fleet_of(urls), config, run_dir)
    assert sync.push(1).updated == [0]
    (link,) = sync.transport._links.values()
    sockets = psutil.Process().net_connections("tcp")
    return [c.laddr.ip for c in sockets if c.status == psutil.CONN_LISTEN and c.laddr.port == link.store.port]


@pytest.mark.procs
def test_the_program_of_a_receiver_takes_an_update(tmp_path):
    """As `megarl bench sync` starts it; the other tests fork theirs. The group's store listens on loopback only."""
    save_tiny(tmp_path / "model", "qwen3", num_hidden_layers=2)
    port_file = tmp_path / "port"
    with subprocess.Popen([sys.executable, "-m", "megarl.benchmarks.sync.receiver", str(port_file)]) as program:
        try:
            end = time.monotonic() + 240
            while not port_file.exists():
                assert time.monotonic() < end
                assert program.poll() is None
                time.sleep(0.05)
            urls = [f"http://127.0.0.1:{port_file.read_text()}"]
            found = run_distributed(listening_of_group, 1, 120, str(tmp_path / "model"), str(tmp_path), urls)
        finally:
            program.kill()
    assert found == [["127.0.0.1"]]
