"""A server's rank describes its parameters as boxes of tensors: each element of a box is where loading puts it."""

import numpy as np
import pytest
import torch

from megarl.sync.shards.boxes import BoxRule, RankStorage, TensorTable, padded_shape
from megarl.sync.shards.links import check_tiling
from tests.sync.test_loader import HIDDEN, SHAPES, Latent, Model, load_module


@pytest.fixture(scope="module")
def shards():
    return load_module("megarl_shards")


def tables(shapes: dict[str, tuple[int, ...]], dtype: str = "float32") -> dict:
    padded = np.array([padded_shape(shape) for shape in shapes.values()])
    table = TensorTable(np.array([*shapes]), padded, np.array([dtype] * len(shapes)))
    return table.arrays("tensors") | {"tensors.sizes": np.array([",".join(map(str, s)) for s in shapes.values()])}


def assert_boxes_are_what_loading_does(model, storage: RankStorage, shapes: dict[str, tuple[int, ...]]) -> None:
    """Every tensor has other numbers; after loading, an element of a parameter has the number that its box says."""
    first, numbers = 1, {}
    for name, shape in shapes.items():
        numbers[name] = torch.arange(first, first + torch.Size(shape).numel(), dtype=torch.float32).view(shape)
        first += torch.Size(shape).numel()
    model.load_weights(numbers.items())
    parameters, names, boxes = dict(model.named_parameters()), list(shapes), storage.boxes
    for row in range(len(boxes)):
        whole = parameters[storage.parameters.names[boxes.parameter[row]]]
        size = (boxes.hi[row] - boxes.lo[row]).tolist()
        there = whole.data.as_strided(size, boxes.strides[row].tolist(), int(boxes.offset[row]))
        if boxes.rule[row] == BoxRule.ZERO:
            assert not there.any()
            continue
        name = names[boxes.tensor[row]]
        part = numbers[name].view(padded_shape(shapes[name]))
        for dim, (lo, hi) in enumerate(zip(boxes.lo[row].tolist(), boxes.hi[row].tolist(), strict=True)):
            part = part.narrow(dim, lo, hi - lo)
        assert torch.equal(part, there), name


@pytest.mark.parametrize("rank", [0, 1])
def test_each_element_of_a_box_is_where_loading_puts_it(shards, rank):
    model = Model(rank, torch.float32)
    described, arrays = shards.storage_of(model, tables(SHAPES))
    storage = RankStorage.of_arrays(arrays)
    check_tiling(storage, "the server")
    assert_boxes_are_what_loading_does(model, storage, SHAPES)
    assert sorted(described.names) == sorted(name for name, _ in model.named_parameters())
    assert [len(padding) for padding in described.zeros] == [3 * HIDDEN] * 2  # the ends of embedding and head


def test_joined_projections_are_boxes_too(shards):
    model, shapes = Latent(torch.float32), {"a": (2, HIDDEN), "b": (3, HIDDEN)}
    storage = RankStorage.of_arrays(shards.storage_of(model, tables(shapes))[1])
    check_tiling(storage, "the server")
    assert_boxes_are_what_loading_does(model, storage, shapes)


class Interleaving(torch.nn.Module):
    """Its rows come by turns from two tensors, or it has rows of no tensor."""

    def __init__(self, *, lacks: bool = False) -> None:
        super().__init__()
        self.rows = torch.nn.Parameter(torch.ones(6, 4), requires_grad=False)
        self.lacks = lacks

    def load_weights(self, weights) -> None:
        for name, tensor in weights:
            if not self.lacks:
                self.rows.data.view(3, 2, 4)[:, int(name)].copy_(tensor)
            elif name == "0":
                self.rows.data[:3].copy_(tensor)


def test_rows_that_come_by_turns_are_boxes_with_strides(shards):
    model, shapes = Interleaving(), {"0": (3, 4), "1": (3, 4)}
    storage = RankStorage.of_arrays(shards.storage_of(model, tables(shapes))[1])
    check_tiling(storage, "the server")
    assert_boxes_are_what_loading_does(model, storage, shapes)


def test_what_is_no_box_is_refused_by_name(shards):
    with pytest.raises(shards.CannotDescribe, match=r"parameter rows: a part of it belongs to no tensor"):
        shards.storage_of(Interleaving(lacks=True), tables({"0": (3, 4)}))
    with pytest.raises(shards.CannotDescribe, match=r"tensor padded: .*pad"):
        shards.storage_of(Model(0, torch.float32), tables({"padded": (HIDDEN, 11)}))


class Quantised(torch.nn.Module):
    """A layer of a server with FP8 weights, whose scales come with the weights."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(3, 4).to(torch.float8_e4m3fn), requires_grad=False)

    def load_weights(self, weights) -> None:
        for _, tensor in weights:
            self.weight.data.copy_(tensor)


def test_a_server_with_quantised_weights_is_refused_by_the_name_of_a_parameter(shards):
    with pytest.raises(shards.CannotDescribe, match=r"parameter weight is quantised \(torch\.float8_e4m3fn\), but"):
        shards.storage_of(Quantised(), tables({"0": (3, 4)}, "bfloat16"))


class Skipping(Interleaving):
    def load_weights(self, weights) -> None:
        for _, tensor in weights:
            self.rows.data.copy_(tensor[::2])


def test_every_second_row_is_no_box(shards):
    with pytest.raises(
        shards.CannotDescribe,
        match=r"tensor 0 in parameter rows: the model.s loading code copies a part that is not a box",
    ):
        shards.storage_of(Skipping(), tables({"0": (12, 4)}))
