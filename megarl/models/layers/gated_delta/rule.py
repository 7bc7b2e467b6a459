"""The gated delta rule and the causal convolution before it, over a packed stream of sequences.

Each value head has a state S, a dk x dv matrix that maps keys to values. A token first lets the state decay and then
moves what the state returns for its key towards its value (Yang, Kautz, Hatamizadeh 2024, Gated Delta Networks):

    S <- exp(g) S;    S <- S + k (beta (v - S^T k))^T;    o = S^T q

`recurrent` computes this token by token. `chunked` computes the same with matrix products: within a chunk of C tokens
the corrections u_t = beta_t (v_t - S^T k_t) solve a triangular system, and only the states between chunks are computed
one after the other:

    chunks of sequence a  [a0][a1][a2]         pass 0: a0 b0 c0     Chunks never cross the border of a sequence. A
    chunks of sequence b  [b0][b1]       -->   pass 1: a1 b1        pass computes the next chunk of every sequence
    chunks of sequence c  [c0]                 pass 2: a2           that still has one.

Shapes: t tokens of m sequences, G key heads, r value heads per key head, dk and dv widths of keys and values. States
and everything inside the rule are float32, or float64 if the inputs are.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from megarl.models.layers.gated_delta.plain import CHUNK
from megarl.system.errors import ConfigError

_NORM_EPS = 1e-6


@dataclass(frozen=True)
class DeltaInputs:
    """The inputs of the gated delta rule, with G key heads, and r value heads for each key head.

    Attributes:
        q, k: [t, G, dk], unnormalised queries and keys.
        v: [t, G, r, dv].
        g: [t, G, r], logarithm of the decay, at most 0.
        beta: [t, G, r], share of the correction that enters the state, from 0 to 1.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    g: Tensor
    beta: Tensor

    def exact(self) -> DeltaInputs:
        """Return the inputs in float32 or wider, with keys and queries as unit vectors, and queries times dk^-1/2."""
        dtype = torch.promote_types(self.q.dtype, torch.float32)
        q, k = (unit(x.to(dtype)) for x in (self.q, self.k))
        return DeltaInputs(q * k.shape[-1] ** -0.5, k, *(x.to(dtype) for x in (self.v, self.g, self.beta)))


def unit(x: Tensor) -> Tensor:
    """Return `x` divided by its length over the last dimension."""
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + _NORM_EPS)


def log_decay(a: Tensor, a_log: Tensor, dt_bias: Tensor) -> Tensor:
    """Return g, the logarithm of the decay [t, heads] in float32 or wider, from its projection `a` [t, heads] and the
    parameters of the value heads."""
    dtype = torch.promote_types(a.dtype, torch.float32)
    return -a_log.to(dtype).exp() * F.softplus(a.to(dtype) + dt_bias.to(dtype))


def recurrent(inputs: DeltaInputs, lengths: Sequence[int], state: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Return the outputs [t, G, r, dv] and the states [m, G, r, dk, dv] after the last tokens, token by token.

    `state`: the states before the first tokens; None: zero.
    """
    exact = inputs.exact()
    outputs, states = [], []
    first = zero_state(exact, len(lengths)) if state is None else state
    for number, tokens in enumerate(torch.arange(len(exact.q)).split(list(lengths))):
        s = first[number]
        for t in tokens.tolist():
            k, q = exact.k[t][:, None, :, None], exact.q[t][:, None, :, None]
            s = s * exact.g[t].exp()[..., None, None]
            correction = exact.beta[t][..., None] * (exact.v[t] - (s * k).sum(-2))
            s = s + k * correction[..., None, :]
            outputs.append((s * q).sum(-2))
        states.append(s)
    return torch.stack(outputs), torch.stack(states)


def zero_state(inputs: DeltaInputs, sequences: int) -> Tensor:
    """Return the states [m, G, r, dk, dv] of sequences without tokens."""
    groups, per, dv = inputs.v.shape[1:]
    dtype = torch.promote_types(inputs.v.dtype, torch.float32)
    return inputs.v.new_zeros(sequences, groups, per, inputs.k.shape[-1], dv, dtype=dtype)


def delta_step(inputs: DeltaInputs, state: Tensor) -> Tensor:
    """Read one token per row: update `state` [n, G, r, dk, dv] in place and return the outputs [n, G, r, dv].

    A row with g = 0 and beta = 0 keeps its state.
    """
    x = inputs.exact()
    decay = x.g.exp()[..., None]
    both = torch.stack([x.k, x.q], -2)[:, :, None]  # one product reads the state for the key and for the query
    of_key, of_query = (both @ state).unbind(-2)
    correction = x.beta[..., None] * (x.v - decay * of_key)
    state.mul_(decay[..., None]).addcmul_(x.k[:, :, None, :, None], correction[..., None, :])
    along = (x.k * x.q).sum(-1)[:, :, None, None]
    return decay * of_query + along * correction


@dataclass(frozen=True)
class ChunkPlan:
    """How a stream is cut into chunks; computed once per stream and used by all layers.

    Attributes:
        size: tokens of a chunk.
        tokens: int64 [chunks * size], the token at each place of the chunks, -1 at padding.
        places: int64 [t], the place of each token.
        active: number of chunks of each pass. A pass has the sequences with the most chunks first.
        order: int64 [m], the sequences in the order of a pass.
    """

    size: int
    tokens: Tensor
    places: Tensor
    active: tuple[int, ...]
    order: Tensor

    @classmethod
    def of(cls, lengths: Sequence[int], device: torch.device) -> ChunkPlan:
        """Return how a stream of sequences with `lengths` tokens is cut into chunks."""
        size = min(CHUNK, -(-max(lengths) // 16) * 16)
        counts = [-(-length // size) for length in lengths]
        order = sorted(range(len(lengths)), key=lambda i: -counts[i])
        starts = torch.tensor([0, *lengths]).cumsum(0).tolist()
        active, first, stop = [], [], []
        for number in range(max(counts)):
            sequences = [i for i in order if counts[i] > number]
            active.append(len(sequences))
            first += [starts[i] + number * size for i in sequences]
            stop += [starts[i + 1] for i in sequences]
        tokens = torch.tensor(first)[:, None] + torch.arange(size)
        tokens = torch.where(tokens < torch.tensor(stop)[:, None], tokens, -1).flatten()
        places = torch.empty(starts[-1], dtype=torch.int64)
        places[tokens[tokens >= 0]] = (tokens >= 0).nonzero()[:, 0]
        return cls(size, tokens.to(device), places.to(device), tuple(active), torch.tensor(order, device=device))

    def cut(self, x: Tensor) -> Tensor:
        """Cut the stream [t, ...] into chunks [chunks, size, ...]; a sequence's last chunk is padded with zeros."""
        return take_rows(x, self.tokens, self.places).unflatten(0, (-1, self.size))

    def join(self, chunks: Tensor) -> Tensor:
        """Put the tokens of chunks [chunks, size, ...] back into the order of the stream, [t, ...]."""
        return take_rows(chunks.flatten(0, 1), self.places, self.tokens)


class _Rows(torch.autograd.Function):
    """`take_rows` with a backward pass that also takes rows, by the inverse `back`, instead of adding them up."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, there: Tensor, back: Tensor) -> Tensor:
        ctx.save_for_backward(back)
        return _rows_or_zeros(x, there)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        (back,) = ctx.saved_tensors
        return _rows_or_zeros(grad, back), None, None


def take_rows(x: Tensor, there: Tensor, back: Tensor) -> Tensor:
    """Return the rows of `x` at the indices `there`, zero where an index is -1.

    `back` is the inverse of `there`: for each row of `x` its index in the result, or -1; the backward pass uses it.
    """
    return _Rows.apply(x, there, back)


def _rows_or_zeros(x: Tensor, rows: Tensor) -> Tensor:
    return x.index_select(0, rows.clamp(min=0)).masked_fill_((rows < 0).view(-1, *[1] * (x.dim() - 1)), 0)


def chunked(
    inputs: DeltaInputs, plan: ChunkPlan, state: Tensor | None = None, *, want_state: bool = False
) -> tuple[Tensor, Tensor | None]:
    """Return the outputs [t, G, r, dv] in the dtype of the values, and the states [m, G, r, dk, dv] after the last
    tokens, computed by matrix products over chunks.

    The result is that of `recurrent`. Padding has beta = 0 and g = 0, so it does not change the state. The states are
    None unless they are wanted.
    """
    exact = inputs.exact()
    q, k = (plan.cut(x).transpose(1, 2)[:, :, None] for x in (exact.q, exact.k))  # [chunks, G, 1, C, dk]
    v, g, beta = (plan.cut(x).movedim(1, 3) for x in (exact.v, exact.g, exact.beta))  # [chunks, G, r, C, dv], [.., C]
    total = g.cumsum(-1)  # logarithm of the decay since the beginning of the chunk
    decay = (total[..., :, None] - total[..., None, :]).masked_fill(_above(plan.size, g.device), -torch.inf).exp()
    # Row t of the system for the corrections u of a chunk with the state S at its beginning:
    # u_t + beta_t sum_{s<t} decay[t, s] (k_t k_s) u_s = beta_t (v_t - exp(total_t) S^T k_t).
    # It is solved for all chunks at once, with S as a factor, so each sequential pass has only one product with S.
    system = k @ k.mT * decay * beta[..., None]
    inverse = _UnitInverse.apply(system)
    of_values = inverse @ (v * beta[..., None])
    of_state = inverse @ (k * (beta * total.exp())[..., None])
    to_end = k * (total[..., -1:] - total).exp()[..., None]
    keep = total[..., -1].exp()[..., None, None]

    s = zero_state(exact, len(plan.order)) if state is None else state.to(v.dtype)[plan.order]
    before, corrections, after = [], [], []
    parts = (x.split(plan.active) for x in (of_values, of_state, to_end, keep))
    for values, keys, ends, share in zip(*parts, strict=True):
        if len(values) < len(s):  # the last sequences, which are the shortest, have no further chunk
            s, ended = s.split([len(values), len(s) - len(values)])
            after.append(ended)
        before.append(s)
        corrections.append(values - keys @ s)
        s = torch.baddbmm((share * s).flatten(0, 2), ends.mT.flatten(0, 2), corrections[-1].flatten(0, 2)).view_as(s)
    u = torch.cat(corrections)
    out = (q * total.exp()[..., None]) @ torch.cat(before) + (q @ k.mT * decay) @ u
    outputs = plan.join(out.movedim(3, 1)).to(inputs.v.dtype)
    if not want_state:
        return outputs, None
    last = torch.cat([s, *reversed(after)])
    return outputs, torch.empty_like(last).index_copy(0, plan.order, last)


class _UnitInverse(torch.autograd.Function):
    """The inverse of lower triangular matrices with ones on the diagonal; what is on and above it is not read.

    With X the inverse, the gradient is -X^T dX X^T below the diagonal: two products instead of solving again.
    """

    @staticmethod
    def forward(ctx: Any, system: Tensor) -> Tensor:
        identity = torch.eye(system.shape[-1], dtype=system.dtype, device=system.device)
        inverse = torch.linalg.solve_triangular(system, identity, upper=False, unitriangular=True)
        ctx.save_for_backward(inverse)
        return inverse

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (inverse,) = ctx.saved_tensors
        return (inverse.mT @ grad @ inverse.mT).neg_().tril_(-1)


@functools.cache
def _above(size: int, device: torch.device) -> Tensor:
    """Return bool [size, size], True above the diagonal."""
    # If decoding calls this first, the cached tensor must not be an inference tensor, which autograd cannot save.
    with torch.inference_mode(False):
        return torch.ones(size, size, dtype=torch.bool, device=device).triu(1)


#: Keyword arguments of flash-linear-attention's function that this module passes.
_FLASH_ARGUMENTS = ("initial_state", "output_final_state", "use_qk_l2norm_in_kernel", "cu_seqlens")


@functools.cache
def flash_rule() -> Callable[..., Any] | None:
    """Return `chunk_gated_delta_rule` of flash-linear-attention, or None if the package is not installed.

    Raises:
        ConfigError: the installed version's function takes other arguments.
    """
    try:
        from fla.ops.gated_delta_rule import chunk_gated_delta_rule
    except ImportError:
        return None
    try:
        inspect.signature(chunk_gated_delta_rule).bind(*[None] * 5, **dict.fromkeys(_FLASH_ARGUMENTS))
    except TypeError as error:
        raise ConfigError(
            f"this version of flash-linear-attention is not supported: chunk_gated_delta_rule: {error}",
            where="the installed package flash-linear-attention",
            allowed=f"a version whose function has the arguments {', '.join(_FLASH_ARGUMENTS)}",
            fix="pip install -U flash-linear-attention, or uninstall it to use the slower implementation in torch",
        ) from error
    return chunk_gated_delta_rule


def delta_rule(
    inputs: DeltaInputs,
    lengths: Sequence[int],
    memo: dict[Any, Any],
    state: Tensor | None = None,
    *,
    want_state: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """Compute the gated delta rule by the fastest implementation: the outputs [t, G, r, dv] and, if wanted, the final
    states of the m sequences [m, G, r, dk, dv].

    Args:
        lengths: tokens of each sequence of the stream.
        memo: a cache of what all layers of a forward pass need and the first one computes.
        state: the states before the first tokens; None: zero.
    """
    flash = flash_rule() if inputs.q.is_cuda and inputs.q.dtype != torch.float32 else None
    name = ("delta", flash is None)
    if flash is None:
        plan: ChunkPlan = memo.get(name) or ChunkPlan.of(lengths, inputs.q.device)
        memo[name] = plan
        return chunked(inputs, plan, state, want_state=want_state)
    if name not in memo:
        memo[name] = torch.tensor([0, *lengths], device=inputs.q.device).cumsum(0)
    heads, (groups, per) = inputs.v.flatten(1, 2), inputs.v.shape[1:3]
    # older versions of the package have no grouped value heads
    q, k = (x.repeat_interleave(per, 1)[None] for x in (inputs.q, inputs.k))
    out, states = flash(
        *(q, k, heads[None], inputs.g.flatten(1)[None], inputs.beta.flatten(1)[None]),
        initial_state=None if state is None else state.flatten(1, 2),
        output_final_state=want_state,
        use_qk_l2norm_in_kernel=True,
        cu_seqlens=memo[name],
    )
    return out[0].unflatten(1, (groups, per)), None if states is None else states.unflatten(1, (groups, per))


def causal_conv(x: Tensor, weight: Tensor, lengths: Sequence[int], memo: dict[Any, Any]) -> Tensor:
    """Return silu of the causal depthwise convolution of a packed stream `x` [t, channels] with `weight` [channels,
    width].

    A sequence's first tokens see zeros before them, never the end of the sequence before it.
    """
    name = ("positions", x.device)
    if name not in memo:
        memo[name] = torch.cat([torch.arange(length) for length in lengths]).to(x.device)
    return _CausalConv.apply(x, weight, memo[name])


class _CausalConv(torch.autograd.Function):
    """The convolution and its silu, summed in float32 or wider; only the input is kept for the gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, positions: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight, positions)
        return F.silu(_convolve(x, weight, positions)).to(x.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        x, weight, positions = ctx.saved_tensors
        total = _convolve(x, weight, positions)
        upstream = torch.ops.aten.silu_backward(grad.to(total.dtype), total)
        taps, width = weight.to(total.dtype), weight.shape[1]
        dx, dweight = upstream * taps[:, -1], torch.empty_like(taps)
        dweight[:, -1] = (upstream * x).sum(0)
        for back in range(1, min(width, len(x))):
            inside = upstream[back:] * (positions[back:, None] >= back)
            dx[:-back].addcmul_(inside, taps[:, -1 - back])
            dweight[:, -1 - back] = (inside * x[:-back]).sum(0)
        dweight[:, : max(width - len(x), 0)] = 0
        return dx.to(x.dtype), dweight.to(weight.dtype), None


def _convolve(x: Tensor, weight: Tensor, positions: Tensor) -> Tensor:
    """Return the causal convolution of each channel in float32 or wider; the last tap belongs to the token itself."""
    dtype = torch.promote_types(x.dtype, torch.float32)
    taps = weight.to(dtype)
    total = x * taps[:, -1]
    for back in range(1, min(weight.shape[1], len(x))):
        total[back:].addcmul_(x[:-back] * (positions[back:, None] >= back), taps[:, -1 - back])
    return total


def gated_norm(x: Tensor, z: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Return rms_norm(x) * weight * silu(z) over the last dimension, in the dtype of `x` and computed in float32 or
    wider."""
    dtype = torch.promote_types(x.dtype, torch.float32)
    wide = x.to(dtype)
    normed = (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)).to(x.dtype)
    return (weight * normed * F.silu(z.to(dtype))).to(x.dtype)
