"""Device memory that servers map: how often it is shared, with a double of torch's call."""

from __future__ import annotations

import base64
import inspect
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.multiprocessing import reductions

from megarl.models.weight_table import WeightTable
from megarl.rollout.sglang.layout import ServerLayout
from megarl.sync import shared
from megarl.sync.plan import SLAB_BYTES, holdings, make_plan
from megarl.sync.receiver import SharedUse
from megarl.sync.sender import BucketSender, SyncReport
from megarl.sync.source import Source
from megarl.sync.transports.tensor import TensorTransport
from megarl.system.comm import WorkerGroup
from tests.sync.layouts import HERE, config, ranks_of, trainer


class OnDevice(torch.Tensor):
    """Says that it is on a GPU."""

    is_cuda = True  # type: ignore[assignment]


class Taking:
    """A receiver of two ranks that keeps what it was handed."""

    version = None

    def __init__(self, number: int) -> None:
        self.number, self.layout = number, ServerLayout.of(config("qwen3"), tp=2)
        self.handles: list[shared.Handle] = []

    def take_shared(self, handles: list[shared.Handle], entries: Any, use: SharedUse, step: Any) -> None:
        self.handles += handles


@pytest.fixture
def shares(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Addresses of the storages that torch has wrapped in a counted handle."""
    calls: list[int] = []

    def reduce_tensor(tensor: torch.Tensor) -> tuple[Any, tuple[Any, ...]]:
        calls.append(tensor.untyped_storage().data_ptr())
        number = len(calls)
        place = (type(tensor), tensor.size(), tensor.stride(), tensor.storage_offset(), None, tensor.dtype, 0)
        of_call = (b"memory%d" % number, tensor.untyped_storage().nbytes(), 512, False, b"counter", number, b"e", True)
        return reductions.rebuild_cuda_tensor, (*place, *of_call)

    monkeypatch.setattr(reductions, "reduce_tensor", reduce_tensor)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: type("GPU", (), {"uuid": "GPU-1"}))
    return calls


def test_each_buffer_is_shared_once_however_often_it_is_handed_over(shares, monkeypatch):
    hf = config("qwen3", vocab_size=4000)
    ranks = trainer()
    plan = make_plan(holdings(WeightTable.of(hf), ranks), ranks_of(ranks), [HERE] * 2, bucket_bytes=SLAB_BYTES + 20_000)
    regions = [
        (name, region) for name, tensor in holdings(WeightTable.of(hf), ranks).items() for region, _ in tensor.regions
    ]
    held = {(name, region): torch.zeros([stop - start for start, stop in region]) for name, region in regions}
    transport = TensorTransport(plan, torch.device("cpu"), 5.0)
    monkeypatch.setattr(
        transport, "buffer", lambda nbytes: torch.empty(nbytes, dtype=torch.uint8).as_subclass(OnDevice)
    )
    ended = SimpleNamespace(synchronize=lambda: None)  # a CPU build of torch has no streams
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: SimpleNamespace(record_event=lambda: ended))
    sender = BucketSender(Source(held, plan, WorkerGroup.alone(), torch.bfloat16), transport)
    taking = [Taking(0), Taking(1)]
    for version in range(3):
        transport.start(version, [])
        sender.run([0], taking, SyncReport(version, "tensor"))  # type: ignore[arg-type]
    buckets = plan.routes[0].senders[0]
    assert len(buckets) > 4
    assert len(shares) == len(set(shares)) == 2
    for receiver in taking:
        assert [h["length"] for h in receiver.handles] == [b.nbytes for b in buckets for _ in range(2)] * 3
        assert {h["handle"] for h in receiver.handles} == {
            base64.b64encode(one).decode() for one in (b"memory1", b"memory2")
        }


def test_a_new_buffer_at_an_old_address_is_shared_again(shares):
    memory = torch.empty(8, dtype=torch.uint8)
    for expected in (1, 2):
        buffer = torch.frombuffer(memory.numpy(), dtype=torch.uint8).as_subclass(OnDevice)
        shared.handle_of(buffer)
        shared.handle_of(buffer[:3])
        del buffer
        assert len(shares) == expected


def test_a_handle_becomes_the_arguments_of_torchs_function(shares):
    handle = shared.handle_of(torch.empty(8, dtype=torch.uint8).as_subclass(OnDevice)[2:6])
    names = list(inspect.signature(reductions.rebuild_cuda_tensor).parameters)
    found = dict(zip(names, shared.cuda_arguments(handle), strict=True))
    assert found["tensor_size"] == torch.Size((4,))
    assert found["tensor_offset"] == 2
    assert (found["storage_device"], found["storage_handle"]) == ("GPU-1", b"memory1")
    assert (found["storage_size_bytes"], found["storage_offset_bytes"]) == (8, 512)
    assert (found["ref_counter_handle"], found["ref_counter_offset"]) == (b"counter", 1)
    assert (found["event_handle"], found["event_sync_required"]) == (b"e", False)
