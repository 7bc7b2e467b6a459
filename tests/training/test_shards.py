"""Tensor slices against brute force, and files of them."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megarl.training import shards
from megarl.training.host_memory import HostArena
from megarl.training.shards import CheckpointError, Snapshot
from megarl.training.tensor_slices import SlicePlace, TensorSlice, cut, overlap, slices_of

SHAPES = st.lists(st.integers(1, 5), min_size=0, max_size=4).map(tuple)


@given(SHAPES, st.data())
def test_a_range_of_a_flat_tensor_is_cut_into_few_boxes_in_order(shape, data):
    numel = math.prod(shape)
    start, end = sorted(data.draw(st.tuples(st.integers(0, numel), st.integers(0, numel))))
    whole = torch.arange(numel).view(shape)
    found = []
    for offset, size in cut(shape, start, end):
        part = whole[tuple(slice(a, a + n) for a, n in zip(offset, size, strict=True))]
        assert part.shape == size
        found += part.flatten().tolist()
    assert found == list(range(start, end))
    assert len(list(cut(shape, start, end))) <= max(2 * len(shape) - 1, 1)


@given(SHAPES.filter(len), st.data())
def test_overlaps_are_what_both_boxes_hold(shape, data):
    whole = torch.arange(math.prod(shape)).view(shape)

    def draw():
        low = [data.draw(st.integers(0, n - 1)) for n in shape]
        return tuple(low), tuple(data.draw(st.integers(1, n - a)) for a, n in zip(low, shape, strict=True))

    def of(part):
        return whole[tuple(slice(a, a + n) for a, n in zip(*part, strict=True))]

    one, two = draw(), draw()
    common = overlap(*one, *two)
    both = set(of(one).flatten().tolist()) & set(of(two).flatten().tolist())
    if common is None:
        assert not both
    else:
        assert torch.equal(of(one)[common[0]], of(two)[common[1]])
        assert set(of(one)[common[0]].flatten().tolist()) == both


@settings(deadline=None, max_examples=15)
@given(st.integers(1, 4), st.integers(1, 4))
def test_what_some_ranks_wrote_others_read(tmp_path_factory, writers, readers):
    folder = tmp_path_factory.mktemp("files")
    whole = torch.randn(3, 7, 5)
    place = SlicePlace("w", (3, 7, 5), (0, 0, 0), (3, 7, 5), 0, padded=False)
    bounds = [round(105 * n / writers) for n in range(writers + 1)]
    for n in range(writers):
        mine = whole.flatten()[bounds[n] : bounds[n + 1]]
        Snapshot(slices_of([place], mine, bounds[n]), {"step": 3}, HostArena()).write(
            folder / f"{n}.safetensors", lambda n: None
        )
    index = shards.read_index(folder, [f"{n}.safetensors" for n in range(writers)])
    assert shards.label_of(folder / "0.safetensors") == {"step": 3}
    for start in range(0, 105, -(-105 // readers)):
        found = torch.empty(min(-(-105 // readers), 105 - start))
        wanted = list(slices_of([place], found, start))
        assert shards.foreign(wanted, index) == []
        shards.fill(wanted, index, folder)
        assert torch.equal(found, whole.flatten()[start : start + len(found)])


def test_files_are_safetensors_of_mixed_dtypes(tmp_path):
    from safetensors.torch import load_file

    tensors = {"a": torch.randn(3).bfloat16(), "b": torch.randn(2, 2), "c": torch.tensor(5), "d": torch.ones(1).bool()}
    slices = [TensorSlice(key, tuple(t.shape), (0,) * t.dim(), t) for key, t in tensors.items()]
    size, _ = Snapshot(slices, {}, HostArena()).write(tmp_path / "x.safetensors", lambda n: None)
    assert (tmp_path / "x.safetensors").stat().st_size == size == Snapshot(slices, {}, HostArena()).nbytes
    found = load_file(tmp_path / "x.safetensors")
    assert {name.split("@")[0] for name in found} == set(tensors)
    assert all(torch.equal(tensor, tensors[name.split("@")[0]]) for name, tensor in found.items())


def test_elements_that_no_file_holds_are_an_error(tmp_path):
    half = TensorSlice("w", (4, 2), (0, 0), torch.ones(2, 2))
    Snapshot([half], {}, HostArena()).write(tmp_path / "x", lambda n: None)
    index = shards.read_index(tmp_path, ["x"])
    wanted = TensorSlice("w", (4, 2), (1, 0), torch.zeros(3, 2))
    with pytest.raises(CheckpointError, match="4 of 6 elements of w are missing from the files"):
        shards.fill([wanted], index, tmp_path)
    assert shards.foreign(
        [TensorSlice("w", (4, 3), (0, 0), torch.zeros(4, 3)), TensorSlice("v", (1,), (0,), torch.zeros(1))], index
    )[:2] == ["w has shape [4, 2], expected [4, 3]", "no v"]
