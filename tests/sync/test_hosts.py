"""A trainer on several machines: one view of where servers are, and an address of its own for every sender."""

import socket
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from megarl.config.sync import SyncConfig
from megarl.rollout.sglang.receiver import OWN_GPUS, SPREAD
from megarl.sync import hosts as of_sync
from megarl.sync import updater
from megarl.sync.hosts import choose_transport, host_of
from megarl.sync.shards import machine
from megarl.sync.updater import WeightSync
from megarl.system import comm
from megarl.system.errors import ConfigError, WorkerError
from tests.dist import fresh_parallel, run_distributed, world
from tests.forked import fork_relays
from tests.models.tiny import build_tiny, save_tiny
from tests.sync.receivers import fleet_of, receivers, weight_sync
from tests.sync.test_updater import SETTINGS, assert_holds

ELSEWHERE = "10.9.8.7"


def on_two_machines(folder: str, run_dir: str, urls: list[str]) -> dict:
    """Each rank is a machine of its own, and only the first can look the other's name up."""
    import torch.distributed as dist

    rank = dist.get_rank()

    def look_up(name: str) -> tuple[str, list[str], list[str]]:
        if (rank, name) == (0, "machine1"):
            return name, [], [ELSEWHERE]
        raise socket.gaierror(f"{name} is not known here")

    socket.gethostname, socket.gethostbyname_ex = lambda: f"machine{rank}", look_up
    fresh_parallel(pp=2)
    chunks = build_tiny(folder, pp=2)

    def sync_to(addresses: list[str], transport: str) -> Any:
        config = SyncConfig(**(SETTINGS | {"transport": transport}))
        return weight_sync(chunks, fleet_of(addresses), config, run_dir)

    planned = sync_to([f"http://{ELSEWHERE}:1"], "auto")
    sync = sync_to(urls, "distributed")
    report = sync.push(2)
    sync.close()
    return {
        "transport": planned.transport_name,
        "hosts": list(planned.plan.hosts),
        "updated": report.updated,
        "failed": report.failed,
    }


@pytest.mark.procs
def test_ranks_agree_on_hosts_and_every_sender_has_its_own_address(tmp_path):
    save_tiny(tmp_path / "model", "qwen3", num_hidden_layers=2)
    with receivers(tmp_path / "r", 1) as urls:
        found = run_distributed(on_two_machines, 2, 120, str(tmp_path / "model"), str(tmp_path), urls)
        assert found == [{"transport": "tensor", "hosts": ["machine1"], "updated": [0], "failed": {}}] * 2
        assert_holds(urls[0], tmp_path / "model", tmp_path)


NAMES = {0: "machine0", 1: "machine0", 2: "machine1", 3: "machine2"}
WAYS = {"machine0": {"10.0.0.2": "10.0.0.1"}, "machine1": {"first": "10.0.0.2"}, "machine2": {"first": "10.0.1.3"}}


class Told(comm.WorkerGroup):
    """One rank of several, whose collectives give these answers in turn."""

    def __init__(self, rank: int, answers: list) -> None:
        super().__init__("machines", None, 0.0)
        self.rank, self._answers = rank, iter(answers)

    def all_gather_json(self, value: Any) -> list:
        return next(self._answers)(value)


def addresses(monkeypatch, rank: int) -> str:
    """The address of a rank's machine; a machine may know its own name as a loopback address."""
    ways = WAYS[NAMES[rank]]
    monkeypatch.setenv("MASTER_ADDR", "first")
    monkeypatch.setattr(comm, "address_towards", lambda host: ways.get(host, "127.0.1.1"))
    # The collectives tell who is where, what the others found, and what all found.
    towards_first = [{"address": WAYS[name]["first"]} if "first" in WAYS[name] else None for name in NAMES.values()]
    told = [lambda mine: list(NAMES.values()), lambda mine: towards_first, lambda mine: [mine] * len(NAMES)]
    return comm.address_for_others(NAMES[rank], Told(rank, told))


def test_a_machine_is_reached_at_the_interface_that_leads_to_the_others(monkeypatch):
    found = [addresses(monkeypatch, rank) for rank in NAMES]
    assert found == ["10.0.0.1", "10.0.0.1", "10.0.0.2", "10.0.1.3"]


def test_one_machine_needs_no_other_address_than_loopback():
    assert comm.address_for_others("machine0", comm.WorkerGroup.alone()) == "127.0.0.1"


@pytest.mark.parametrize(("boots", "address"), [(("a", "b"), "10.0.0.1"), (("a", "a"), "10.9.9.9")])
def test_the_store_of_cloned_machines_has_an_address_that_both_reach(monkeypatch, boots, address):
    machines = [f"clone-{boot}" for boot in boots]
    monkeypatch.setattr(socket, "gethostname", lambda: "clone")
    monkeypatch.setattr(of_sync, "machine_name", lambda: machines[0])
    monkeypatch.setattr(comm, "address_towards", lambda host: {"10.0.0.2": "10.0.0.1"}[host])
    second = {"address": "10.0.0.2"}  # as the second machine finds its address
    everyone = Told(0, [lambda mine: [mine, machines[1]]] * 2 + [lambda mine: [mine, second]] * 2)
    monkeypatch.setattr(everyone, "broadcast_json", lambda value: value)
    assert of_sync.place_of_store("10.9.9.9", everyone) == (machines, address)


def test_a_server_is_found_on_the_first_machine_even_where_its_name_is_a_loopback_address(monkeypatch):
    known = {"machine0": ["127.0.1.1"], "machine1": ["10.0.0.2", "192.168.0.2"]}
    monkeypatch.setattr(socket, "gethostbyname_ex", lambda name: (name, [], known[name]))
    addresses = {"machine0": "10.0.0.1", "machine1": "10.0.0.2"}
    hosts = ["10.0.0.1", "machine1", "192.168.0.2", ELSEWHERE, "127.0.0.1"]
    found = [host_of(f"http://{host}:30000", "machine0", addresses) for host in hosts]
    assert found == ["machine0", "machine1", "machine1", ELSEWHERE, "127.0.0.1"]
    alone = {"machine0": "127.0.0.1"}
    assert [host_of(f"http://{host}:1", "machine0", alone) for host in hosts[::4]] == ["10.0.0.1", "machine0"]
    monkeypatch.setattr(of_sync, "is_address_here", lambda host: host == "10.0.0.1")  # of another interface
    assert host_of("http://10.0.0.1:1", "machine0", alone) == "machine0"


@pytest.mark.parametrize("transport", ["shards", "distributed"])
def test_weights_are_not_offered_on_every_interface(monkeypatch, transport):
    monkeypatch.setattr("socket.gethostbyname", lambda _: "0.0.0.0")
    sync: Any = WeightSync.__new__(WeightSync)
    sync.config, sync.transport_name = SyncConfig(address="every.interface"), transport
    with pytest.raises(ConfigError, match=r"sync\.address: no part of a run may listen on every interface"):
        sync._make_transport(Path(), {}, {}, [])


@pytest.mark.parametrize("transport", ["shards", "distributed"])
def test_servers_get_the_name_of_the_recipe_which_they_may_resolve_to_another_address(monkeypatch, transport):
    passed: list[str | None] = []
    monkeypatch.setattr(updater, "place_of_store", lambda address, world: passed.append(address) or ([], address))
    monkeypatch.setattr(updater, "own_shards", lambda *_: [])
    monkeypatch.setattr(updater, "ShardTransfer", lambda *given: passed.append(given[-1]))
    monkeypatch.setattr(updater, "DistributedTransport", lambda *given: passed.append(given[-1]))
    monkeypatch.setattr("socket.gethostbyname", lambda _: "10.0.0.1")
    sync: Any = WeightSync.__new__(WeightSync)
    sync.config, sync.transport_name, sync.world = SyncConfig(address="trainer"), transport, None
    sync.chunks, sync.table, sync.dtype, sync.run = [], {}, "torch.float32", "run"
    sync.receivers = SimpleNamespace(colocated=False)
    sync._make_transport(Path(), {}, {}, [])
    assert set(passed) == {"trainer"}


def no_way(host: str) -> str:
    raise OSError("Network is unreachable")


def without_a_way(lost: int) -> str:
    """Each rank is a machine, and one does not find the other."""
    import torch.distributed as dist

    from megarl.system import comm

    if dist.get_rank() == lost:
        comm.address_towards = no_way
    try:
        return comm.address_for_others(f"machine{dist.get_rank()}", world())
    except WorkerError as error:
        return str(error)


@pytest.mark.procs
@pytest.mark.parametrize("lost", [0, 1])
def test_a_machine_without_a_way_to_the_others_ends_the_run_everywhere(lost):
    way = f"no address of machine{lost} leads to 127.0.0.1: Network is unreachable"
    assert (
        run_distributed(without_a_way, 2, 120, lost)
        == [f"machines cannot reach each other: {way}; check the network between them and MASTER_ADDR"] * 2
    )


@pytest.mark.procs
def test_machines_reach_each_other():
    assert run_distributed(without_a_way, 2, 120, -1) == ["127.0.0.1"] * 2


def relays_of_two_machines(run_dir: str) -> list[str]:
    """Each rank is a machine with servers; both have one host name, which nobody can look up. Return the hosts whose
    relays this rank reaches."""
    import torch.distributed as dist

    from megarl.sync.hosts import hosts_of_ranks
    from megarl.sync.messages import MessageClient
    from megarl.sync.shards import machine
    from megarl.sync.transports.delta import relays_of_all

    fork_relays()
    rank, look_up = dist.get_rank(), socket.gethostname
    socket.gethostname = lambda: "clone.invalid"
    machine._BOOT_ID = Path(run_dir) / f"boot{rank}"
    machine._BOOT_ID.write_text(f"boot {rank}")
    everyone = world()
    names, addresses = hosts_of_ranks(everyone)
    socket.gethostname = look_up
    relays, key, process = relays_of_all(set(names.values()), names, addresses, SyncConfig(), Path(run_dir), everyone)
    for address in relays.values():
        MessageClient(address, key, 60.0).close()
    dist.barrier()
    process.kill()
    process.wait()
    return list(relays)


@pytest.mark.procs
def test_relays_of_cloned_machines_are_reached_by_address_not_by_name(tmp_path):
    first, second = run_distributed(relays_of_two_machines, 2, 120, str(tmp_path))
    assert first == second
    assert len(set(first)) == 2
    assert all(host.startswith("clone.invalid-") for host in first)


@pytest.mark.parametrize(("what", "other"), [("_BOOT_ID", "/proc/sys/kernel/version"), ("_SHARED_MEMORY", "/proc")])
def test_machines_of_one_host_name_have_names_of_their_own(monkeypatch, what, other):
    here = machine.machine_name()
    assert machine.machine_name() == here
    monkeypatch.setattr(machine, what, Path(other))
    assert machine.machine_name() != here


def test_memory_is_not_shared_with_a_server_on_another_machine_of_the_same_host_name(monkeypatch):
    monkeypatch.setattr(socket, "gethostname", lambda: "clone")
    monkeypatch.setattr(of_sync, "machine_name", lambda: "clone-a")
    monkeypatch.setattr(of_sync, "address_for_others", lambda name, group: "10.0.0.1")
    second = ["clone", "clone-b", "10.0.0.2"]
    names, addresses = of_sync.hosts_of_ranks(Told(0, [lambda mine: [mine, second]]))
    assert names == {0: "clone-a", 1: "clone-b"}
    urls = ["http://127.0.0.1:1", "http://10.0.0.1:1", "http://10.0.0.2:1"]
    hosts = [host_of(url, names[0], addresses) for url in urls]
    assert hosts == ["127.0.0.1", "clone-a", "clone-b"]
    assert [choose_transport("auto", [host], set(names.values())) for host in hosts] == [
        "distributed",
        "tensor",
        "tensor",
    ]


def test_shared_memory_needs_a_trainer_on_every_servers_host():
    assert choose_transport("auto", ["a", "b"], {"a", "b"}) == "tensor"
    assert choose_transport("auto", ["a", "c"], {"a", "b"}) == "distributed"
    assert choose_transport("auto", ["a", "b"], {"a", "b"}, OWN_GPUS) == "distributed"
    with pytest.raises(ConfigError, match=r"rollout\.sglang\.gpus"):
        choose_transport("tensor", ["a", "b"], {"a", "b"}, OWN_GPUS)
    with pytest.raises(ConfigError, match="no trainer rank runs on c"):
        choose_transport("tensor", ["a", "c"], {"a", "b"})


def test_a_server_on_several_machines_takes_nothing_through_the_memory_of_one() -> None:
    for wanted, chosen in {"auto": "distributed", "distributed": "distributed", "disk": "disk"}.items():
        assert choose_transport(wanted, ["a"], {"a"}, spread=SPREAD) == chosen
    assert choose_transport("auto", ["a"], {"a"}, spread=SPREAD, colocated=True) == "shards"
    assert choose_transport("auto", ["a"], {"a"}, colocated=True) == "tensor"
    for wanted in ("tensor", "delta"):
        with pytest.raises(ConfigError, match=r"rollout\.sglang\.nnodes"):
            choose_transport(wanted, ["a"], {"a"}, spread=SPREAD)
