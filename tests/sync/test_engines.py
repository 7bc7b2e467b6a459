"""Weights to embedded engines in processes of their own: bit for bit by every transport, and what goes wrong."""

import contextlib
import functools
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from megarl.config.sync import SyncConfig
from megarl.sync.messages import MessageClient
from megarl.sync.receiver import UpdateStep
from megarl.system.errors import ServerError, WorkerError
from tests.dist import fresh_parallel, run_distributed, single_process, world
from tests.forked import fork_relays
from tests.models.tiny import build_tiny, save_tiny

KEY = "a key of the test"
TRANSPORTS = ("tensor", "distributed", "disk", "delta")


def save_shallow(folder: Path, model: str) -> None:
    """A model of two layers, which stages can divide."""
    save_tiny(folder, model, num_hidden_layers=2)


def wait_for(*paths: Path) -> None:
    end = time.monotonic() + 240
    while not all(path.exists() for path in paths):
        assert time.monotonic() < end, f"none of {paths}"
        time.sleep(0.05)


def generate(chunks, version: int) -> list[list]:
    import dataclasses

    from tests.rollout.cases import engine, make_requests, sampled

    made = engine(chunks)
    made.weight_version = version
    found = made.generate(make_requests(3, 2), sampled(max_new_tokens=6), [2])
    return [[dataclasses.asdict(completion) for completion in group] for group in found]


def be_an_engine(folder: str, spool: str, layout: dict) -> dict:
    """One rank: takes weights until the trainer is done, then generates with them, and with those of the export."""
    from megarl.rollout.embedded.inbox import WeightInbox

    fresh_parallel(**layout)
    chunks, place, group = build_tiny(folder, **layout), Path(spool), world()
    with torch.no_grad():
        for parameter in chunks[0].parameters():
            parameter.fill_(7.0)
    inbox = WeightInbox(chunks, KEY, group)
    (place / f"{group.rank}.tmp").write_text(str(inbox.address[1]))
    (place / f"{group.rank}.tmp").rename(place / f"port{group.rank}")
    wait_for(place / "done")
    with inbox.generating(10.0) as version:
        there = generate(chunks, version)
    expected = build_tiny(place / "expected", **layout)
    pairs = zip(chunks[0].named_parameters(), expected[0].parameters(), strict=True)
    differ = [name for (name, mine), theirs in pairs if not torch.equal(mine, theirs)]
    here = generate(expected, version)
    inbox.close()
    return {"version": version, "differ": differ, "same": there == here, "samples": there}


def be_the_trainer(folder: str, spool: str, layout: dict, ranks: int, transports: list[str]) -> list:
    """Two versions by each transport, each with other values in one of 50 elements; then an export."""
    from megarl.models.weights.export import export_weights
    from megarl.rollout.embedded.receiver import EngineReceivers
    from megarl.sync.updater import WeightSync

    fresh_parallel(**layout)
    chunks, place, found = build_tiny(folder, **layout), Path(spool), []
    hf = chunks[0].hf_config
    addresses = [("127.0.0.1", int((place / f"port{rank}").read_text())) for rank in range(ranks)]
    for number, transport in enumerate(transports):
        config = SyncConfig(transport=transport, verify="every", timeout_s=60.0, bucket_mb=5)
        receivers = EngineReceivers.connect([addresses], KEY, hf, 60.0)
        sync = WeightSync(chunks, receivers, config, place, world())
        for step in range(2):
            with torch.no_grad():
                for chunk in chunks:
                    for parameter in chunk.parameters():
                        parameter.view(-1)[2 * number + step :: 50] += 0.125
            report = sync.push(10 * number + step)
            assert report.failed == {}, report
            found.append([transport, report.updated, report.verified, report.nbytes])
        sync.close()
    export_weights(chunks, place / "expected", hf, world=world())
    if world().rank == 0:
        (place / "done").touch()
    return found


@pytest.mark.procs
@pytest.mark.parametrize(
    ("model", "trainer", "engine", "transports"),
    [
        pytest.param("qwen3", (2, {"tp": 2}), (1, {}), TRANSPORTS, marks=pytest.mark.campaign("teams")),
        ("qwen3", (1, {}), (2, {"tp": 2}), ("tensor", "delta")),
        ("qwen3_moe", (2, {"pp": 2}), (2, {"ep": 2}), TRANSPORTS),
    ],
    ids=["tp2 to tp1", "tp1 to tp2", "pp2 to ep2"],
)
def test_an_engine_holds_and_samples_what_the_trainer_has(tmp_path, model, trainer, engine, transports):
    """By every transport where several ranks send, and by the two that go through shared memory where one does."""
    save_shallow(tmp_path / "model", model)
    (tmp_path / "spool").mkdir()
    run = str(tmp_path / "model"), str(tmp_path / "spool")
    done: list = []

    def engines() -> None:
        done.extend(run_distributed(be_an_engine, engine[0], 280, *run, engine[1]))

    beside = threading.Thread(target=engines, daemon=True)
    beside.start()
    wait_for(
        *(tmp_path / "spool" / f"port{rank}" for rank in range(engine[0]))
    )  # ranks are started one group at a time
    for reports in run_distributed(be_the_trainer, trainer[0], 280, *run, trainer[1], engine[0], transports):
        assert [(name, updated) for name, updated, *_ in reports] == [(t, [0]) for t in transports for _ in range(2)]
        verified = {parts for _, _, parts, _ in reports}
        assert len(verified) == 1
        assert verified.pop() > 0
        whole, changes = (nbytes for transport, _, _, nbytes in reports if transport == "delta")
        assert changes < whole / 20
    beside.join(280)
    assert len(done) == engine[0]
    for rank in done:
        assert (rank["version"], rank["differ"], rank["same"]) == (10 * len(transports) - 9, [], True)
        assert rank["samples"] == done[0]["samples"]


@contextlib.contextmanager
def engines_here(folder: Path, count: int, save: Callable = save_shallow, kind: str = "qwen3") -> Iterator[tuple]:
    """Trainer and engines in this process: chunks, the engines' inboxes, and the receivers."""
    from megarl.rollout.embedded.inbox import WeightInbox
    from megarl.rollout.embedded.receiver import EngineReceivers

    single_process()
    save(folder / "model", kind)
    chunks = build_tiny(folder / "model")
    inboxes = [WeightInbox(build_tiny(folder / "model"), KEY, world()) for _ in range(count)]
    receivers = EngineReceivers.connect([[inbox.address] for inbox in inboxes], KEY, chunks[0].hf_config, 30.0)
    try:
        yield chunks, inboxes, receivers
    finally:
        receivers.close()
        for inbox in inboxes:
            inbox.close()


def hold_whole(inbox, version: str) -> None:
    """As after an update."""
    inbox._missing.clear()
    inbox.set_version(version)


def test_an_engine_holds_the_numbers_that_fp8_stands_for(tmp_path):
    from megarl.models.weights.export import iter_on_all_ranks
    from megarl.models.weights.receive import WeightWriter
    from megarl.sync.plan import is_sent_as_fp8
    from megarl.sync.source import dequantize_blocks, quantize_blocks
    from megarl.sync.updater import WeightSync

    with engines_here(tmp_path, 1) as (chunks, (inbox,), receivers):
        config = SyncConfig(transport="tensor", timeout_s=30.0, bucket_mb=5, fp8=True)
        sync = WeightSync(chunks, receivers, config, tmp_path, world())
        assert sync.push(1).failed == {}
        sync.close()
        rounded, quantised = WeightWriter(chunks), []
        for name, weight in [*iter_on_all_ranks(chunks, world(), torch.device("cpu"))]:
            if weight.dim() == 2 and is_sent_as_fp8(name):
                rounded.write(name, dequantize_blocks(*quantize_blocks(weight.clone())))
                quantised.append(name)
        assert len(quantised) == 7 * len(chunks[0].decoder.layers), "projections of attention and MLP"
        held = dict(inbox._writer.parts())
        assert all(torch.equal(held[name], part) for name, part in rounded.parts())


def test_an_engine_that_fails_stays_paused_until_a_whole_update(tmp_path, monkeypatch):
    from megarl.sync.updater import WeightSync

    with engines_here(tmp_path, 2) as (chunks, inboxes, receivers):
        config = SyncConfig(transport="tensor", timeout_s=30.0, bucket_mb=5)
        sync = WeightSync(chunks, receivers, config, tmp_path, world())
        with monkeypatch.context() as patch:

            def broken(name: str, tensor: torch.Tensor) -> None:
                raise RuntimeError("no memory left")

            patch.setattr(inboxes[1]._writer, "write", broken)
            report = sync.push(1)
        where = f"engine 1 at tcp://127.0.0.1:{inboxes[1].address[1]}"
        assert report.updated == [0]
        assert report.failed == {1: f"{where}: bucket: rank 0: RuntimeError: no memory left"}
        with inboxes[0].generating(1.0) as version:
            assert version == 1
        with pytest.raises(WorkerError, match=r"limit: 0\.1 s\): rank 0 of .* is paused and holds no complete weights"):
            inboxes[1].generating(0.1).__enter__()
        assert sync.catch_up().updated == []  # it gets no updates until somebody says that it is back
        receivers.retry(1)
        assert sync.catch_up().updated == [1]
        with inboxes[1].generating(1.0) as version:
            assert version == 1
        sync.close()


def test_weights_wait_for_the_end_of_a_generation(tmp_path, monkeypatch):
    with engines_here(tmp_path, 1) as (_, (inbox,), receivers):
        (receiver,), pause = receivers.all, inbox.pause
        step = UpdateStep("update to version 1", 60.0)
        monkeypatch.setattr(inbox, "pause", lambda deadline_s: pause(min(deadline_s, 0.2)))
        hold_whole(inbox, "0@run")
        receiver.resume(step)
        refused = pytest.raises(ServerError, match=r"engine 0 .*rank 0: the engine is still generating")
        with inbox.generating(1.0), refused:
            receiver.pause("retract", step)
        receiver.pause("retract", step)
        with pytest.raises(WorkerError, match="holds weights 0@run"):
            inbox.generating(0.1).__enter__()


def test_a_generation_waits_for_the_version_that_it_wants(tmp_path):
    with engines_here(tmp_path, 1) as (_, (inbox,), _):
        hold_whole(inbox, "3@run")
        inbox.resume()
        refused = r"weights of version 4 \(limit: 0\.1 s\): rank 0 of .* is not paused and holds weights 3@run"
        with pytest.raises(WorkerError, match=refused):
            inbox.generating(0.1, version=4).__enter__()

        def update() -> None:
            inbox.pause(5.0)
            hold_whole(inbox, "4@run")
            inbox.resume()

        threading.Timer(0.3, update).start()
        with inbox.generating(30.0, version=4) as version:
            assert version == 4
            assert inbox.version == "4@run"


def test_a_version_that_is_past_is_not_waited_for(tmp_path):
    with engines_here(tmp_path, 1) as (_, (inbox,), _):
        hold_whole(inbox, "5@run")
        inbox.resume()
        start = time.monotonic()
        with pytest.raises(WorkerError, match=r"did not receive weights of version 4 .* holds weights 5@run"):
            inbox.generating(60.0, version=4).__enter__()
        assert time.monotonic() - start < 30
        inbox.pause(1.0)  # nothing is left running


def test_an_engine_says_what_it_cannot_take(tmp_path):
    from megarl.sync.plan import Entry
    from megarl.sync.shared import handle_of, shared_buffer

    with engines_here(tmp_path, 1) as (_, (inbox,), receivers):
        (receiver,) = receivers.all
        step, flat = UpdateStep("bucket", 30.0), shared_buffer(64, torch.device("cpu"))

        def take(name: str, dtype: str, shape: tuple[int, ...]) -> str:
            with pytest.raises(ServerError) as error:
                receiver.take_shared([handle_of(flat)], [[Entry(name, shape, dtype, 0, 64, name)]], None, step)
            return error.value.reason

        assert take("model.norm.weight", "bfloat16", (32,)) == "rank 0: tensors were sent outside of the open update"
        receiver.begin(step)
        assert "but the model needs (64,)" in take("model.norm.weight", "bfloat16", (32,))
        assert "the model has no tensor 'other.weight'" in take("other.weight", "bfloat16", (32,))
        assert "FP8 values came without their scales: model.norm.weight" in take(
            "model.norm.weight", "float8_e4m3fn", (64,)
        )
        with pytest.raises(ServerError, match=r"rank 0: the update lacks \d+ tensors, for example lm_head\.weight"):
            receiver.set_version("1@run", step)
        with pytest.raises(OSError):
            MessageClient(inbox.address, "another key", 60.0, "engine")


def test_what_was_half_written_has_no_name_and_must_come_whole(tmp_path):
    from megarl.sync.plan import Entry
    from megarl.sync.shared import handle_of, shared_buffer

    with engines_here(tmp_path, 1) as (_, (inbox,), receivers):
        (receiver,) = receivers.all
        step, flat = UpdateStep("update", 30.0), shared_buffer(256, torch.device("cpu"))
        hold_whole(inbox, "3@run")
        receiver.begin(step)
        assert receiver.held_version(step) == "3@run"  # what changes are added to
        receiver.take_shared(
            [handle_of(flat)], [[Entry("model.norm.weight", (64,), "float32", 0, 256, "")]], None, step
        )
        with pytest.raises(ServerError, match="the engine holds no complete weights"):
            receiver.resume(step)
        with pytest.raises(WorkerError, match="holds no complete weights"):
            inbox.generating(0.1).__enter__()
        receiver.begin(step)  # another trainer, or the same one again
        assert receiver.held_version(step) == ""
        with pytest.raises(ServerError, match="the update lacks"):
            receiver.set_version("4@run", step)


def test_a_bucket_that_comes_after_its_update_is_refused(tmp_path, monkeypatch):
    from megarl.sync.plan import Entry
    from megarl.sync.shared import handle_of, shared_buffer

    with engines_here(tmp_path, 1) as (_, (inbox,), receivers):
        (receiver,) = receivers.all
        step, flat = UpdateStep("update", 30.0), shared_buffer(256, torch.device("cpu"))
        take, arrived, go = inbox.take_flat, threading.Event(), threading.Event()

        def late(*arguments) -> None:
            arrived.set()
            assert go.wait(30.0)
            take(*arguments)

        monkeypatch.setattr(inbox, "take_flat", late)
        entries = [[Entry("model.norm.weight", (64,), "float32", 0, 256, "")]]
        errors: list[str] = []

        def send() -> None:
            with pytest.raises(ServerError) as error:
                receiver.take_shared([handle_of(flat)], entries, None, step)
            errors.append(error.value.reason)

        receiver.begin(step)
        sender = threading.Thread(target=send)
        sender.start()
        assert arrived.wait(30.0)
        inbox.begin()  # the next update, of a trainer that does not wait for the sender
        go.set()
        sender.join(30.0)
        assert errors == ["rank 0: tensors were sent outside of the open update"]
        assert "model.norm.weight" in str(sorted(inbox._missing))


def push_to(folder: str, port: int, version: int, dies: bool) -> list[int]:
    """A trainer that brings a version over a broadcast, or is killed in the middle of a bucket of it."""
    import os
    import signal

    from megarl.rollout.embedded.receiver import EngineReceivers
    from megarl.sync.transports import distributed
    from megarl.sync.updater import WeightSync

    fresh_parallel()
    chunks = build_tiny(folder)
    receivers = EngineReceivers.connect([[("127.0.0.1", port)]], KEY, chunks[0].hf_config, 30.0)
    config = SyncConfig(transport="distributed", timeout_s=30.0, bucket_mb=5)
    sync = WeightSync(chunks, receivers, config, Path(folder), world())

    def dying(*args) -> None:
        time.sleep(0.5)  # the engine has been told of the broadcast then, and waits in it
        os.kill(os.getpid(), signal.SIGKILL)

    if dies:
        distributed.broadcast_within = dying
    return sync.push(version).updated


@pytest.mark.procs
def test_a_trainer_that_is_killed_in_a_broadcast_holds_nothing_up(tmp_path):
    with engines_here(tmp_path, 1) as (_, (inbox,), _):
        hold_whole(inbox, "1@run")
        inbox.resume()
        trainer = functools.partial(run_distributed, push_to, 1, 120, str(tmp_path / "model"), inbox.address[1])
        with pytest.raises(AssertionError, match="-9"):
            trainer(2, True)
        with pytest.raises(WorkerError, match="is paused and holds weights 1@run"):
            inbox.generating(0.1).__enter__()  # nothing was written, and who began the update should end it
        assert trainer(3, False) == [[0]]
        with inbox.generating(1.0) as version:
            assert version == 3


class GroupOfTwo:
    """The first of two ranks, whose partner is gone."""

    rank, size, name, deadline_s = 0, 2, "the engine", 1.0

    def broadcast_json(self, value):
        raise WorkerError("a partner is gone")


def test_a_generation_that_cannot_begin_leaves_nothing_running(tmp_path):
    with engines_here(tmp_path, 1) as (_, (inbox,), _):
        hold_whole(inbox, "0@run")
        inbox.resume()
        group, inbox._group = inbox._group, GroupOfTwo()
        with pytest.raises(WorkerError, match="a partner is gone"):
            inbox.generating(1.0).__enter__()
        inbox._group = group
        inbox.pause(1.0)


def take_turns(folder: str, deadline_s: float) -> list:
    """Two ranks of an engine; the trainer brings weights to the second one late, and then never."""
    import torch.distributed as dist

    from megarl.rollout.embedded.inbox import WeightInbox
    from megarl.system.comm import WorkerGroup

    fresh_parallel(tp=2)
    chunks, both = build_tiny(folder, tp=2), WorkerGroup("the engine", dist.group.WORLD, deadline_s)
    inbox, found = WeightInbox(chunks, KEY, both), []
    hold_whole(inbox, "5@run")
    if both.rank == 1:
        threading.Timer(0.3, inbox.resume).start()
    else:
        inbox.resume()
    with inbox.generating(10.0, version=5) as version:
        found.append(version)
    with pytest.raises(WorkerError) as past:
        inbox.generating(10.0, version=4).__enter__()
    inbox.pause(1.0)
    with pytest.raises(WorkerError) as error:
        inbox.generating(0.2).__enter__()
    inbox.close()
    return [*found, str(error.value), str(past.value)]


@pytest.mark.procs
def test_ranks_of_an_engine_begin_together_or_not_at_all(tmp_path):
    save_shallow(tmp_path, "qwen3")
    first, second = run_distributed(take_turns, 2, 120, str(tmp_path), 20.0)
    assert first == second
    assert first[0] == 5
    assert "(limit: 0.2 s): rank 0 of the engine is paused and holds weights 5@run" in first[1]
    assert first[2].startswith("the engines did not receive weights of version 4 (limit: 10 s)")


def send_frozen(folder: str) -> None:
    from megarl.models.weight_table import WeightTable
    from megarl.sync.updater import WeightSync
    from tests.models.vlm_tiny import save

    fork_relays()
    for transport in ("delta", "tensor"):  # a relay is forked only before shared memory is in use
        here = Path(folder) / transport
        here.mkdir()
        with engines_here(here, 1, save, "qwen3_vl") as (chunks, (inbox,), receivers):
            config = SyncConfig(transport=transport, verify="every", timeout_s=30.0, bucket_mb=5)
            sync = WeightSync(chunks, receivers, config, here, world(), ["tower", "language_model"])
            frozen, came = WeightTable.of(chunks[0].hf_config).names_of(["tower", "language_model"]), list[str]()
            for op in ("write", "write_elements"):
                write = getattr(inbox._writer, op)
                setattr(inbox._writer, op, lambda n, *a, write=write, came=came: (came.append(n), write(n, *a))[1])
            for version in range(3):
                came.clear()
                with torch.no_grad():
                    for name, parameter in chunks[0].named_parameters():
                        if ".merger." in name:
                            parameter.add_(0.5)
                if version == 2:
                    inbox.set_version("another trainer's")
                assert sync.push(version).updated == [0]
                assert frozen.intersection(came) == (set() if version == 1 else frozen)
            sync.close()


@pytest.mark.procs
def test_frozen_tensors_are_sent_once(tmp_path):
    """To an engine that holds them: one that holds something else gets everything again."""
    run_distributed(send_frozen, 1, 120, str(tmp_path))
