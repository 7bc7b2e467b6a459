"""Block FP8 against its definition, one block at a time in float64."""

import pytest
import torch

from megarl.sync.source import quantize_blocks


@pytest.mark.parametrize("shape", [(128, 128), (256, 384), (130, 257), (1, 5)])
def test_every_block_is_scaled_by_its_largest_element(shape):
    weight = torch.randn(shape, generator=torch.Generator().manual_seed(1)).mul(0.05).to(torch.bfloat16)
    values, scale = quantize_blocks(weight)
    assert values.dtype == torch.float8_e4m3fn
    assert scale.shape == (-(-shape[0] // 128), -(-shape[1] // 128))
    for i in range(scale.shape[0]):
        for j in range(scale.shape[1]):
            block = weight[128 * i : 128 * (i + 1), 128 * j : 128 * (j + 1)].double()
            expected = block.abs().max() / 448
            torch.testing.assert_close(scale[i, j].double(), expected, rtol=1e-7, atol=0)
            got = values[128 * i : 128 * (i + 1), 128 * j : 128 * (j + 1)].double() * scale[i, j].double()
            # e4m3 has 3 bits after the point: half a unit is 1/16 of the value, or 2**-10 of the scale near zero
            bound = torch.maximum(block.abs() / 16, scale[i, j].double() * 2.0**-10)
            assert ((got - block).abs() <= bound * 1.0001).all()


def test_zeros_stay_zeros():
    values, scale = quantize_blocks(torch.zeros(128, 130))
    assert values.float().abs().max() == 0
    assert scale.tolist() == [[1.0, 1.0]]
