"""Norm and rotation of heads while decoding are those of training, to the bit."""

import pytest
import torch
import torch.nn.functional as F

from megarl.models.layers.attention.decoding import HeadNorm
from megarl.models.layers.passes import RopeTables
from megarl.models.rope import apply_rope

EPS = 1e-6


@pytest.mark.parametrize("turned", [16, 8])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_heads_are_normed_and_rotated_as_in_training(dtype, turned):
    tokens, groups, per, size = 37, 2, 3, 16
    g = torch.Generator().manual_seed(0)
    qkv = torch.randn(tokens, groups, per + 2, size, generator=g).to(dtype)
    weights = torch.randn(2, size, generator=g).to(dtype)
    angles = torch.rand(tokens, turned // 2, generator=g)
    cos, sin = angles.cos().to(dtype), angles.sin().to(dtype)
    q, k, v = HeadNorm(weights, EPS).split(qkv, RopeTables(cos, sin))
    heads = (qkv[:, :, :-2].reshape(tokens, -1, size), weights[0], q), (qkv[:, :, -2], weights[1], k)
    for raw, weight, found in heads:  # models.norm.RMSNorm on a GPU, then layers.attention
        expected = apply_rope(F.rms_norm(raw, (size,), weight, EPS), cos, sin)
        assert torch.equal(found.reshape(expected.shape), expected)
    assert torch.equal(v, qkv[:, :, -1])
