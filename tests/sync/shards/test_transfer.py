"""Weights from the ranks of a trainer to the ranks of servers, between processes over gloo."""

from __future__ import annotations

import dataclasses
import json
import socket
import threading
import time
from concurrent.futures import Future
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

from megarl.sync.receiver import ShardMeeting, ShardUpdate, UpdateStep
from megarl.sync.sender import SyncReport
from megarl.sync.shards import exchange
from megarl.sync.shards.exchange import RoundFailed, ServerCell, join
from megarl.system.errors import ServerError
from megarl.system.store import SharedStore
from tests.dist import run_distributed, world
from tests.sync.test_loader import SHAPES, Model, load_module, tensors

RANKS = 2  # of a server


def wait_for(path: Path) -> None:
    end = time.monotonic() + 120
    while not path.exists():
        assert time.monotonic() < end, path
        time.sleep(0.01)


def write(path: Path, values) -> None:
    path.with_suffix(".tmp").write_text(json.dumps(values))
    path.with_suffix(".tmp").rename(path)


class SpoolReceiver:
    """A server whose ranks take calls from files."""

    ranks = RANKS

    def __init__(self, number: int, spool: Path) -> None:
        self.number, self.spool, self.name, self.url = number, spool, f"server {number}", f"http://127.0.0.1:{number}"
        self.layout, self.calls = SimpleNamespace(ranks=self.ranks), 0

    def describe_storage(self, meeting: ShardMeeting, step: UpdateStep) -> None:
        self._call("describe", dataclasses.asdict(meeting), step)

    def take_shards(self, update: ShardUpdate, step: UpdateStep) -> None:
        header = dataclasses.asdict(update)
        self._call("receive", header.pop("meeting") | header, step)

    def _call(self, loader: str, header: dict, step: UpdateStep) -> None:
        names = [f"{self.number}.{rank}.{self.calls}" for rank in range(self.ranks)]
        self.calls += 1
        for rank, name in enumerate(names):
            write(self.spool / f"{name}.call", [loader, header | {"rank": rank}])
        for name in names:
            wait_for(self.spool / f"{name}.answer")
            if why := json.loads((self.spool / f"{name}.answer").read_text()):
                raise ServerError(self.name, self.url, step.phase, why, status=200)


def be_a_server_rank(spool: str, per_machine: int) -> dict[str, list[float]]:
    """Take calls until the trainer is done; the parameters then, and whether none has moved.

    `per_machine`: servers on each pretended machine, none of which is the trainer's; all have one host name.
    """
    server, rank = divmod(world().rank, RANKS)
    shards, model, calls = load_module("megarl_shards"), Model(rank), 0
    shards.machine._BOOT_ID = boot = Path(spool) / f"{world().rank}.boot"
    boot.write_text(f"boot {server // per_machine}\n")
    before = [parameter.data_ptr() for parameter in model.parameters()]
    write(Path(spool) / f"{world().rank}.up", None)
    while True:
        call = Path(spool) / f"{server}.{rank}.{calls}.call"
        while not call.exists():
            if (Path(spool) / "stop").exists():
                assert before == [parameter.data_ptr() for parameter in model.parameters()]
                return {name: p.float().flatten().tolist() for name, p in model.named_parameters()}
            time.sleep(0.01)
        loader, header = json.loads(call.read_text())
        why = None
        try:
            getattr(shards, loader)(model, [(json.dumps(header), torch.empty(0, dtype=torch.uint8))])
        except Exception as error:
            why = f"{type(error).__name__}: {error}"
        write(call.with_suffix(".answer"), why)
        calls += 1


def own_shards(rank: int, ranks: int, held: dict[str, torch.Tensor]):
    """What trainer rank `rank` knows: even ranks have the first half of the rows of each tensor, odd ones the other."""
    from megarl.sync.shards.boxes import (
        BoxTable,
        GpuPlace,
        ParameterTable,
        RankStorage,
        TensorTable,
        padded_shape,
        row_major,
    )
    from megarl.sync.shards.transfer import OwnShards

    shapes = np.array([padded_shape(shape) for shape in SHAPES.values()])
    half = shapes[:, 0] // 2
    storages = []
    for part in (0, 1):
        lo, hi, size = np.zeros_like(shapes), shapes.copy(), shapes.copy()
        lo[:, 0], hi[:, 0] = (half, shapes[:, 0]) if part else (0 * half, half)
        size[:, 0] = hi[:, 0] - lo[:, 0]
        count = np.arange(len(shapes))
        boxes = BoxTable(count, lo, hi, count, 0 * count, row_major(size), 0 * count)
        storages.append(
            RankStorage(ParameterTable(np.array([*SHAPES]), size, np.array(["bfloat16"] * len(count))), boxes)
        )
    at = {name: storages[rank % 2].boxes.lo[row, 0] for row, name in enumerate(SHAPES)}
    to = {name: storages[rank % 2].boxes.hi[row, 0] for row, name in enumerate(SHAPES)}
    table = TensorTable(np.array([*SHAPES]), shapes, np.array(["bfloat16"] * len(SHAPES)))
    parameters = {name: tensor[at[name] : to[name]].clone() for name, tensor in held.items()}
    places = [GpuPlace("here", number) for number in range(ranks)]
    return OwnShards(parameters, [storages[number % 2] for number in range(ranks)], places, table, [*SHAPES.values()])


def be_the_trainer(spool: str, servers: int, per_machine: int, nbytes: int) -> list:
    """Two versions to all servers, then a third to the first of them only."""
    from megarl.sync.shards.transfer import ShardTransfer
    from megarl.sync.transports.shards import planner

    place, group = Path(spool), world()
    own = own_shards(group.rank, group.size, tensors(0))
    transfer = ShardTransfer(own, planner(nbytes), group, "run", 60.0)
    receivers = [SpoolReceiver(number, place) for number in range(servers)]
    led = range(servers) if group.rank == 0 else ()
    found = []
    for version in (1, 2, 3):
        for name, tensor in own_shards(group.rank, group.size, tensors(version)).parameters.items():
            own.parameters[name].copy_(tensor)
        report = SyncReport(version, "shards")
        transfer.run(receivers[: 1 if version == 3 else servers], led, report, range(version - 1))
        found.append([report.failed, report.nbytes, report.verified])
        if version == 2:
            machines = {machine for each in transfer._described.values() for machine in each.machines}
            assert len(machines) == servers // per_machine
            assert all(machine.startswith(f"{socket.gethostname()}-") for machine in machines)
            old = [*transfer._written]
            transfer.drop(receivers[-1].url)  # as after a failure
    ranks = [(server, rank) for server in range(servers) for rank in range(RANKS)]
    kinds = [(version, kind) for version in (1, 2) for kind in ("ready", "beat", "hashes", "done")]
    old += [f"run/{version}/{kind}/{server}/{rank}" for version, kind in kinds for server, rank in ranks]
    assert [key for key in old if transfer.store.check([key])] == [], "the store must not grow"
    group.barrier()
    if group.rank == 0:
        (place / "stop").touch()
    transfer.close()
    return found


def expected(version: int, rank: int) -> dict[str, list[float]]:
    model = Model(rank)
    model.load_weights(tensors(version).items())
    return {name: p.float().flatten().tolist() for name, p in model.named_parameters()}


@pytest.mark.procs
@pytest.mark.parametrize(
    ("trainers", "servers", "per_machine", "nbytes"),
    [
        (2, 2, 2, 512),
        pytest.param(2, 2, 1, 512, marks=pytest.mark.campaign("teams")),
        pytest.param(4, 4, 2, 256, marks=pytest.mark.campaign("teams")),
    ],
)
def test_every_rank_of_every_server_gets_its_boxes(tmp_path, trainers, servers, per_machine, nbytes):
    held: list = []

    def be_servers() -> None:
        held.extend(run_distributed(be_a_server_rank, servers * RANKS, 120, str(tmp_path), per_machine))

    beside = threading.Thread(target=be_servers, daemon=True)
    beside.start()
    for rank in range(servers * RANKS):  # ranks are started one group at a time
        wait_for(tmp_path / f"{rank}.up")
    reports = run_distributed(be_the_trainer, trainers, 120, str(tmp_path), servers, per_machine, nbytes)
    beside.join(120)
    assert all(failed == {} for report in reports for failed, *_ in report)
    parameters = len(list(Model(0).parameters()))  # all of each rank of the first server in the second and third update
    assert [[verified for *_, verified in report] for report in reports] == [
        [0, RANKS * parameters, RANKS * parameters] if rank == 0 else [0, 0, 0] for rank in range(trainers)
    ]
    first, second, alone = (sum(report[place][1] for report in reports) for place in range(3))
    assert alone < 3 * sum(tensor.nbytes for tensor in tensors(0).values())  # some elements twice, and alignment
    # a machine gets each box once, whether one or several of its servers store it; stripes have more alignment
    assert first == second < 1.3 * alone * servers / per_machine
    for number, parameters in enumerate(held):
        assert parameters == expected(3 if number < RANKS else 2, number % RANKS), number


def test_a_rank_that_was_stopped_across_an_update_does_not_wait_for_deleted_keys():
    shards, model = load_module("megarl_shards"), Model(0)
    shards._DESCRIBED[model] = shards._Described([], [], [], [])
    store = dist.HashStore()
    store.set_timeout(timedelta(seconds=1))
    store.set("run/update", "2")
    shards._STORES["127.0.0.1", 1] = store
    header = {"store": ["127.0.0.1", 1], "prefix": "run", "server": 0, "rank": 0, "timeout_s": 60.0, "version": "1"}
    header |= {"program": "p", "cell": 0, "group": ServerCell("cell", (0,), {0: 1}).to_json(), "backend": "gloo"}
    with pytest.raises(shards.exchange.RoundFailed, match="the trainer has ended update 1 without this rank"):
        shards.receive(model, [(json.dumps(header | {"hashed": False, "proxied": False}), torch.empty(0))])


def test_joining_a_group_ends_when_another_of_its_ranks_is_given_up():
    store = dist.TCPStore("127.0.0.1", 0, None, True, timedelta(seconds=20), wait_for_workers=False)
    looks = iter([None, "rank 1 is gone"])
    start = time.monotonic()
    with pytest.raises(RoundFailed, match="joining cell: rank 1 is gone"):
        join(store, "cell", 2, 0, "gloo", 20.0, lambda: next(looks))
    assert time.monotonic() - start < 10, "it must not wait for the deadline of 20 s"


def test_a_group_that_is_complete_after_its_cell_was_given_up_is_aborted(monkeypatch):
    given_up, aborted, group = threading.Event(), threading.Event(), object()

    def join_late(*_: Any) -> object:
        assert given_up.wait(10)
        return group

    monkeypatch.setattr(exchange, "_join", join_late)
    monkeypatch.setattr(exchange, "abort", lambda late: aborted.set() if late is group else None)
    with pytest.raises(RoundFailed, match="joining cell: rank 1 is gone"):
        join(dist.HashStore(), "cell", 2, 0, "gloo", 20.0, lambda: "rank 1 is gone")
    given_up.set()
    assert aborted.wait(10)


def test_an_error_of_time_in_a_join_is_raised_and_not_taken_for_a_join_that_is_still_waiting(monkeypatch):
    def time_out(*_: Any) -> object:
        raise TimeoutError("connection timed out")

    monkeypatch.setattr(exchange, "_join", time_out)
    looks = iter([None] * 10)
    with pytest.raises(TimeoutError, match="connection timed out"):
        join(dist.HashStore(), "cell", 2, 0, "gloo", 20.0, lambda: next(looks))


def test_connecting_ends_when_another_rank_is_given_up_before_it_writes_the_id_of_nccl(monkeypatch):
    waiting, connected = threading.Event(), threading.Event()

    class Group:
        """A rank's group of nccl, whose first operation waits for the id that rank 0 writes to the store."""

        def __init__(self, size: int, rank: int, ranks: list, backend: Any, store: dist.Store, **_: Any) -> None:
            self.store = store

        def _get_backend(self, _: torch.device) -> Any:
            return SimpleNamespace(eager_connect_single_device=self._wait)

        def _wait(self, _: torch.device) -> None:
            waiting.set()
            self.store.get("id")
            connected.set()

    def look() -> str | None:
        assert waiting.wait(10)
        return store.get("dead").decode() if store.check(["dead"]) else None

    monkeypatch.setattr(exchange, "_new_process_group_helper", lambda *args, **named: (Group(*args, **named), None))
    monkeypatch.setattr(exchange, "_world", SimpleNamespace(pg_group_ranks={}))
    store = dist.TCPStore("127.0.0.1", 0, None, True, timedelta(seconds=10), wait_for_workers=False)
    store.set("dead", "rank 0 is gone")
    group = join(store, "cell", 2, 1, "nccl", 10.0, look)
    start = time.monotonic()
    with pytest.raises(RoundFailed, match="connecting the ranks of a group: rank 0 is gone"):
        exchange.connect(group, [], torch.device("cpu"), 10.0, look)
    assert time.monotonic() - start < 5, "it must not wait for the store's deadline of 10 s"
    store.set("cell/id", "1")
    assert connected.wait(10), "the thread that waits must end before the store does"


class CountedStore:
    """A store that counts its messages. No receiver is ready in it, and all send heartbeats."""

    def __init__(self) -> None:
        self.messages = 0

    def check(self, keys: list[str]) -> bool:
        self.messages += 1
        return False

    def get_all(self, keys: list[str]) -> list[bytes]:
        self.messages += 1
        return [str(self.messages).encode()] * len(keys)


@pytest.mark.parametrize(("trainers", "most"), [(1, 1000), (1024, 2 * 20_000)])
def test_trainer_ranks_together_load_the_store_with_a_bounded_number_of_messages(monkeypatch, trainers, most):
    from megarl.sync.shards import transfer

    clock, store = [100.0], CountedStore()

    def sleep(seconds: float) -> None:
        clock[0] += seconds

    monkeypatch.setattr(transfer, "time", SimpleNamespace(monotonic=lambda: clock[0], sleep=sleep))
    cells = {0: ServerCell("cell", (0,), dict.fromkeys(range(16), 8))}
    watch = transfer.CellWatch(store, "run/1", cells, [f"server {n}" for n in range(16)], trainers)  # type: ignore[arg-type]
    assert "not ready within 100 s: rank 0 of server 0, rank 1 of server 0, " in str(
        watch.wait_ready(0, clock[0] + 100.0, 100.0)
    )
    waiting, store.messages = store.messages - 16 * 8, 0  # the last messages find out which ranks are missing
    assert waiting / 100.0 * trainers <= 1.01 * most  # the first check is at once
    for _ in range(400):  # in rounds that do not end
        assert watch.look(0) is None
        sleep(0.01)
    assert store.messages / 4.0 <= 2 * 4, "two messages a look, four times a second"


def test_receivers_that_do_not_answer_have_one_deadline_together(monkeypatch):
    from megarl.sync.shards import transfer

    clock = [100.0]
    monkeypatch.setattr(transfer, "time", SimpleNamespace(monotonic=lambda: clock[0]))

    class Unanswered(Future):
        def exception(self, timeout: float | None = None) -> BaseException | None:
            clock[0] += timeout or 0.0
            raise TimeoutError

    cells = {number: ServerCell(f"cell {number}", (0,), {number: 1}) for number in range(4)}
    watch = transfer.CellWatch(SharedStore(dist.HashStore(), "trainer rank 0", "3 s"), "run/1", cells, [""] * 4, 1)
    for number in cells:
        watch.begin(number, 1)
    sending: Any = transfer.ShardTransfer.__new__(transfer.ShardTransfer)
    sending.timeout_s, sending._last = 3.0, []
    receivers = [
        SimpleNamespace(number=n, name=f"server {n}", url="", layout=SimpleNamespace(ranks=1)) for n in range(4)
    ]
    plan, report = SimpleNamespace(cell_of=[0, 1, 2, 3], name="p"), SyncReport(1, "shards")
    sending._end(plan, watch, receivers, {n: Unanswered() for n in range(4)}, {}, report)
    assert 3.0 <= clock[0] - 100.0 < 3.5
    assert [report.failed[n] for n in range(4)] == [
        f"server {n}: update from shard to shard: no answer within 3 s" for n in range(4)
    ]
    assert "run/1/done/3/0" in sending._last
