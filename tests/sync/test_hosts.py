"""A trainer on several machines: one view of where servers are, and an address of its own for every sender."""

import socket
from pathlib import Path

import pytest

from megarl.errors import ConfigError, WorkerError
from megarl.sync.transports import delta
from megarl.sync.updater import choose_transport
from tests.dist import fresh_parallel, run_distributed
from tests.models.tiny import build_tiny, save_tiny
from tests.sync.receivers import fleet_of, receivers
from tests.sync.test_updater import SETTINGS, assert_holds

ELSEWHERE = "10.9.8.7"


def on_two_machines(folder: str, run_dir: str, urls: list[str]) -> dict:
    """Each rank is a machine of its own, and the first alone can look the other's name up."""
    import torch.distributed as dist

    from megarl.config.sync import SyncConfig
    from megarl.sync.plan import ServerLayout
    from megarl.sync.updater import WeightSync

    rank = dist.get_rank()

    def look_up(name: str) -> tuple[str, list[str], list[str]]:
        if (rank, name) == (0, "machine1"):
            return name, [], [ELSEWHERE]
        raise socket.gaierror(f"{name} is not known here")

    socket.gethostname, socket.gethostbyname_ex = lambda: f"machine{rank}", look_up
    fresh_parallel(pp=2)
    chunks = build_tiny(folder, pp=2)

    def sync_to(addresses: list[str], transport: str) -> WeightSync:
        config = SyncConfig(**(SETTINGS | {"transport": transport}))
        return WeightSync(chunks, chunks[0].hf_config, fleet_of(addresses), ServerLayout(), config, Path(run_dir))

    planned = sync_to([f"http://{ELSEWHERE}:1"], "auto")
    sync = sync_to(urls, "distributed")
    report = sync.push(2)
    sync.close()
    return {
        "transport": planned.transport_name,
        "hosts": [server.host for server in planned.plan.servers],
        "updated": report.updated,
        "failed": report.failed,
    }


@pytest.mark.procs
def test_ranks_agree_on_hosts_and_every_sender_has_its_own_address(tmp_path):
    save_tiny(tmp_path / "model", "qwen3")
    with receivers(tmp_path / "r", 1) as urls:
        found = run_distributed(on_two_machines, 2, 120, str(tmp_path / "model"), str(tmp_path), urls)
        assert found == [{"transport": "tensor", "hosts": ["machine1"], "updated": [0], "failed": {}}] * 2
        assert_holds(urls[0], tmp_path / "model", tmp_path)


NAMES = {0: "machine0", 1: "machine0", 2: "machine1", 3: "machine2"}
WAYS = {"machine0": {"10.0.0.2": "10.0.0.1"}, "machine1": {"first": "10.0.0.2"}, "machine2": {"first": "10.0.1.3"}}


def test_a_relay_listens_on_the_interface_that_leads_to_the_other_machines(monkeypatch):
    def address(rank: int, names: dict[int, str]) -> str:
        # A machine may know its own name as a loopback address.
        monkeypatch.setattr(delta, "address_towards", lambda host: WAYS[NAMES[rank]].get(host, "127.0.1.1"))
        return delta.address_of_host(names, rank)

    monkeypatch.setenv("MASTER_ADDR", "first")
    monkeypatch.setattr(delta, "all_gather_json", lambda mine: [WAYS[name].get("first") for name in NAMES.values()])
    assert [address(rank, NAMES) for rank in NAMES] == ["10.0.0.1", "10.0.0.1", "10.0.0.2", "10.0.1.3"]
    assert {address(rank, dict.fromkeys(NAMES, "machine0")) for rank in NAMES} == {"127.0.0.1"}


def no_way(host: str) -> str:
    raise OSError("Network is unreachable")


def test_a_machine_without_a_way_to_the_others_says_so(monkeypatch):
    monkeypatch.setenv("MASTER_ADDR", "first")
    monkeypatch.setattr(delta, "address_towards", no_way)
    with pytest.raises(WorkerError, match="no address of machine1 leads to first"):
        delta.address_of_host(NAMES, 2)


def relays_of_two_machines(run_dir: str) -> list[str]:
    """Each rank is a machine with servers, whose name nobody can look up; the hosts whose relays this one reaches."""
    import torch.distributed as dist

    from megarl.config.sync import SyncConfig
    from megarl.sync.relay import RelayClient
    from megarl.sync.transports.delta import relays_of_all

    names = {0: "machine0.invalid", 1: "machine1.invalid"}
    relays, key, process = relays_of_all(set(names.values()), names, SyncConfig(), Path(run_dir))
    for address in relays.values():
        RelayClient(address, key, 60.0).close()
    dist.barrier()
    process.kill()
    process.wait()
    return sorted(relays)


@pytest.mark.procs
def test_relays_are_reached_by_address_not_by_name(tmp_path):
    found = run_distributed(relays_of_two_machines, 2, 120, str(tmp_path))
    assert found == [["machine0.invalid", "machine1.invalid"]] * 2


def test_shared_memory_needs_a_trainer_on_every_servers_host():
    assert choose_transport("auto", ["a", "b"], {"a", "b"}) == "tensor"
    assert choose_transport("auto", ["a", "c"], {"a", "b"}) == "distributed"
    assert choose_transport("auto", ["a", "b"], {"a", "b"}, apart=True) == "distributed"
    with pytest.raises(ConfigError, match=r"rollout\.sglang\.gpus"):
        choose_transport("tensor", ["a", "b"], {"a", "b"}, apart=True)
    with pytest.raises(ConfigError, match="no trainer rank runs on c"):
        choose_transport("tensor", ["a", "c"], {"a", "b"})
