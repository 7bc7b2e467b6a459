"""How a model's layers are divided over pipeline chunks."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megarl.config.model import ParallelConfig, split_layers


@given(st.integers(1, 16), st.integers(0, 100))
def test_chunks_differ_by_one_layer_and_the_ends_have_the_fewest(chunks: int, extra: int) -> None:
    layers = chunks + extra
    counts = split_layers(layers, chunks)
    assert sum(counts) == layers
    assert max(counts) - min(counts) <= 1
    assert counts[-1] == min(counts)
    assert counts[0] == min(counts) or set(counts[:-1]) == {max(counts)}


@pytest.mark.parametrize(
    ("layers", "sizes", "stages"),
    [
        (94, {"pp": 16}, [5, *[6] * 14, 5]),
        (61, {"pp": 16, "first_stage_layers": 4, "last_stage_layers": 1}, [4, *[4] * 14, 1]),
        (61, {"pp": 8, "last_stage_layers": 5}, [*[8] * 7, 5]),
        (9, {"pp": 2, "vpp": 2, "last_stage_layers": 1}, [5, 4]),
    ],
)
def test_layers_of_known_models_are_divided(layers: int, sizes: dict[str, int], stages: list[int]) -> None:
    assert ParallelConfig(**sizes).stage_layers(layers) == stages
    assert ParallelConfig(**sizes).most_layers(layers) == max(stages)
