"""Triton kernels of a decode step on a GPU, with the interface of the CPU kernels (`megarl.kernels.cpu.CpuKernels`).

    add_norm   adds to the residual stream and norms it
    attend     norms and rotates new heads, appends to the cache, attends to the positions of each row
    draw       samples one token per row from its logits, with its log-prob

Attention is bound by memory: it reads keys and values up to each row's own position, while a product over the cache
would read up to the longest row, rounded up to the captured graph's size. Rows are cut into chunks of positions, one
program each, and a second kernel joins their results, so that a few long rows also fill the GPU. The bits of a row's
context do not depend on other rows. `draw` reads a logit once (4 bytes) and computes its noise (some 40 integer
operations), where torch would write and read the noise a dozen times.

Sums are float32; results are rounded once, where training rounds: norm, rotation, context.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from megarl.kernels.layers_gpu import swiglu

#: Positions per program, positions read at once, warps, stages of the read pipeline.
ATTENTION = (512, 64, 4, 3)
WIDE_ATTENTION = (512, 32, 4, 2)  # for heads of over 256 bytes, so that reads in flight fit into shared memory
WIDEST_ATTENTION = (512, 32, 8, 2)  # for heads of over 512 bytes; 8 warps, so that no registers are spilled
#: Logits per program of `draw`, logits read at once, warps.
DRAWING = (8192, 1024, 4)
_LEAST = 16  # minimum number of rows of a matrix product in Triton; a product with fewer rows is padded


def add_norm(hidden: Tensor, delta: Tensor | None, weight: Tensor, eps: float) -> Tensor:
    """Compute hidden [n, h] += delta (when given), in place; return hidden / rms(hidden) * weight, on a GPU."""
    out = torch.empty_like(hidden)
    rows, width = hidden.shape
    block = triton.next_power_of_2(width)
    addend = hidden if delta is None else delta
    warps = min(16, max(1, block // 512))
    _add_norm[(rows,)](hidden, addend, weight, out, width, eps, block, delta is not None, num_warps=warps)
    return out


def silu_mul(gate_up: Tensor) -> Tensor:
    """Return silu(first half) * second half over the last dimension, [n, 2f] -> [n, f], rounded once, as in
    training."""
    return swiglu(gate_up)


def attend(
    qkv: Tensor,
    norm: Tensor | None,
    rope: tuple[Tensor, Tensor],
    keys: Tensor,
    values: Tensor,
    positions: Tensor,
    *,
    window: int | None,
    scale: float,
    eps: float,
    sinks: Tensor | None = None,
    launch: tuple[int, int, int, int] | None = None,
) -> Tensor:
    """Norm and rotate new heads, append keys and values to the cache, and attend: qkv [n, G, q + 2, D] -> [n, G * q *
    D].

    The arguments are those of `CpuKernels.attend`. A row with a negative position is idle: it writes and reads nothing
    and returns zeros. `launch`: a launch configuration like `ATTENTION`; None: chosen by head size and dtype.
    """
    n, groups, heads, size = qkv.shape
    per, length = heads - 2, keys.shape[2]
    block = max(_LEAST, triton.next_power_of_2(size))
    queries = qkv.new_empty(n, groups, per, size)
    weights = qkv if norm is None else norm
    _prepare[(n, groups * heads)](
        qkv, weights, *rope, keys, values, positions, queries, groups, per, size, rope[0].shape[1], length, eps, block,
        norm is not None, num_warps=1,
    )  # fmt: skip
    wide = size * qkv.element_size()
    chosen = ATTENTION if wide <= 256 else WIDE_ATTENTION if wide <= 512 else WIDEST_ATTENTION
    chunk, at_once, warps, stages = launch or chosen
    chunks = triton.cdiv(length, chunk)
    parts = qkv.new_empty(n, groups * per, chunks, size, dtype=torch.float32)
    peaks, sums = qkv.new_empty(2, n, groups * per, chunks, dtype=torch.float32)
    tile = max(_LEAST, triton.next_power_of_2(per))
    precision = "ieee" if qkv.dtype == torch.float32 else "tf32"
    _attend[(n, groups, chunks)](
        queries, keys, values, positions, parts, peaks, sums, groups, per, size, length, chunks, scale, window or 0,
        tile, block, chunk, at_once, precision, num_warps=warps, num_stages=stages,
    )  # fmt: skip
    out = qkv.new_empty(n, groups * per * size)
    _join[(n, groups * per)](
        parts, peaks, sums, positions, sums if sinks is None else sinks, out, groups * per, size, chunks, window or 0,
        block, chunk, sinks is not None, num_warps=1,
    )  # fmt: skip
    return out


def draw(
    logits: Tensor,
    seeds: Tensor,
    index: Tensor,
    *,
    start: int,
    inverse_temperature: float,
    greedy: bool,
    launch: tuple[int, int, int] = DRAWING,
) -> Tensor:
    """Sample from each part of the vocabulary: return its token with the largest logit plus noise
    (`megarl.models.noise`).

    Args:
        logits: float32 [n, V], over this rank's vocabulary.
        seeds, index: int64 [n], each sample's seed, and the number of the token within the sample.
        start: vocabulary id of the first column.
        inverse_temperature: factor of the logits.
        greedy: return the token with the largest logit, without noise.

    Returns:
        float64 [parts, n, 4]: the sampled token's score, vocabulary id and logit, and logsumexp of the part's logits,
            all after the factor. Float64 is exact for ids.
    """
    n, columns = logits.shape
    share, at_once, warps = launch
    parts = max(1, triton.cdiv(columns, share))  # all columns of a rank may be vocabulary padding
    out = logits.new_empty(parts, n, 4, dtype=torch.float64)
    _draw[(n, parts)](
        logits, seeds, index, out, columns, logits.stride(0), start, inverse_temperature, share, at_once,
        not greedy, num_warps=warps,
    )  # fmt: skip
    return out


@triton.jit
def _add_norm(  # type: ignore[no-untyped-def]  # no type hints: Triton reads annotations
    hidden, delta, weight, out, width, eps, BLOCK: tl.constexpr, ADD: tl.constexpr
):
    """Add and normalize one row."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = column < width
    x = tl.load(hidden + row * width + column, mask=inside, other=0.0).to(tl.float32)
    if ADD:
        x += tl.load(delta + row * width + column, mask=inside, other=0.0).to(tl.float32)
        rounded = x.to(hidden.dtype.element_ty)
        tl.store(hidden + row * width + column, rounded, mask=inside)
        x = rounded.to(tl.float32)
    inverse = 1.0 / tl.sqrt(tl.sum(x * x, 0) / width + eps)
    y = x * inverse * tl.load(weight + column, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + row * width + column, y.to(out.dtype.element_ty), mask=inside)


@triton.jit
def _prepare(  # type: ignore[no-untyped-def]
    qkv,
    norm,
    cos,
    sin,
    keys,
    values,
    positions,
    queries,
    groups,
    per,
    size,
    half,
    length,
    eps,
    BLOCK: tl.constexpr,
    NORM: tl.constexpr,
):
    """Prepare one head of a row for attention: norm and rotate a query head or the key of a group, and write the key or
    the value into the cache."""
    row = tl.program_id(0).to(tl.int64)
    group = tl.program_id(1) // (per + 2)
    head = tl.program_id(1) % (per + 2)
    at = tl.arange(0, BLOCK)
    inside = at < size
    source = qkv + ((row * groups + group) * (per + 2) + head) * size
    position = tl.load(positions + row)
    cached = ((row * groups + group) * length + position) * size
    stored = inside & (position >= 0)
    if head == per + 1:
        tl.store(values + cached + at, tl.load(source + at, mask=inside, other=0.0), mask=stored)
    else:
        first = at < half
        turns = at < 2 * half
        partner = tl.where(first, at + half, tl.where(turns, at - half, at))
        x = tl.load(source + at, mask=inside, other=0.0)
        y = tl.load(source + partner, mask=inside, other=0.0)
        if NORM:
            weight = norm + tl.where(head == per, size, 0)
            wide = x.to(tl.float32)
            inverse = 1.0 / tl.sqrt(tl.sum(wide * wide, 0) / size + eps)
            x = (wide * inverse * tl.load(weight + at, mask=inside, other=0.0).to(tl.float32)).to(x.dtype)
            scale_y = tl.load(weight + partner, mask=inside, other=0.0).to(tl.float32)
            y = (y.to(tl.float32) * inverse * scale_y).to(y.dtype)
        table = row * half + tl.where(first, at, at - half)
        c = tl.load(cos + table, mask=turns, other=1.0).to(tl.float32)
        s = tl.load(sin + table, mask=turns, other=0.0).to(tl.float32)
        turned = x.to(tl.float32) * c + y.to(tl.float32) * tl.where(first, -s, s)
        turned = turned.to(qkv.dtype.element_ty)
        if head == per:
            tl.store(keys + cached + at, turned, mask=stored)
        else:
            tl.store(queries + ((row * groups + group) * per + head) * size + at, turned, mask=inside)


# Stores a chunk's sum of weighted values (`parts`), largest score (`peaks`) and sum of exponentials (`sums`).
@triton.jit
def _attend(  # type: ignore[no-untyped-def]
    queries,
    keys,
    values,
    positions,
    parts,
    peaks,
    sums,
    groups,
    per,
    size,
    length,
    chunks,
    scale,
    window,
    TILE: tl.constexpr,
    SIZE: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Attend with the query heads of one key/value head to one chunk of a row's cached positions."""
    row = tl.program_id(0).to(tl.int64)
    group = tl.program_id(1)
    chunk = tl.program_id(2)
    last = tl.load(positions + row).to(tl.int32)
    begin = chunk * CHUNK
    oldest = tl.where(window > 0, tl.maximum(last - window + 1, 0), 0)
    if (begin <= last) & (begin + CHUNK > oldest):
        head = tl.arange(0, TILE)
        at = tl.arange(0, SIZE)
        heads = (head < per)[:, None] & (at < size)[None, :]
        first = (row * groups + group) * per
        q = tl.load(queries + (first + head)[:, None] * size + at[None, :], mask=heads, other=0.0)
        cache = (row * groups + group) * length
        peak = tl.full((TILE,), -float("inf"), tl.float32)
        total = tl.zeros((TILE,), tl.float32)
        context = tl.zeros((TILE, SIZE), tl.float32)
        end = tl.minimum(begin + CHUNK, last + 1)
        for start in range(begin, end, BLOCK):
            place = start + tl.arange(0, BLOCK)
            seen = (place < end) & (place >= oldest)
            inside = seen[:, None] & (at < size)[None, :]
            offsets = (cache + place)[:, None] * size + at[None, :]
            k = tl.load(keys + offsets, mask=inside, other=0.0)
            scores = tl.dot(q, tl.trans(k), input_precision=PRECISION) * scale
            scores = tl.where(seen[None, :], scores, -float("inf"))
            new = tl.maximum(peak, tl.max(scores, 1))
            shift = tl.where(new == -float("inf"), 0.0, new)  # avoids inf - inf while all scores are -inf
            weights = tl.exp(scores - shift[:, None])
            factor = tl.exp(peak - shift)
            total = total * factor + tl.sum(weights, 1)
            v = tl.load(values + offsets, mask=inside, other=0.0)
            context = context * factor[:, None] + tl.dot(weights.to(v.dtype), v, input_precision=PRECISION)
            peak = new
        place = (first + head) * chunks + chunk
        tl.store(parts + place[:, None] * size + at[None, :], context, mask=heads)
        tl.store(peaks + place, peak, mask=head < per)
        tl.store(sums + place, total, mask=head < per)


@triton.jit
def _join(  # type: ignore[no-untyped-def]
    parts,
    peaks,
    sums,
    positions,
    sinks,
    out,
    heads,
    size,
    chunks,
    window,
    SIZE: tl.constexpr,
    CHUNK: tl.constexpr,
    SINKS: tl.constexpr,
):
    """Combine the attention contexts of a head that were computed over chunks of the cached positions."""
    row = tl.program_id(0).to(tl.int64)
    place = row * heads + tl.program_id(1)
    at = tl.arange(0, SIZE)
    inside = at < size
    last = tl.load(positions + row).to(tl.int32)
    oldest = tl.where(window > 0, tl.maximum(last - window + 1, 0), 0)
    peak = tl.full((), -float("inf"), tl.float32)
    total = tl.zeros((), tl.float32)
    if SINKS:
        peak = tl.load(sinks + tl.program_id(1))
        total += 1.0
    context = tl.zeros((SIZE,), tl.float32)
    for chunk in range(oldest // CHUNK, (last + CHUNK) // CHUNK):
        chunk_peak = tl.load(peaks + place * chunks + chunk)
        new = tl.maximum(peak, chunk_peak)
        before = tl.exp(peak - new)
        factor = tl.exp(chunk_peak - new)
        total = total * before + tl.load(sums + place * chunks + chunk) * factor
        part = tl.load(parts + (place * chunks + chunk) * size + at, mask=inside, other=0.0)
        context = context * before + part * factor
        peak = new
    total = tl.where(last < 0, 1.0, total)
    tl.store(out + place * size + at, (context / total).to(out.dtype.element_ty), mask=inside)


@triton.jit
def _mix64(x):  # type: ignore[no-untyped-def]
    """Apply splitmix64's finaliser to uint64, as `megarl.models.noise._mix64` does to int64."""
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB
    return x ^ (x >> 31)


@triton.jit
def _mix32(x):  # type: ignore[no-untyped-def]
    """Apply lowbias32, a 32-bit finaliser, to uint32, as `megarl.models.noise._mix32_` does to int32."""
    x = (x ^ (x >> 16)) * 0x7FEB352D
    x = (x ^ (x >> 15)) * 0x846CA68B
    return x ^ (x >> 16)


@triton.jit
def _log_times(low, high, ids):  # type: ignore[no-untyped-def]
    """Return the noise log E (float32) of `megarl.models.noise.exponential_noise` for uint32 keys and ids."""
    counter = ids * 0x9E3779B9
    bits = _mix32(_mix32(counter ^ low) + high) & 0x7FFFFFFF
    u = (bits.to(tl.int32).to(tl.float32) + 0.5) * 4.656612873077393e-10  # times 2^-31: from 0 to 1
    u = tl.minimum(u, 1.0 - 5.960464477539063e-08)  # 1 - 2^-24, the largest float32 below 1: log(0) would be -inf
    series = u * (1.0 + u * (0.5 + u * (0.3333333333333333 + u * 0.25)))  # log near 1 would lose precision
    return tl.log(tl.where(u < 0.00390625, series, -tl.log(1.0 - u)))


@triton.jit
def _draw(  # type: ignore[no-untyped-def]
    logits,
    seeds,
    index,
    out,
    columns,
    stride,
    start,
    inverse_temperature,
    COLUMNS: tl.constexpr,
    BLOCK: tl.constexpr,
    RACE: tl.constexpr,
):
    """Draw a token from one part of a row of logits, block by block; each lane keeps its best candidate so far."""
    row = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    key = _mix64(_mix64(tl.load(seeds + row).to(tl.uint64) + 0x9E3779B97F4A7C15) + tl.load(index + row).to(tl.uint64))
    low = key.to(tl.uint32)
    high = (key >> 32).to(tl.uint32)
    lane = tl.arange(0, BLOCK)
    peak = tl.full((), -float("inf"), tl.float32)
    total = tl.zeros((), tl.float32)
    best = tl.full((BLOCK,), -float("inf"), tl.float32)
    winner = part * COLUMNS + lane
    logit = tl.full((BLOCK,), -float("inf"), tl.float32)
    for begin in range(part * COLUMNS, tl.minimum(part * COLUMNS + COLUMNS, columns), BLOCK):
        column = begin + lane
        x = tl.load(logits + row * stride + column, mask=column < columns, other=-float("inf")) * inverse_temperature
        new = tl.maximum(peak, tl.max(x, 0))
        shift = tl.where(new == -float("inf"), 0.0, new)  # avoids inf - inf while all logits are -inf
        total = total * tl.exp(peak - shift) + tl.sum(tl.exp(x - shift), 0)
        peak = new
        score = x
        if RACE:
            score = x - _log_times(low, high, (start + column).to(tl.uint32))
        better = score > best
        best = tl.where(better, score, best)
        winner = tl.where(better, column, winner)
        logit = tl.where(better, x, logit)
    most = tl.max(best, 0)
    chosen = tl.min(tl.where(best == most, winner, 2147483647), 0)
    value = tl.max(tl.where(winner == chosen, logit, -float("inf")), 0)
    to = out + (part * tl.num_programs(0) + row) * 4
    tl.store(to, most.to(tl.float64))
    tl.store(to + 1, (start + chosen).to(tl.float64))
    tl.store(to + 2, value.to(tl.float64))
    tl.store(to + 3, (peak + tl.log(total)).to(tl.float64))
