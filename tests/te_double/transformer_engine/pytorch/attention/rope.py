"""Rotary position embedding from angles."""

import torch

from transformer_engine.pytorch.attention import _zigzag


def apply_rotary_pos_emb(
    t,
    freqs,
    tensor_format="sbhd",
    start_positions=None,
    interleaved=False,
    fused=False,
    cu_seqlens=None,
    cp_size=1,
    cp_rank=0,
):
    assert fused
    assert tensor_format == "thd"
    assert not interleaved
    assert start_positions is None
    assert freqs.dtype == torch.float32
    assert freqs.is_contiguous()
    assert freqs.shape[1:3] == (1, 1)
    lengths = cu_seqlens.diff().tolist()
    places = torch.cat([torch.arange(length) for length in lengths])
    mine = places[_zigzag(lengths, cp_size, cp_rank)] if cp_size > 1 else places
    angles = freqs[mine.to(freqs.device), :, 0]
    t, rest = t.tensor_split([angles.shape[-1]], -1)  # numbers of a head beyond the angles stay as they are
    first, second = t.float().chunk(2, -1)
    turned = (t * angles.cos() + torch.cat([-second, first], -1) * angles.sin()).to(t.dtype)
    return torch.cat([turned, rest], -1) if rest.shape[-1] else turned
