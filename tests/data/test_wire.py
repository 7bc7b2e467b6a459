"""Blocks that safetensors reads, written and read without it."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from safetensors.torch import load

from megarl.data import wire
from megarl.data.batch import Batch
from megarl.data.jagged import Jagged
from megarl.data.wire import Block, pack, unpack


def batch() -> Batch:
    ids = Jagged.from_list([[1, 2, 3], [], [4], [5, 6]], dtype=torch.int64)
    fields = {
        "odd": torch.tensor([True, False, True, True]),
        "ids": ids,
        "logp": ids.like(torch.arange(6, dtype=torch.bfloat16)),
        "pixels": torch.arange(24, dtype=torch.uint8).reshape(4, 2, 3),
        "none": torch.zeros(4, 0),
        "w": torch.tensor([0.1, float("nan"), 2.0, -0.0], dtype=torch.float64),
    }
    return Batch(fields, {"uid": ["a", "b", "a", "\ud83d"], "info": [{"k": [1, None]}, {}, None, 1.5]})


def bits(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes() if tensor.numel() else b""


def same(a: Batch, b: Batch) -> bool:
    def flat(one: Batch) -> dict[str, object]:
        jagged = {
            n: (bits(v.values), v.lengths.tolist(), v.dtype) for n, v in one.fields.items() if isinstance(v, Jagged)
        }
        dense = {n: (bits(v), v.shape, v.dtype) for n, v in one.fields.items() if isinstance(v, torch.Tensor)}
        return {**jagged, **dense, **one.columns}

    return flat(a) == flat(b)


def test_safetensors_reads_what_is_written() -> None:
    fields, columns, size = batch().fields, batch().columns, 4
    block = pack((fields, columns, size))
    tensors = load(block.tobytes())
    assert bits(tensors["field.w"]) == bits(fields["w"])
    assert torch.equal(tensors["field.logp"], fields["logp"].values)
    assert torch.equal(tensors["field.pixels"], fields["pixels"])
    assert [name for name in tensors if name.startswith("offsets.")] == ["offsets.0"]


@pytest.fixture(params=[0, 1 << 10])
def alone(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    """Bytes from which on tensors are parts of their own: all of them, or none."""
    monkeypatch.setattr(wire, "_ALONE", request.param)
    return int(request.param)


def test_what_is_read_is_a_view(alone: int) -> None:
    block = pack((batch().fields, {}, 4))
    fields, _, _ = unpack(block)
    values = [value.values if isinstance(value, Jagged) else value for value in fields.values()]
    places = [(part.ctypes.data, part.ctypes.data + len(part)) for part in block.parts]
    assert all(any(a <= value.data_ptr() < b for a, b in places) for value in values if value.numel())


def test_a_large_tensor_goes_without_a_copy(alone: int) -> None:
    whole = batch()
    (block,) = whole.to_blocks([range(4)])
    address = whole["ids"].values.data_ptr()
    assert (address in {part.ctypes.data for part in block.parts}) is (alone == 0)
    assert len(block) == len(bytes(block)) == sum(map(len, block.parts))


def test_blocks_are_the_bytes_of_each_part_and_come_back_in_order(alone: int) -> None:
    whole = batch()
    parts = [[2, 0], [], [3, 1]]
    blocks = list(whole.to_blocks(parts))
    assert [block.tobytes() for block in blocks] == [whole.select(part).to_bytes() for part in parts]
    assert same(Batch.from_blocks(blocks), whole.select([2, 0, 3, 1]))


def test_a_batch_of_blocks_has_memory_of_its_own(alone: int) -> None:
    (block,) = batch().to_blocks([[0, 1, 2, 3]])
    for part in block.parts:
        part.setflags(write=False)
    made = Batch.from_blocks([block])
    before = made["ids"].values._version
    made["w"].zero_()
    assert made["ids"].values._version == before  # or a guard of stages would see a write to it
    assert same(Batch.from_blocks([block]), batch())


def test_a_dtype_without_a_code_is_named() -> None:
    with pytest.raises(ValueError, match=r"'z' is torch.complex64; allowed: torch.float64, "):
        Batch({"z": torch.zeros(2, dtype=torch.complex64)}).to_bytes()


@pytest.mark.parametrize(
    ("data", "story"),
    [
        (b"\xff" * 20, "20 bytes are no batch"),
        (b"", "0 bytes are no batch"),
        (Batch({"x": torch.zeros(100)}).to_bytes()[:-50], "a tensor of shape .* cannot lie at bytes"),
    ],
)
def test_what_is_cut_short_is_refused(data: bytes, story: str) -> None:
    with pytest.raises(ValueError, match=story):
        unpack(Block((np.frombuffer(data, dtype=np.uint8),)))


def test_parts_that_were_lost_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wire, "_ALONE", 0)
    block = pack((batch().fields, {}, 4))
    for parts in (block.parts[:-1], block.parts[:2] + block.parts[3:]):
        with pytest.raises(ValueError, match=r"a tensor of shape .* cannot lie at bytes"):
            unpack(Block(parts))
