"""Self-attention over a packed stream, causal or bidirectional in part: Megatron's `core_attention` on CPU and GPU.

    stream [t, 1, heads, d] --RoPE--> q, k  --(context parallel: k, v of all ranks)-->  buckets  -->  [t, 1, heads * d]

On CUDA the stream goes to a variable-length kernel if there is one: in one call or, under context parallelism, in two
calls, one for each of a rank's two chunks of every sequence, with the keys up to the chunk's end. On a CPU short
sequences are plain matrix products (cpu.py). Otherwise sequences of similar length are right-padded into a
bucket, and each bucket is one scaled_dot_product_attention call; causality hides the padding after a sequence, so it
needs no mask. Sliding windows and context parallelism need a mask and so use the buckets.

A model may have sinks, further scores in the softmax (sinks.py). Every path computes them exactly, and since each query
sees all of its keys on one rank, context parallelism changes nothing. Scores with a soft cap are computed by
flash-attn, which has it as an argument, or in the buckets by plain products (capped.py).

In some streams the last tokens of a sequence attend to the whole sequence (`PackedSequences.open_from`: the actions of
a robot policy). If all tokens of all sequences do, the variable-length kernel runs without causality; else the buckets.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel.layers import set_tensor_model_parallel_attributes
from megatron.core.tensor_parallel.mappings import gather_from_sequence_parallel_region
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint
from torch import Tensor
from torch.distributed import ProcessGroup

from megarl.models.config import PolicyConfig
from megarl.models.layers.attention.capped import capped_attention
from megarl.models.layers.attention.cpu import LONGEST, causal_attention
from megarl.models.layers.attention.plain import Attention
from megarl.models.layers.attention.prefixes import attend_with, level_parts, plain_parts
from megarl.models.layers.attention.scores import Scores
from megarl.models.layers.attention.sinks import attend_with_sinks, sink_key
from megarl.models.packing import PackedSequences, SharedPrefixes, inverse_order, places_on_ranks
from megarl.models.rope import apply_rope
from megarl.system.device import device

_BUCKET_RATIO = 0.85  # minimum shortest / longest sequence of a bucket: at most 1 - 0.85**2 = 28% is padding


class PackedAttention(MegatronModule):
    """Self-attention within each sequence of a packed stream, with grouped queries, sliding windows and context
    parallelism.

    Attributes:
        softmax_offset: the sinks of this rank's heads; None: the model has none.

    Raises, when it is called:
        ValueError: a sliding window is shorter than a sequence with bidirectional tokens.
    """

    def __init__(
        self,
        config: PolicyConfig,
        layer_number: int,
        *,
        pg_collection: ProcessGroupCollection,
        softmax_scale: float | None = None,
        **_: object,
    ) -> None:
        super().__init__(config=config)
        mixer = config.mixers[layer_number - 1] if config.mixers else Attention(width=config.kv_channels)
        assert isinstance(mixer, Attention), "other kinds have their own modules"
        self.scale, self.cap = softmax_scale or mixer.factor, mixer.cap
        self.window, self.rope, self.number = mixer.window, mixer.rope, layer_number
        self.cp_group, self._tp_group = pg_collection.cp, pg_collection.tp
        self.softmax_offset = None
        if mixer.sinks:
            heads = mixer.heads // config.tensor_model_parallel_size
            sinks = torch.empty(heads, dtype=config.params_dtype, device=device())
            self.softmax_offset = torch.nn.Parameter(sinks)
            set_tensor_model_parallel_attributes(self.softmax_offset, is_parallel=True, dim=0, stride=1)

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, *_: object, packed_seq_params: PackedSequences, **__: object
    ) -> Tensor:
        """Apply RoPE and attention: `query` [t, 1, heads, d], `key` and `value` [t, 1, groups, d] -> [t, 1, heads *
        d]."""
        q, k = query.squeeze(1), key.squeeze(1)
        if self.rope is not None:
            cos, sin = packed_seq_params.cache[self.rope]
            q, k = apply_rope(q, cos, sin), apply_rope(k, cos, sin)
        if packed_seq_params.layer_keys is not None:
            packed_seq_params.layer_keys[self.number] = k, value.squeeze(1)
        window = self.window if self.window and self.window < packed_seq_params.max_seqlen_q else None
        k, v = of_all_ranks(k, value.squeeze(1), packed_seq_params, self.cp_group)
        out = attend(q, k, v, packed_seq_params, Scores(self.scale, self.softmax_offset, self.cap), window)
        return out.reshape(out.shape[0], 1, -1)

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: tuple[Any, ...] = (), metadata: dict[str, Any] | None = None
    ) -> dict[str, Any]:
        """Return the sinks as a slice of those of all heads."""
        groups = {"tp_group": self._tp_group, "dp_cp_group": (metadata or {}).get("dp_cp_group")}
        state = self.state_dict(prefix="", keep_vars=True)
        return make_sharded_tensors_for_checkpoint(state, prefix, {"softmax_offset": 0}, sharded_offsets, **groups)


def of_all_ranks(k: Tensor, v: Tensor, packed: PackedSequences, ranks: ProcessGroup) -> tuple[Tensor, Tensor]:
    """Return the keys and values of all context-parallel ranks, one rank after the other, from those of this rank."""
    if packed.cp_size == 1:
        return k, v
    k = gather_from_sequence_parallel_region(k.contiguous(), group=ranks)
    return k, gather_from_sequence_parallel_region(v.contiguous(), group=ranks)


def attend(q: Tensor, k: Tensor, v: Tensor, packed: PackedSequences, scores: Scores, window: int | None) -> Tensor:
    """Return attention [t, heads, dv] of `q` [t, heads, d] to `k` [t * cp, groups, d] and `v` [t * cp, groups, dv] by
    the fastest implementation."""
    if packed.prefixes is not None:
        return prefix_attention(q, k, v, packed.prefixes, packed.cache, scores, window)
    if packed.open_from and window is not None:
        raise ValueError(f"a sliding window ({window} tokens) cannot be combined with bidirectional attention")
    out = varlen_attention(q, k, v, packed, scores, window)
    if out is not None:
        return out
    plain = packed.cp_size == 1 and window is None and scores.cap is None and not packed.open_from
    if q.is_cpu and plain and packed.max_seqlen_q <= LONGEST:
        return causal_attention(q, k, v, packed.lengths, scores.scale, scores.sinks)
    return bucket_attention(q, k, v, packed, scores, window)


@dataclass(frozen=True)
class VarlenCall:
    """The lengths of one variable-length kernel call: the last queries of every sequence, and the keys up to them.

    If a sequence has more keys than queries, the last query sees all keys, and each earlier query sees one key fewer.

    Attributes:
        cu_q, cu_k: int32 [sequences + 1], offset of the first query and key of each sequence, and the total.
        longest_q, longest_k: queries and keys of the longest sequence.
    """

    cu_q: Tensor
    cu_k: Tensor
    longest_q: int
    longest_k: int
    k_index: Tensor | None = None  # int64, indices of the packed stream's keys that this call uses; None: all, in order
    causal: bool = True  # False: without a window, every query sees all keys of its sequence


@dataclass(frozen=True)
class VarlenPlan:
    """The kernel calls for a packed stream.

    `q_index` [t] reorders the queries so that each call takes an equal, contiguous share (None: no reordering);
    `restore` [t] is its inverse, for the outputs.
    """

    calls: tuple[VarlenCall, ...]
    q_index: Tensor | None = None
    restore: Tensor | None = None


def varlen_attention(
    q: Tensor, k: Tensor, v: Tensor, packed: PackedSequences, scores: Scores, window: int | None
) -> Tensor | None:
    """Compute `attend` with a variable-length kernel; return None if no kernel takes these queries and sequences."""
    kernel, scale = None if any(packed.open_from) else varlen_kernel(q), scores.scale
    if kernel is not None and scores.cap is not None:
        # flash-attn caps scores from 2.6 on; torch's kernels do not
        flash = _flash_attention()
        caps = flash is not None and "softcap" in inspect.signature(flash).parameters
        kernel = functools.partial(_flash_varlen, cap=scores.cap) if caps else None
    if kernel is None:
        return None
    if scores.sinks is not None:
        kernel = functools.partial(_varlen_with_sinks, scores.sinks)
    plan: VarlenPlan = packed.cache.get("varlen") or plan_varlen(packed, q.device)
    packed.cache["varlen"] = plan
    width = v.shape[2]
    q, k, v = equal_widths(q, k, v)
    if plan.q_index is None:
        return kernel(q, k, v, plan.calls[0], scale, window)[..., :width]
    queries = q.index_select(0, plan.q_index).chunk(len(plan.calls))
    outputs = [
        kernel(part, _ToBucket.apply(k, call.k_index), _ToBucket.apply(v, call.k_index), call, scale, window)
        for part, call in zip(queries, plan.calls, strict=True)
    ]
    assert plan.restore is not None
    return torch.cat(outputs).index_select(0, plan.restore)[..., :width]


def equal_widths(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return the inputs with zeros after narrower heads, for kernels that need keys and values of one width.

    Zeros change no score, and the context has zeros after the values' width.
    """
    keys, values = k.shape[-1], v.shape[-1]
    if keys < values:
        q, k = (F.pad(x, (0, values - keys)) for x in (q, k))
    return q, k, F.pad(v, (0, keys - values)) if values < keys else v


def plan_varlen(packed: PackedSequences, where: torch.device) -> VarlenPlan:
    """Return the kernel calls for the attention of a packed stream. All layers use the same plan of a stream."""
    cp, rank = packed.cp_size, packed.cp_rank
    if cp == 1:
        cu, longest = packed.cu_seqlens_q, packed.max_seqlen_q
        return VarlenPlan((VarlenCall(cu, cu, longest, longest, causal=not packed.open_from),))
    lengths = torch.tensor(packed.lengths)
    chunks, starts, key_place = lengths // (2 * cp), lengths.cumsum(0) - lengths, places_on_ranks(packed.lengths, cp)
    ends = lambda sizes: F.pad(sizes.cumsum(0), (1, 0)).to(torch.int32).to(where)  # noqa: E731
    calls, order = [], []
    # `seen`: how many of a sequence's 2 cp chunks this rank's queries of the half see, their own chunk included
    for half, seen in enumerate((rank + 1, 2 * cp - rank)):
        local = starts // cp + half * chunks
        order += [torch.arange(begin, begin + n) for begin, n in zip(local.tolist(), chunks.tolist(), strict=True)]
        keys = [
            torch.arange(begin, begin + seen * n) for begin, n in zip(starts.tolist(), chunks.tolist(), strict=True)
        ]
        longest = int(chunks.max())
        index = key_place[torch.cat(keys)].to(where)
        calls.append(VarlenCall(ends(chunks), ends(seen * chunks), longest, seen * longest, index))
    q_index = torch.cat(order)
    return VarlenPlan(tuple(calls), q_index.to(where), inverse_order(q_index).to(where))


def varlen_kernel(q: Tensor) -> Callable[..., Tensor] | None:
    """Return the variable-length kernel for queries like `q`; None if there is none: on a CPU, in float32, or on GPUs
    that no kernel supports.

    It is the first available one of FlashAttention 3 or 4 through torch, flash-attn, and torch's own kernel. Call it
    with q, k, v, a `VarlenCall`, the scale and the window.
    """
    if not q.is_cuda or q.dtype not in (torch.bfloat16, torch.float16):
        return None
    if _newest_flash() is not None:
        return _torch_varlen
    if _flash_attention() is not None:
        return _flash_varlen
    if torch.cuda.get_device_capability()[0] >= 8:
        return _torch_varlen
    return None


#: FlashAttention versions that torch can activate, by major compute capability, the fastest first.
_NEWEST = {9: ("FA3", "FA4"), 10: ("FA4",)}


@functools.cache
def _newest_flash() -> str | None:
    """Activate FlashAttention 3 (package flash_attn_interface) or 4 (flash-attn-4) in torch, for this process.

    Return its name; None if neither fits this GPU or can be imported."""
    from torch.nn.attention import activate_flash_attention_impl, register_flash_attention_impl
    from torch.nn.attention._fa4 import register_flash_attention_fa4

    kernels = functools.partial(register_flash_attention_fa4, module_path="megarl.system.compat.flash_attention_4")
    register_flash_attention_impl("FA4", register_fn=kernels)
    for name in _NEWEST.get(torch.cuda.get_device_capability()[0], ()):
        try:
            activate_flash_attention_impl(name)
        # the package is missing, or lacks the functions that training needs
        except (ImportError, RuntimeError, AttributeError):
            continue
        return name
    return None


@functools.cache
def _flash_attention() -> Callable[..., Tensor] | None:
    """Return flash-attn's function, or None.

    Only an import shows whether it exists: flash-attn-4 uses the same package name, and a build may be for another
    torch.
    """
    try:
        from flash_attn import flash_attn_varlen_func
    except ImportError:
        return None
    return flash_attn_varlen_func


def _flash_varlen(
    q: Tensor, k: Tensor, v: Tensor, call: VarlenCall, scale: float, window: int | None, cap: float = 0.0
) -> Tensor:
    flash = _flash_attention()
    assert flash is not None  # this function is chosen only if the package is installed
    lengths = call.cu_q, call.cu_k, call.longest_q, call.longest_k
    left = -1 if window is None else window - 1
    span = (left, 0 if window else -1)
    capped = {"softcap": cap} if cap else {}
    return flash(q, k, v, *lengths, softmax_scale=scale, causal=call.causal, window_size=span, **capped)


def _torch_varlen(
    q: Tensor, k: Tensor, v: Tensor, call: VarlenCall, scale: float, window: int | None, **further: Any
) -> Any:
    """Compute attention by torch's `varlen_attn`; `further` are other arguments of this function.

    Returns:
        Its output [t, heads, d]; a tuple if `further` asks for more outputs, such as `return_aux`.
    """
    from torch.nn.attention.varlen import varlen_attn

    lengths = call.cu_q, call.cu_k, call.longest_q, call.longest_k
    if q.shape[1] != k.shape[1] and _varlen_names_grouped_queries():
        further["enable_gqa"] = True
    return varlen_attn(q, k, v, *lengths, scale=scale, window_size=_span(call, window), **further)


@dataclass(frozen=True)
class TorchVarlen:
    """torch's variable-length kernels for one call, which also return each query's log-sum-exp (`sinks.Kernel`)."""

    call: VarlenCall
    scale: float
    window: int | None

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Return the attention [t, H, d] of q to k and v, and the logsumexp of each query's scores, [t, H]."""
        from torch.nn.attention.varlen import AuxRequest

        out, lse = _torch_varlen(q, k, v, self.call, self.scale, self.window, return_aux=AuxRequest(lse=True))
        return out, lse.t()  # the kernels have the heads first

    def backward(
        self, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return the gradients of q, k and v for the probabilities exp(score - lse)."""
        call, span = self.call, _span(self.call, self.window)
        unused = torch.zeros(2, dtype=torch.uint64, device=q.device)  # random state of dropout, which is off
        lengths = call.cu_q, call.cu_k, call.longest_q, call.longest_k, span == (-1, 0), unused
        given = grad, q, k, v, out, lse.t().contiguous(), *lengths, self.scale, list(span)
        dq, dk, dv = torch.ops.torch_attn._varlen_attn_backward(*given)
        return dq, dk, dv


def _varlen_with_sinks(
    sinks: Tensor, q: Tensor, k: Tensor, v: Tensor, call: VarlenCall, scale: float, window: int | None
) -> Tensor:
    return attend_with_sinks(q, k, v, sinks, TorchVarlen(call, scale, window))


def prefix_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    prefixes: SharedPrefixes,
    cache: dict[Any, Any],
    scores: Scores,
    window: int | None,
) -> Tensor:
    """Compute `attend` for a stream in which sequences share prefixes (prefixes.py); `cache` is that of the stream.

    A variable-length kernel has one window for all sequences of a call, but tokens after a shared prefix see different
    parts of it in each branch. With a window the kernel therefore gets, for each node of the prefix tree, the keys of
    the nodes before it that its tokens see.
    """
    kernel = varlen_kernel(q)
    if kernel is None or scores.cap is not None:
        return attend_with(plain_parts(q, v, prefixes, scores, window), q, k, v, scores.sinks)
    width = v.shape[2]
    q, k, v = equal_widths(q, k, v)
    if window is None:

        def make(queries: list[int], keys: list[int], causal: bool) -> TorchVarlen:
            call = VarlenCall(_ends(queries, q.device), _ends(keys, q.device), max(queries), max(keys), causal=causal)
            return TorchVarlen(call, scores.scale, None)

        parts = cache.get(("parts", scores.scale)) or level_parts(prefixes, make, q.device)
        cache["parts", scores.scale] = parts
        return attend_with(parts, q, k, v, scores.sinks)[..., :width]
    if scores.sinks is not None:
        kernel = functools.partial(_varlen_with_sinks, scores.sinks)
    call, index = cache.get(("paths", window)) or _path_call(prefixes, window, q.device)
    cache["paths", window] = call, index
    return kernel(q, *(_ToBucket.apply(x, index) for x in (k, v)), call, scores.scale, window)[..., :width]


def _path_call(prefixes: SharedPrefixes, window: int, where: torch.device) -> tuple[VarlenCall, Tensor]:
    """Return one call in which each node of a prefix tree is a sequence of queries, and the indices of the call's keys
    in the stream: for each node the tokens of its ancestors, as far as the window reaches, and its own."""
    start, keys = 0, list[Tensor]()
    for length in prefixes.lengths:
        before = [torch.arange(s.start, s.end) for s in prefixes.spans if s.end <= start < s.last]
        seen = torch.cat([*before, torch.arange(start, start + length)])
        keys.append(seen[-(length + window - 1) :])
        start += length
    sizes = [len(part) for part in keys]
    ends = _ends(prefixes.lengths, where), _ends(sizes, where)
    return VarlenCall(*ends, max(prefixes.lengths), max(sizes)), torch.cat(keys).to(where)


def _ends(sizes: Sequence[int], where: torch.device) -> Tensor:
    """Return the first token of each sequence, and the number of tokens, int32."""
    return F.pad(torch.tensor(sizes).cumsum(0), (1, 0)).to(torch.int32).to(where)


def _span(call: VarlenCall, window: int | None) -> tuple[int, int]:
    """Return how many keys a query sees to its left and to its right, -1: all of them."""
    return (-1 if window is None else window - 1, 0) if call.causal else (-1, -1)


@functools.cache
def _varlen_names_grouped_queries() -> bool:
    """Return whether torch needs `enable_gqa` for grouped queries, as from 2.12 on; before, it detects them itself."""
    from torch.nn.attention.varlen import varlen_attn

    return "enable_gqa" in inspect.signature(varlen_attn).parameters


@dataclass(frozen=True)
class AttentionBucket:
    """Sequences of one attention call; index tensors point into the query and key streams (None: the whole stream)."""

    count: int
    q_length: int
    k_length: int
    q_index: Tensor | None
    k_index: Tensor | None
    q_positions: Tensor | None
    """[count or 1, q_length] positions of queries, if plain causality does not hold (context parallelism)."""
    open_from: Tensor | None = None
    """int64 [count], first position whose tokens attend to the whole sequence; None: all tokens are causal."""
    ends: Tensor | None = None
    """[count], lengths of the sequences, if `open_from` is given."""

    @property
    def sees_all(self) -> bool:
        """Whether every token sees its whole sequence, and all sequences have the bucket's length."""
        if self.open_from is None or self.ends is None:
            return False
        return not bool(self.open_from.any()) and bool((self.ends == self.k_length).all())

    def mask(self, window: int | None) -> Tensor | None:
        """Return the mask, bool [count or 1, 1, q_length, k_length], True where a query sees a key.

        None: the plain causal mask, or no mask at all (`sees_all`).
        """
        if self.open_from is not None and self.ends is not None:
            if self.sees_all:
                return None
            places = torch.arange(self.k_length, device=self.ends.device)
            open_to = (places[:, None] >= self.open_from[:, None, None]) & (places < self.ends[:, None, None])
            return ((places <= places[:, None]) | open_to).unsqueeze(1)
        if self.q_positions is None and (window is None or window >= self.k_length):
            return None
        keys = torch.arange(self.k_length, device=None if self.q_index is None else self.q_index.device)
        queries = keys[None] if self.q_positions is None else self.q_positions
        seen = keys <= queries[..., None]
        if window is not None:
            # A padding query may lie beyond every window; it must see at least one key, or its softmax is NaN.
            seen &= (keys > queries[..., None] - window) | (queries[..., None] >= self.k_length)
        return seen.unsqueeze(1)


@dataclass(frozen=True)
class AttentionPlan:
    """How attention over a packed stream is computed: bucket by bucket, of sequences with similar lengths.

    `restore` [t] indexes the buckets' concatenated outputs (None: they are already in order).
    """

    buckets: tuple[AttentionBucket, ...]
    restore: Tensor | None


def plan_buckets(packed: PackedSequences, where: torch.device) -> AttentionPlan:
    """Group the sequences of a stream by length; computed once per stream and used by all layers."""
    lengths, cp = packed.lengths, packed.cp_size
    opens = torch.tensor(packed.open_from) if packed.open_from else None
    if cp == 1 and len(set(lengths)) == 1:
        both_ways = () if opens is None else (opens.to(where), torch.tensor(lengths).to(where))
        bucket = AttentionBucket(len(lengths), lengths[0], lengths[0], None, None, None, *both_ways)
        return AttentionPlan((bucket,), None)
    local = torch.tensor(lengths) // cp
    q_start = local.cumsum(0) - local
    k_order = places_on_ranks(lengths, cp) if cp > 1 else None
    k_start = torch.tensor([0, *lengths[:-1]]).cumsum(0)
    buckets, restore, offset = [], torch.empty(int(local.sum()), dtype=torch.int64), 0
    for members in group_by_length(lengths):
        k_length = max(lengths[i] for i in members)
        q_length = k_length // cp
        ids = torch.tensor(members)
        q_place = torch.arange(q_length).expand(len(members), -1)
        real = q_place < local[ids, None]
        q_index = q_start[ids, None] + torch.where(real, q_place, 0)
        k_index = k_start[ids, None] + torch.minimum(torch.arange(k_length), torch.tensor(lengths)[ids, None] - 1)
        restore[q_index[real]] = offset + torch.arange(real.numel()).view_as(real)[real]
        offset += real.numel()
        positions = None
        if cp > 1:
            assert k_order is not None
            k_index, chunk = k_order[k_index], local[ids, None] // 2
            first, second = packed.cp_rank * chunk, (2 * cp - 1 - packed.cp_rank) * chunk  # starts of the rank's chunks
            positions = torch.where(q_place < chunk, first + q_place, second + q_place - chunk)
            positions = torch.where(real, positions, k_length).to(where)
        both_ways = () if opens is None else (opens[ids].to(where), torch.tensor(lengths)[ids].to(where))
        indices = q_index.flatten().to(where), k_index.flatten().to(where)
        buckets.append(AttentionBucket(len(members), q_length, k_length, *indices, positions, *both_ways))
    return AttentionPlan(tuple(buckets), restore.to(where))


def group_by_length(lengths: Sequence[int]) -> list[list[int]]:
    """Group the indices of sequences of similar length, longest first, so that little of a group is padding."""
    groups: list[list[int]] = []
    for i in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        if groups and lengths[i] >= _BUCKET_RATIO * lengths[groups[-1][0]]:
            groups[-1].append(i)
        else:
            groups.append([i])
    return groups


class _ToBucket(torch.autograd.Function):
    """Selects rows x[index]; the gradients of a row that is selected several times (as padding) are added up."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, index: Tensor) -> Tensor:
        ctx.save_for_backward(index)
        ctx.rows = x.shape[0]
        return x.index_select(0, index)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        (index,) = ctx.saved_tensors
        return grad.new_zeros(ctx.rows, *grad.shape[1:]).index_add_(0, index, grad), None


def bucket_attention(
    q: Tensor, k: Tensor, v: Tensor, packed: PackedSequences, scores: Scores, window: int | None
) -> Tensor:
    """Compute `attend` by buckets of sequences of similar length."""
    plan: AttentionPlan = packed.cache.get("plan") or plan_buckets(packed, q.device)
    packed.cache["plan"] = plan
    width, outputs = v.shape[2], []
    q, k, v = equal_widths(q, k, v)
    for number, bucket in enumerate(plan.buckets):
        causal = bucket.open_from is None
        name = ("mask", number, window)
        if name not in packed.cache:
            packed.cache[name] = bucket.mask(window)
        mask = packed.cache[name]
        take = lambda x, index: x if index is None else _ToBucket.apply(x, index)  # noqa: E731
        qb, kb, vb = (
            take(x, index).view(bucket.count, length, *x.shape[1:]).transpose(1, 2)
            for x, index, length in (
                (q, bucket.q_index, bucket.q_length),
                (k, bucket.k_index, bucket.k_length),
                (v, bucket.k_index, bucket.k_length),
            )
        )
        if scores.cap is not None:
            out = capped_attention(qb, kb, vb, mask, scores.scale, scores.cap, causal=causal)
        else:
            if scores.sinks is not None:
                if mask is None and causal:
                    mask = torch.ones(bucket.q_length, bucket.k_length, dtype=torch.bool, device=q.device).tril()
                kb, vb, mask = sink_key(kb, vb, mask, scores.sinks, bucket.q_length)
            out = F.scaled_dot_product_attention(
                qb,
                kb,
                vb,
                attn_mask=mask,
                is_causal=causal and mask is None,
                scale=scores.scale,
                enable_gqa=q.shape[1] != k.shape[1],
            )
        outputs.append(out.transpose(1, 2).reshape(-1, *q.shape[1:])[..., :width])
    out = outputs[0] if len(outputs) == 1 else torch.cat(outputs)
    return out if plan.restore is None else out.index_select(0, plan.restore)
