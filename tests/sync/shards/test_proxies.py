"""Servers on the trainer's GPUs: trainer ranks receive for the server ranks there, which copy from their buffers."""

from __future__ import annotations

import json
import threading
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.distributed as dist

from megarl.sync.sender import SyncReport
from megarl.sync.shards import proxies
from megarl.sync.shards.boxes import BoxRule, GpuPlace, RankStorage, ServerStorage
from megarl.sync.shards.exchange import Round, rounds_of_receiver
from megarl.sync.shards.handover import PAGE_BYTES, HandoverPage, copy_rounds, wait_for
from megarl.sync.shards.plan import UpdatePlan
from megarl.sync.shards.proxies import ProxyBuffers, ProxyPart, ProxyRunner, ProxyStep, _Flight, proxies_of
from megarl.sync.shards.rounds import RoundLimits
from megarl.system.errors import ConfigError, WorkerError
from tests.dist import run_distributed, world
from tests.sync.layouts import trainer
from tests.sync.shards.recorded import parameters_of
from tests.sync.shards.test_shard_plan import SMALL
from tests.sync.shards.test_transfer import SpoolReceiver, expected, own_shards, write
from tests.sync.shards.test_transfer import wait_for as wait_for_file
from tests.sync.shards.walk import Job, job, stored
from tests.sync.test_loader import Model, load_module, tensors

HERE, AWAY = "machine 0", "machine 1"


def be_a_server(spool: str) -> dict[str, list[float]]:
    """A server of one rank, on the first machine; its parameters at the end."""
    server = world().rank
    shards, model, calls = load_module("megarl_shards"), Model(0), 0
    shards.machine.machine_name = lambda: HERE
    write(Path(spool) / f"{server}.up", None)
    while True:
        call = Path(spool) / f"{server}.0.{calls}.call"
        while not call.exists():
            if (Path(spool) / "stop").exists():
                assert shards._GROUPS == {}, "it must be in no process group"
                return {name: p.float().flatten().tolist() for name, p in model.named_parameters()}
            threading.Event().wait(0.01)
        loader, header = json.loads(call.read_text())
        getattr(shards, loader)(model, [(json.dumps(header), torch.empty(0, dtype=torch.uint8))])
        write(call.with_suffix(".answer"), None)
        calls += 1


class OneRank(SpoolReceiver):
    ranks = 1


def be_the_trainer(spool: str, nbytes: int) -> list:
    """Two versions; the first halves of tensors are on the servers' machine, the second ones on another."""
    from megarl.sync.shards.transfer import ShardTransfer
    from megarl.sync.transports.shards import planner

    group = world()
    # Ranks 0 and 2 have the first halves, rank 1 the second ones.
    places = [GpuPlace(HERE, 0), GpuPlace(AWAY, 0), GpuPlace(HERE, 1)]
    own = replace(own_shards(group.rank, group.size, tensors(0)), places=places, gpus=[""] * 3)
    transfer = ShardTransfer(own, planner(nbytes, colocated=True), group, "run", 60.0)
    receivers = [OneRank(number, Path(spool)) for number in range(2)]
    found = []
    for version in (1, 2):
        for name, tensor in own_shards(group.rank, group.size, tensors(version)).parameters.items():
            own.parameters[name].copy_(tensor)
        report = SyncReport(version, "shards")
        transfer.run(receivers, range(2) if group.rank == 0 else (), report, range(2))
        (plan,) = transfer._plans.values()
        found.append([report.failed, report.nbytes, report.verified, len(plan.update.fans), len(plan.proxied.steps)])
    group.barrier()
    if group.rank == 0:
        (Path(spool) / "stop").touch()
    transfer.close()
    return found


@pytest.mark.procs
def test_what_another_machine_has_crosses_the_network_once_and_the_proxies_gather_it(tmp_path):
    held: list = []
    beside = threading.Thread(
        target=lambda: held.extend(run_distributed(be_a_server, 2, 120, str(tmp_path))), daemon=True
    )
    beside.start()
    for server in range(2):  # ranks are started one group at a time
        wait_for_file(tmp_path / f"{server}.up")
    reports = run_distributed(be_the_trainer, 3, 120, str(tmp_path), 512)
    beside.join(120)
    parameters = len(list(Model(0).parameters()))
    for version in (0, 1):
        (failed, own, verified, fans, steps), (_, sent, *_), (_, other, *_) = (report[version] for report in reports)
        assert (failed, verified) == ({}, 2 * parameters)
        assert 0 < own == other, "what each of the two packs for the server on its GPU counts too"
        assert fans
        assert steps > 2
        assert 0 < sent < 1.2 * sum(p.nbytes for p in Model(0).parameters()) / 2, "both servers need these bytes"
    assert held == [expected(2, 0)] * 2


def test_each_rank_of_a_server_has_the_trainer_rank_on_its_gpu():
    gpus = [("a", "gpu-1"), ("a", "gpu-0"), ("b", "gpu-0")]
    assert proxies_of(gpus, {"server 0": [("b", "gpu-0")], "server 1": [("a", "gpu-0"), ("a", "gpu-1")]}) == {
        (0, 0): 2,
        (1, 0): 1,
        (1, 1): 0,
    }
    assert proxies_of([("a", "")] * 3, {"server 0": [("a", "")], "server 1": [("a", "")]}) == {(0, 0): 0, (1, 0): 1}


@pytest.mark.parametrize("second", [("a", "gpu-0"), ("a", "gpu-1"), ("b", "gpu-0")])
def test_a_rank_of_a_server_without_a_trainer_rank_of_its_own_is_refused(second):
    with pytest.raises(ConfigError, match=rf"rank 1 of server 0 .* GPU {second[1]} of machine {second[0]}"):
        proxies_of([("a", "gpu-0")], {"server 0": [("a", "gpu-0"), second]})


def alone(limits: RoundLimits) -> tuple[Job, UpdatePlan]:
    """A trainer of one rank, and a server of one rank on its GPU."""
    made, place = job("qwen3", trainer(), 1), GpuPlace(HERE, 0)
    server = ServerStorage(made.servers[0].ranks, (place,))
    return made, UpdatePlan(made.tensors, made.trainer, [place], [server], replace(limits, cells=1))


def page_of_counts() -> HandoverPage:
    return HandoverPage(torch.zeros(PAGE_BYTES, dtype=torch.uint8))


def test_a_server_rank_gets_parameters_that_have_left_the_device_and_come_back():
    made, plan = alone(RoundLimits())
    parameters = parameters_of(made.trainer[0])
    part = ProxyPart(plan, 0, {(0, 0): 0}, parameters, ProxyBuffers(torch.device("cpu")), "plan")
    assert len(part.steps) <= 2, "the server rank copies after all rounds here"
    storage = made.servers[0].ranks[0]
    copies = parameters_of(storage)
    tables, dtypes = plan.program(receiver=(0, 0)).arrays(), made.tensors.dtypes.tolist()
    rounds = rounds_of_receiver(tables, copies, dtypes, (0, 0), part.buffers)
    sent = RankStorage(storage.parameters, storage.boxes.take(storage.boxes.rule == BoxRule.COPY))
    expected_values = [
        np.where(values == -1, 0, values) for values in stored(sent, made.tensors, made.values)
    ]  # 0: padding
    for sign in (1, -1):
        for parameter, values in zip(parameters, stored(made.trainer[0], made.tensors, made.values), strict=True):
            memory, size = parameter.untyped_storage(), parameter.nbytes
            memory.resize_(0)
            memory.resize_(size)  # as after offloading
            parameter.copy_(sign * torch.from_numpy(values).view(parameter.shape))
        page = page_of_counts()
        assert ProxyRunner(part, 0, None, 1.0).run(page, lambda: "late", lambda why: None) is None
        assert copy_rounds(rounds, page, lambda: "late", 1.0) is None
        for copy, values in zip(copies, expected_values, strict=True):
            assert torch.equal(copy.flatten(), sign * torch.from_numpy(values))


def test_a_proxy_does_not_fill_a_buffer_that_the_server_rank_has_not_copied():
    made, plan = alone(SMALL)
    part = ProxyPart(plan, 0, {(0, 0): 0}, parameters_of(made.trainer[0]), ProxyBuffers(torch.device("cpu")), "plan")
    page, filled, lost = page_of_counts(), [], []

    def look() -> str:
        filled.append(page.filled)
        return "it is gone"

    why = ProxyRunner(part, 0, None, 1.0).run(page, look, lost.append)

    assert (filled, lost) == ([2], [why]), "it waits with the third round, once"
    assert str(why).endswith(": its rank 0 has copied 0 rounds: it is gone")
    assert page.filled == len(part.steps) > 3, "it goes on, because others send to it"


def test_a_server_rank_that_does_not_copy_is_given_up_before_the_calls_of_other_servers_end():
    made, plan = alone(SMALL)
    part = ProxyPart(plan, 0, {(0, 0): 0}, parameters_of(made.trainer[0]), ProxyBuffers(torch.device("cpu")), "plan")
    why = ProxyRunner(part, 0, None, deadline_s=0.08).run(page_of_counts(), lambda: None, lambda why: None)
    assert str(why).endswith("not done within 0.02 s")


def test_buffers_are_made_again_only_if_they_have_to_be_larger():
    buffers = ProxyBuffers(torch.device("cpu"))
    first = buffers.of_sizes((5, 0))
    assert [part.numel() for part in first] == [5, 5]
    assert buffers.of_sizes((3, 5)) is first
    assert [part.numel() for part in buffers.of_sizes((0, 7))] == [7, 7]


def test_a_wait_for_the_other_process_ends_by_count_reason_or_deadline():
    page = page_of_counts()
    assert wait_for(lambda: page.copied, 0, lambda: "never called", 1.0) is None
    assert wait_for(lambda: page.copied, 1, lambda: "the server is gone", 1.0) == "the server is gone"
    assert wait_for(lambda: page.copied, 1, lambda: None, 0.01) == "not done within 0.01 s"
    page.filled = 3
    assert (page.filled, page.copied) == (3, 0)


def test_stripes_of_a_round_without_messages_are_waited_for_on_a_gpu(monkeypatch):
    """With NCCL wait() of a Work only makes the device wait, and returns at once."""
    part = SimpleNamespace(on_device=True, proxies={})
    step = ProxyStep("round 0 of phase 0", None, Round(0, "round 0 of phase 0", 0, stripe=torch.zeros(1)))
    runner, aborted = ProxyRunner(part, 0, "group", 0.01), []
    monkeypatch.setattr(proxies, "abort", aborted.append)
    stripes = SimpleNamespace(wait=lambda: None, is_completed=lambda: False, exception=lambda: None)
    page = HandoverPage(torch.zeros(PAGE_BYTES, dtype=torch.uint8))
    with pytest.raises(WorkerError, match=r"round 0 of phase 0 .*not done within 0\.03 s"):
        runner._end(_Flight(step, [stripes], None), page)
    assert (page.filled, aborted) == (0, ["group"])


def test_a_server_rank_whose_error_has_no_text_has_failed_too(monkeypatch):
    shards, model, store = load_module("megarl_shards"), Model(0), dist.HashStore()
    header = {"store": ["here", 1], "prefix": "run", "server": 0, "rank": 0, "version": "1", "cell": 0}
    header |= {"program": "p", "proxied": True, "timeout_s": 1.0, "hashed": False}
    store.set("run/update", "1")
    described = SimpleNamespace(check=lambda _: None, zeros=[], parameters=list(model.parameters()))
    monkeypatch.setitem(shards._STORES, ("here", 1), store)
    monkeypatch.setitem(shards._DESCRIBED, model, described)
    monkeypatch.setattr(shards, "_connect", lambda _: store)
    monkeypatch.setattr(shards, "_handed_over", lambda *_: ([], "page"))

    def fail(*_) -> None:
        raise MemoryError

    monkeypatch.setattr(shards.handover, "copy_rounds", fail)
    with pytest.raises(shards.exchange.RoundFailed, match="MemoryError"):
        shards.receive(model, [(json.dumps(header), torch.empty(0))])
    assert store.get("run/1/dead/0") == b"rank 0 of server 0: MemoryError"
    assert not store.check(["run/1/done/0/0"])
