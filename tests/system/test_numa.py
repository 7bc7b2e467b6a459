"""Processes on the cores of their GPU's NUMA node: two GPUs on two sockets, in files as the kernel has them."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from types import SimpleNamespace

import pytest
import torch

from megarl.system import numa


@pytest.fixture
def machine(tmp_path, monkeypatch):
    """Two GPUs; `affinity` has the cores of each thread of this process, which the test may change freely."""
    for gpu, node in ((0x1B, 0), (0xAC, 1), (0xDD, -1)):
        folder = tmp_path / f"sys/bus/pci/devices/0000:{gpu:02x}:00.0"
        folder.mkdir(parents=True)
        (folder / "numa_node").write_text(f"{node}\n")
    for node, cores in enumerate(("0-3,8-11\n", "4-7,12\n")):
        folder = tmp_path / f"sys/devices/system/node/node{node}"
        folder.mkdir(parents=True)
        (folder / "cpulist").write_text(cores)
    for thread in (0, 71, 72):
        (tmp_path / f"proc/self/task/{thread}").mkdir(parents=True)
    places = [SimpleNamespace(pci_domain_id=0, pci_bus_id=bus, pci_device_id=0) for bus in (0x1B, 0xAC, 0xDD)]
    monkeypatch.setattr(torch.cuda, "get_device_properties", [*places, SimpleNamespace()].__getitem__)
    affinity = {thread: set(range(13)) for thread in (0, 71, 72)}
    monkeypatch.setattr(os, "sched_getaffinity", affinity.__getitem__)
    monkeypatch.setattr(os, "sched_setaffinity", affinity.__setitem__)
    monkeypatch.setattr(numa, "_unbound", frozenset())
    return SimpleNamespace(root=tmp_path, affinity=affinity)


def test_all_threads_run_on_the_cores_of_the_gpus_node(machine):
    assert numa.bind_to_gpu(1, machine.root)
    assert list(machine.affinity.values()) == 3 * [{4, 5, 6, 7, 12}]


def test_cores_that_the_process_may_not_use_stay_out(machine):
    machine.affinity[0] = {2, 3, 4}
    assert numa.bind_to_gpu(0, machine.root)
    assert machine.affinity[0] == {2, 3}
    machine.affinity[0] = {0, 1}
    assert not numa.bind_to_gpu(1, machine.root)
    assert machine.affinity[0] == {0, 1}


@pytest.mark.parametrize("gpu", [2, 3], ids=["a virtual machine", "a torch without addresses"])
def test_an_unknown_node_changes_nothing(machine, gpu):
    before = dict(machine.affinity)
    assert not numa.bind_to_gpu(gpu, machine.root)
    assert machine.affinity == before


def test_servers_get_all_cores_again(machine):
    with numa.on_all_cores():  # of a process that is not bound
        assert machine.affinity[0] == set(range(13))
    numa.bind_to_gpu(0, machine.root)
    with numa.on_all_cores():
        assert machine.affinity[0] == set(range(13))
    assert machine.affinity[0] == {0, 1, 2, 3, 8, 9, 10, 11}


def test_a_child_inherits_the_cores_of_the_thread_that_starts_it(monkeypatch):
    """The system's own rule, on which `on_all_cores` relies: other threads do not matter."""
    cores = os.sched_getaffinity(0)
    if len(cores) < 2:
        pytest.skip("needs two cores")
    found = []

    def start() -> None:
        monkeypatch.setattr(numa, "_unbound", frozenset(cores))
        os.sched_setaffinity(0, {min(cores)})
        command = [sys.executable, "-S", "-c", "import os; print(len(os.sched_getaffinity(0)))"]
        found.append(int(subprocess.check_output(command)))
        with numa.on_all_cores():
            found.append(int(subprocess.check_output(command)))

    thread = threading.Thread(target=start)
    thread.start()
    thread.join()
    assert found == [1, len(cores)]
    assert os.sched_getaffinity(0) == cores
