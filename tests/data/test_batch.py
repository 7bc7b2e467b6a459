"""Batch and Jagged: every rearrangement keeps every bit of every sample."""

import json
import time

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given

from megarl.data.batch import Batch, Jagged
from tests.same import same

DTYPES = [torch.float32, torch.bfloat16, torch.float64, torch.int64, torch.int32, torch.uint8, torch.bool]
json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(st.characters(), max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=6,
)


def tensor(generator: torch.Generator, shape: list[int], dtype: torch.dtype) -> torch.Tensor:
    values = torch.randint(-5, 6, shape, generator=generator)
    if dtype.is_floating_point:
        return torch.where(values == 5, torch.nan, torch.where(values == -5, torch.inf, values)).to(dtype)
    return values.abs().to(dtype)


@st.composite
def batches(draw, size=None, names=("j", "wide", "flag", "score", "matrix", "uid", "row")) -> Batch:
    size = draw(st.integers(0, 6)) if size is None else size
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    lengths = draw(st.lists(st.integers(0, 4), min_size=size, max_size=size))
    total = sum(lengths)
    fields = {
        "j": Jagged.from_lengths(tensor(generator, [total], draw(st.sampled_from(DTYPES))), lengths),
        "wide": Jagged.from_lengths(tensor(generator, [total, 3], torch.float32), lengths),
        "flag": Jagged.from_lengths(tensor(generator, [total], torch.bool), lengths),
        "score": tensor(generator, [size], draw(st.sampled_from(DTYPES))),
        "matrix": tensor(generator, [size, 2, 3], torch.bfloat16),
    }
    columns = {name: draw(st.lists(json_values, min_size=size, max_size=size)) for name in ("uid", "row")}
    return Batch({k: v for k, v in fields.items() if k in names}, {k: v for k, v in columns.items() if k in names})


def sample(batch: Batch, i: int) -> dict:
    """Sample i, read by plain slicing: the oracle of all rearrangements."""
    out = {}
    for name in batch.names():
        value = batch[name]
        out[name] = (
            value.values[int(value.offsets[i]) : int(value.offsets[i + 1])] if isinstance(value, Jagged) else value[i]
        )
    return {k: (str(v.dtype), repr(v.tolist())) if isinstance(v, torch.Tensor) else repr(v) for k, v in out.items()}


def samples(batch: Batch) -> list[dict]:
    return [sample(batch, i) for i in range(len(batch))]


@given(batches())
def test_bytes_give_back_the_same_batch(batch):
    assert same(Batch.from_bytes(batch.to_bytes()), batch)


@given(batches(), st.data())
def test_parts_of_a_split_join_to_the_whole(batch, data):
    cuts = sorted(data.draw(st.lists(st.integers(0, len(batch)), max_size=3)))
    sizes = [b - a for a, b in zip([0, *cuts], [*cuts, len(batch)], strict=True)]
    parts = batch.split(sizes)
    assert [len(part) for part in parts] == sizes
    assert same(Batch.concat(parts), batch)


@given(batches(), st.data())
def test_select_takes_exactly_the_samples_named(batch, data):
    index = data.draw(st.lists(st.integers(0, len(batch) - 1), max_size=8)) if len(batch) else []
    everything = samples(batch)
    picked = batch.select(torch.tensor(index, dtype=torch.int64))
    assert samples(picked) == [everything[i] for i in index]
    assert same(batch.select(index), picked)


@given(batches())
def test_a_mask_selects_its_true_places(batch):
    mask = torch.arange(len(batch)) % 2 == 1
    assert samples(batch.select(mask)) == samples(batch)[1::2]


@given(batches(), st.integers(0, 3))
def test_repeat_puts_copies_in_a_row(batch, n):
    assert samples(batch.repeat(n)) == [one for one in samples(batch) for _ in range(n)]


@given(batches())
def test_split_and_shuffled_concat_survive_bytes_of_views(batch):
    # Views share memory and start in the middle of it; the wire must carry only what belongs to the part.
    parts = [Batch.from_bytes(part.to_bytes()) for part in batch.split([1] * len(batch))]
    if parts:
        assert same(Batch.concat(parts), batch)
        assert samples(Batch.concat(parts[::-1])) == samples(batch)[::-1]


@given(st.lists(st.lists(st.integers(0, 9), max_size=4), max_size=5))
def test_jagged_unbinds_to_the_rows_it_was_made_of(rows):
    jagged = Jagged.from_list(rows, dtype=torch.int64)
    assert [row.tolist() for row in jagged.unbind()] == rows
    assert jagged.lengths.tolist() == [len(row) for row in rows]


def test_jagged_from_tensors_keeps_dtype_and_inner_shape():
    jagged = Jagged.from_list([torch.ones(2, 3, dtype=torch.bfloat16), torch.zeros(0, 3, dtype=torch.bfloat16)])
    assert jagged.values.shape == (2, 3)
    assert jagged.dtype == torch.bfloat16


@pytest.mark.parametrize("offsets", [[0, 1], [1, 3], [0, 2, 1, 3], []])
def test_jagged_refuses_offsets_that_do_not_fit(offsets):
    with pytest.raises(ValueError, match="offsets"):
        Jagged(torch.zeros(3), torch.tensor(offsets, dtype=torch.int64))


def test_set_replaces_a_field_by_a_column_and_back():
    batch = Batch({"x": torch.zeros(2)})
    batch.set("x", ["a", "b"])
    assert batch["x"] == ["a", "b"]
    batch.set("x", torch.ones(2))
    assert batch.names() == ["x"]
    assert batch["x"].tolist() == [1, 1]


def test_set_on_a_copy_leaves_the_original_alone():
    batch = Batch({"x": torch.zeros(2)}, {"uid": ["a", "b"]})
    other = batch.copy()
    other.set("y", torch.ones(2))
    other["uid"][0] = "changed"
    assert batch.names() == ["x", "uid"]
    assert batch["uid"] == ["a", "b"]


def test_drop_keeps_the_size_of_a_batch_with_nothing_left():
    assert len(Batch({"x": torch.zeros(3)}).drop(["x", "not there"])) == 3


def test_an_absent_name_is_told_with_what_is_there():
    with pytest.raises(KeyError, match=r"no 'prompt_id'; it has prompt_ids, uid; did you mean 'prompt_ids'"):
        Batch({"prompt_ids": torch.zeros(1)}, {"uid": ["a"]})["prompt_id"]


@pytest.mark.parametrize(
    ("other", "message"),
    [
        (Batch({"x": torch.zeros(1), "z": torch.zeros(1)}), r"only in 0: \[\], only in 1: \['z'\]"),
        (Batch({"x": torch.zeros(1, dtype=torch.int64)}), "'x' is tensor float32 .* and tensor int64"),
        (Batch({"x": Jagged.from_list([[1.0]])}), "'x' is tensor float32 .* and jagged float32"),
        (Batch({"x": torch.zeros(1, 2)}), r"tensor float32 \[\*, 2\]"),
        (Batch({}, {"x": [1]}), "'x' is tensor .* and column"),
    ],
)
def test_concat_refuses_batches_that_differ(other, message):
    with pytest.raises(ValueError, match=message):
        Batch.concat([Batch({"x": torch.zeros(1)}), other])


def test_concat_of_nothing_is_refused():
    with pytest.raises(ValueError, match="an empty list of batches"):
        Batch.concat([])


@pytest.mark.parametrize("value", [torch.zeros(3), ["a"], torch.tensor(1.0), ("a", "b")])
def test_set_refuses_what_does_not_fit(value):
    with pytest.raises(ValueError, match="'y'"):
        Batch({"x": torch.zeros(2)}).set("y", value)


@pytest.mark.parametrize("index", [[3], [-1], torch.tensor([True]), torch.zeros(1, 1, dtype=torch.int64)])
def test_select_refuses_places_that_are_not_there(index):
    with pytest.raises(IndexError):
        Batch({"x": torch.zeros(3)}).select(index)


@pytest.mark.parametrize("sizes", [[1], [2, 2], [4, -1]])
def test_split_refuses_sizes_that_do_not_add_up(sizes):
    with pytest.raises(ValueError, match="add up"):
        Batch({"x": torch.zeros(3)}).split(sizes)


@pytest.mark.parametrize("value", [(1, 2), {1: "a"}, {"a": [{2: 3}]}, b"x", torch.zeros(1)])
def test_bytes_refuse_columns_that_json_would_change(value):
    with pytest.raises(ValueError, match="column 'c'"):
        Batch({}, {"c": [value]}).to_bytes()


def test_bytes_are_a_safetensors_file_with_one_copy_of_shared_offsets():
    tokens = Jagged.from_list([[1, 2], [3]])
    data = Batch({"ids": tokens, "mask": tokens.like(torch.ones(3, dtype=torch.bool))}).to_bytes()
    header = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
    assert sorted(header) == ["columns.json", "field.ids", "field.mask", "offsets.0"]


def test_gradients_do_not_travel():
    batch = Batch({"x": torch.ones(2, requires_grad=True) * 2})
    assert not Batch.from_bytes(batch.to_bytes())["x"].requires_grad


def test_ten_thousand_samples_take_no_copy_per_sample():
    lengths = torch.randint(0, 50, (10_000,))
    tokens = Jagged.from_lengths(torch.randint(0, 9, (int(lengths.sum()),)), lengths)
    batch = Batch({"ids": tokens, "logp": tokens.like(torch.randn(len(tokens.values)))}, {"uid": ["a"] * 10_000})
    start = time.process_time()
    Batch.from_bytes(batch.to_bytes()).select(torch.randperm(10_000)).split([5_000, 5_000])
    assert time.process_time() - start < 5.0  # a few hundredths; a copy of every sample for each takes minutes


def test_zero_samples_keep_names_and_dtypes():
    batch = Batch({"x": Jagged.from_list([[1]], dtype=torch.int32), "s": torch.zeros(1, 2)}, {"uid": ["a"]})
    none = Batch.from_bytes(batch.select([]).to_bytes())
    assert len(none) == 0
    assert (none["x"].dtype, none["s"].shape, none["uid"]) == (torch.int32, (0, 2), [])
    assert same(Batch.concat([none, batch, none]), batch)


def test_fields_over_the_same_tokens_go_on_sharing_offsets():
    tokens = Jagged.from_list([[1, 2], [3], []])
    batch = Batch({"ids": tokens, "logp": tokens.like(torch.randn(3)), "other": Jagged.from_list([[1], [], [2, 3]])})
    for moved in (batch.select([2, 0]), *batch.split([1, 2]), Batch.concat([batch, batch]), batch.repeat(2)):
        assert moved["ids"].offsets is moved["logp"].offsets
        assert moved["ids"].offsets is not moved["other"].offsets
