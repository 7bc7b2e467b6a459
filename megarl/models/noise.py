"""Counter-based noise: a number depends only on a seed, a token number and a vocabulary id, not on what else is
sampled.

A sampled token is the winner of an exponential race: with independent E_v ~ Exp(1), argmax_v(z_v - log E_v) has the
distribution softmax(z) (the Gumbel-max trick).
"""

from __future__ import annotations

import torch
from torch import Tensor

#: How many random numbers are computed at a time on a CPU, so that they stay in its cache.
_CACHED = 1 << 17


def _signed(value: int, bits: int) -> int:
    """Return the signed reading (two's complement) of an unsigned constant, as torch's integer types need it."""
    return value - (1 << bits) if value >> (bits - 1) else value


def _mix64(x: Tensor) -> Tensor:
    """Apply splitmix64's finaliser to int64 (Steele et al. 2014); masks turn arithmetic shifts into logical ones."""
    x = (x ^ ((x >> 30) & ((1 << 34) - 1))) * _signed(0xBF58476D1CE4E5B9, 64)
    x = (x ^ ((x >> 27) & ((1 << 37) - 1))) * _signed(0x94D049BB133111EB, 64)
    return x ^ ((x >> 31) & ((1 << 33) - 1))


def _mix32_(x: Tensor, scratch: Tensor) -> Tensor:
    """Hash int32 numbers in place with C. Wellons' lowbias32; `scratch`, of the same shape, is overwritten."""
    x ^= torch.bitwise_right_shift(x, 16, out=scratch).bitwise_and_(0xFFFF)
    x *= _signed(0x7FEB352D, 32)
    x ^= torch.bitwise_right_shift(x, 15, out=scratch).bitwise_and_(0x1FFFF)
    x *= _signed(0x846CA68B, 32)
    x ^= torch.bitwise_right_shift(x, 16, out=scratch).bitwise_and_(0xFFFF)
    return x


def uniforms(seeds: Tensor, index: Tensor, vocab_ids: Tensor) -> Tensor:
    """Return uniform numbers in (0, 1) that depend only on (seed, token number, vocabulary id).

    Args:
        seeds: int64 [n].
        index: int64 [n], number of the token within its sample.
        vocab_ids: int64 [V].

    Returns:
        float32 [n, V]. Small values, which decide which token is sampled, keep full relative precision.
    """
    key = _mix64(_mix64(seeds + _signed(0x9E3779B97F4A7C15, 64)) + index)
    low, high = key.to(torch.int32)[:, None], (key >> 32).to(torch.int32)[:, None]
    counter = (vocab_ids * _signed(0x9E3779B9, 32)).to(torch.int32)
    bits = counter ^ low
    scratch = torch.empty_like(bits)
    _mix32_(_mix32_(bits, scratch).add_(high), scratch).bitwise_and_(0x7FFFFFFF)
    return bits.to(torch.float32).add_(0.5).mul_(2.0**-31).clamp_(max=1.0 - 2.0**-24)


def exponential_noise(seeds: Tensor, index: Tensor, vocab_ids: Tensor) -> Tensor:
    """Return log E, float32 [n, V], with E exponential: the token with the largest logit - log E is sampled.

    Args:
        seeds: int64 [n].
        index: int64 [n], number of the token within its sample.
        vocab_ids: int64 [V].
    """
    noise = seeds.new_empty(len(seeds), vocab_ids.shape[-1], dtype=torch.float32)
    # on a CPU, compute a few rows at a time, so that they stay in its cache
    rows = max(1, _CACHED // noise.shape[1]) if noise.is_cpu and noise.numel() else max(1, len(noise))
    for begin in range(0, len(noise), rows):
        part = slice(begin, begin + rows)
        ids = vocab_ids if vocab_ids.ndim == 1 else vocab_ids[part]
        noise[part] = uniforms(seeds[part], index[part], ids).neg_().log1p_().neg_().log_()
    return noise
