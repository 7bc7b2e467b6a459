"""Blocks that safetensors reads, written and read without it."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from safetensors.torch import load

from megarl.data import wire
from megarl.data.batch import Batch
from megarl.data.jagged import Jagged
from megarl.data.wire import Block, open_block, pack


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
    """Bytes from which on tensors are parts of their own: all of them, the larger ones as several, or none."""
    monkeypatch.setattr(wire, "_ALONE", request.param)
    monkeypatch.setattr(wire, "_WHOLE", 7)
    return int(request.param)


def test_a_large_tensor_goes_without_a_copy(alone: int) -> None:
    whole = batch()
    ((block, *_),) = whole.to_blocks([range(4)])
    address = whole["ids"].values.data_ptr()
    assert (address in {part.ctypes.data for part in block.parts}) is (alone == 0)
    assert len(block) == len(bytes(block)) == sum(map(len, block.parts))


def test_blocks_are_the_bytes_of_each_part_and_come_back_in_order(alone: int) -> None:
    whole = batch()
    parts = [[2, 0], [], [3, 1]]
    spans = list(whole.to_blocks(parts))
    assert [span.block.tobytes() for span in spans] == [whole.select(part).to_bytes() for part in parts]
    assert [(start, stop) for _, start, stop in spans] == [(0, 2), (0, 0), (0, 2)]
    assert same(Batch.from_blocks(spans), whole.select([2, 0, 3, 1]))


def test_parts_that_go_together_share_blocks_and_are_read_in_any_order(alone: int) -> None:
    whole = batch()
    parts = [[0], [1, 3], [], [2]]
    spans = list(whole.to_blocks(parts, [7, 8, 7, 7]))
    first, second, empty, last = spans
    assert first.block is empty.block is last.block
    assert [(start, stop) for _, start, stop in spans] == [(0, 1), (0, 2), (1, 1), (1, 2)]
    assert first.block.tobytes() == whole.select([0, 2]).to_bytes()
    assert second.block.tobytes() == whole.select([1, 3]).to_bytes()
    for order in ([0, 1, 2, 3], [3, 1, 0], [1, 1], [2], [0, 3]):
        wanted = [place for number in order for place in parts[number]]
        assert same(Batch.from_blocks([spans[number] for number in order]), whole.select(wanted))


def test_a_block_that_is_full_takes_no_more_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = [3 * 8 + 3 * 2, 0, 8 + 2, 2 * 8 + 2 * 2]  # of the jagged fields
    fixed = 1 + 6 + 8
    for most, blocks in ((1, 4), (sizes[0] + 2 * fixed, 2), (1 << 10, 1)):
        monkeypatch.setattr(wire, "_BLOCK_BYTES", most)
        spans = list(batch().to_blocks([[0], [1], [2], [3]], [0] * 4))
        assert len({span.block for span in spans}) == blocks
        assert same(Batch.from_blocks(spans), batch())


def test_a_batch_of_blocks_has_memory_of_its_own(alone: int) -> None:
    (span,) = batch().to_blocks([[0, 1, 2, 3]])
    for part in span.block.parts:
        part.setflags(write=False)
    made = Batch.from_blocks([span])
    before = made["ids"].values._version
    made["w"].zero_()
    assert made["ids"].values._version == before  # or a guard of stages would see a write to it
    assert same(Batch.from_blocks([span]), batch())


def test_a_dtype_without_a_code_is_named() -> None:
    with pytest.raises(ValueError, match=r"'z' is torch.complex64; allowed: torch.float64, "):
        Batch({"z": torch.zeros(2, dtype=torch.complex64)}).to_bytes()


@pytest.mark.parametrize(
    ("data", "story"),
    [
        (b"\xff" * 20, "the bytes are not a batch: 20 bytes cannot begin with a header of"),
        (b"", "the bytes are not a batch: 0 bytes cannot begin with a header of"),
        (Batch({"x": torch.zeros(100)}).to_bytes()[:-50], "a tensor of shape .* does not fit bytes"),
    ],
)
def test_what_is_cut_short_is_refused(data: bytes, story: str) -> None:
    with pytest.raises(ValueError, match=story):
        open_block(Block((np.frombuffer(data, dtype=np.uint8),)))


def test_parts_that_were_lost_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wire, "_ALONE", 0)
    block = pack((batch().fields, {}, 4))
    for parts in (block.parts[:-1], block.parts[:2] + block.parts[3:]):
        with pytest.raises(ValueError, match=r"a tensor of shape .* does not fit bytes"):
            open_block(Block(parts))
