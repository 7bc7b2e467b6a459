"""Tests of a node before a run: what `nvidia-smi` and the kernel's log say, disk, run folder; links by real processes.

The answers of `nvidia-smi` have the form that its manual gives; none was recorded on a cluster.
"""

from __future__ import annotations

import json
import os
import socket
import sys
from typing import Any

import pytest
import torch
import torch.distributed
from torch.distributed import HashStore

from megarl.launchers.preflight import (
    CommandOutput,
    ask,
    check_disk,
    check_ecc,
    check_gpus,
    check_run_folder,
    check_xids,
    main,
)
from megarl.launchers.preflight_links import measure, members_of, ring
from megarl.system.processes import free_port
from tests.forked import Forked

EIGHT = "".join(f"{number}, NVIDIA H100 80GB HBM3, 0\n" for number in range(8))
ROWS = "".join(f"GPU-{number}, No, No\n" for number in range(8))


def test_all_gpus_are_there():
    assert check_gpus(CommandOutput(EIGHT), 8) == (True, "8 x NVIDIA H100 80GB HBM3")
    assert check_gpus(CommandOutput(EIGHT[: EIGHT.index("7,")]), 8) == (False, "7 of 8 GPUs are visible")
    gone = "nvidia-smi ended with 15: Unable to determine the device handle for GPU0000:3B:00.0: GPU is lost."
    assert check_gpus(CommandOutput("", gone), 8) == (False, gone)


@pytest.mark.parametrize(
    ("listed", "rows", "ok", "reason"),
    [
        (EIGHT, ROWS, True, "none"),
        (EIGHT.replace("3, NVIDIA H100 80GB HBM3, 0", "3, NVIDIA H100 80GB HBM3, 2"), ROWS, False, "GPU 3: 2 uncorr"),
        (EIGHT.replace(", 0\n", ", [N/A]\n"), ROWS, True, "none"),  # a GPU without ECC
        (EIGHT.replace("HBM3, 0\n3", "HBM3, [GPU requires reset]\n3"), ROWS, False, "GPU 2: [GPU requires reset] unc"),
        (EIGHT.replace("HBM3, 0\n3", "HBM3, [Unknown Error]\n3"), ROWS, False, "GPU 2: [Unknown Error] unc"),
        (EIGHT, ROWS.replace("GPU-5, No, No", "GPU-5, No, Yes"), False, "GPU-5: a memory row could not be remapped"),
        (EIGHT, ROWS.replace("GPU-5, No, No", "GPU-5, Yes, No"), True, "1 GPUs wait for a reset"),
        (EIGHT, ROWS.replace("No", "0").replace("GPU-5, 0, 0", "GPU-5, 0, 1"), False, "GPU-5"),
        (EIGHT, ROWS.replace("No", "[N/A]"), True, "none"),
    ],
)
def test_memory_errors(listed, rows, ok, reason):
    found = check_ecc(CommandOutput(listed), CommandOutput(rows))
    assert found.ok == ok
    assert reason in found.reason


def test_a_driver_without_the_query_of_rows_fails_nothing():
    assert check_ecc(CommandOutput(EIGHT), CommandOutput("", "nvidia-smi ended with 2")).ok


LOG = """\
[    0.000000] Linux version 6.8.0
[  100.500000] NVRM: Xid (PCI:0000:3b:00): 13, pid=812, name=python, Graphics Exception
[90000.250000] NVRM: Xid (PCI:0000:5e:00): 79, pid='<unknown>', name=<unknown>, GPU has fallen off the bus.
"""


def test_errors_of_a_gpu_in_the_kernels_log():
    assert check_xids(CommandOutput(LOG), 90100.0) == (False, "Xid 79 of PCI:0000:5e:00")
    assert check_xids(CommandOutput(LOG), 90000.0 + 25 * 3600).ok  # more than a day ago
    assert check_xids(CommandOutput(LOG.replace(": 79", ": 31")), 90100.0).ok  # the program's own fault
    assert check_xids(CommandOutput("", "dmesg: read kernel buffer failed: Operation not permitted"), 1.0) == (
        True,
        "not known: dmesg: read kernel buffer failed: Operation not permitted",
    )


def test_programs_that_are_not_there_or_fail_say_so():
    assert ask("no-such-program") == ("", "no-such-program is not installed")
    assert ask("bash", "-c", "echo lost >&2; exit 15") == ("", "bash ended with 15: lost")


def test_disk_and_run_folder(tmp_path, monkeypatch):
    assert check_disk(tmp_path, 0).ok
    assert "launch.preflight_disk_gb = 1e+09" in check_disk(tmp_path, 1e9).reason
    monkeypatch.setenv("TMPDIR", str(tmp_path / "none"))
    assert check_disk(tmp_path, 0) == (False, f"{tmp_path / 'none'}: No such file or directory")
    assert check_run_folder(tmp_path).ok
    assert check_run_folder(tmp_path / "none") == (False, f"{tmp_path / 'none'}: No such file or directory")


def test_a_node_leaves_its_results(tmp_path, monkeypatch):
    monkeypatch.setenv("SLURMD_NODENAME", "n3")
    assert main(["node", str(tmp_path / "out"), "--run-dir", str(tmp_path)]) == 0
    found = json.loads((tmp_path / "out" / "n3.json").read_text())
    assert found["checks"]["disk"]["ok"]
    assert found["versions"].keys() == {"python", "megarl", "torch"}


@pytest.mark.parametrize("count", range(1, 9))
def test_every_node_has_two_neighbours_in_the_ring(count):
    ends = [node for pair in ring(count) for node in pair]
    assert len(set(map(frozenset, ring(count)))) == len(ring(count))
    assert all(ends.count(node) == (0 if count == 1 else 1 if count == 2 else 2) for node in range(count))


def test_a_node_that_does_not_come_is_left_out():
    store = HashStore()
    store.set("name/0", "n0")
    store.set("name/2", "n2")
    assert members_of(store, 3, limit_s=0.2) == [0, 2]


def test_a_wait_of_nccl_that_takes_too_long_raises(tmp_path, monkeypatch):
    monkeypatch.setenv("TORCH_NCCL_BLOCKING_WAIT", "")  # so that it is as before after the test
    monkeypatch.delenv("TORCH_NCCL_BLOCKING_WAIT")
    for name, value in {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port(), "MEGARL_NODES": 1}.items():
        monkeypatch.setenv(name, str(value))
    monkeypatch.setenv("NODE_RANK", "0")
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    listens = []

    def store_on(*given: Any, **more: Any) -> Any:
        with socket.socket(fileno=os.dup(more["master_listen_fd"])) as listener:
            listens.append(listener.getsockname()[0])
        return made(*given, **more)

    made = torch.distributed.TCPStore
    monkeypatch.setattr(torch.distributed, "TCPStore", store_on)
    assert measure(tmp_path, 0, 60.0, 0) == 0
    assert listens == ["127.0.0.1"], "on the address that it was given, and no other"
    assert os.environ["TORCH_NCCL_BLOCKING_WAIT"] == "1"  # torch's own switch for that


@pytest.mark.procs
def test_three_nodes_are_measured_against_each_other(tmp_path):
    outside = {**os.environ, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "MEGARL_NODES": "3"}
    outside |= {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    arguments = ["links", str(tmp_path), "--run-dir", str(tmp_path), "--limit-s", "200"]
    nodes = [
        Forked(_preflight, (arguments, {**outside, "NODE_RANK": str(k), "SLURMD_NODENAME": f"n{k}"})) for k in range(3)
    ]
    assert [node.wait(500) for node in nodes] == [0, 0, 0]
    found = json.loads((tmp_path / "links.json").read_text())
    assert found["nodes"] == ["n0", "n1", "n2"]
    assert all(abs(offset) < 1 for offset in found["clocks"].values())  # one machine, one clock
    pairs = {frozenset(pair["nodes"]) for pair in found["edges"]}
    assert pairs == {frozenset(pair) for pair in (("n0", "n1"), ("n1", "n2"), ("n0", "n2"))}
    assert all(pair["gb_per_s"] > 0 for pair in found["edges"])


def _preflight(arguments: list[str], environment: dict[str, str]) -> None:
    os.environ.clear()
    os.environ.update(environment)
    sys.exit(main(arguments))
