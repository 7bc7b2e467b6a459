"""Softmax attention with grouped queries: sizes, weights, work and memory, without torch."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal

from megarl.models.layers.mixer import Mixer
from megarl.models.layers.rules import (
    COLUMNS,
    COPY,
    HF,
    MCORE,
    ROWS,
    Cut,
    Piece,
    Sources,
    Split,
    WeightRule,
    WeightSource,
    whole,
)
from megarl.models.layers.wiring import Norms, norm_rules

ROPE, LOCAL_ROPE = "rope", "local_rope"
"""Names of RoPE tables: of all layers, or those without a window; and of layers with one, in models with two tables."""


@dataclass(frozen=True)
class Attention(Mixer):
    """Softmax attention of one layer."""

    kind: ClassVar[str] = "attention"
    heads: int = 0
    groups: int = 0  # number of key/value heads
    width: int = 0  # width of a head
    qk_norm: bool = False  # queries and keys are normalised per head
    qkv_bias: bool = False  # the projections to queries, keys and values have biases
    gate: bool = False  # the result of each head is multiplied by the sigmoid of a projection of the hidden state
    wide_norm: bool = False  # queries and keys are normalised over all heads together
    out_bias: bool = False  # the projection of the result has a bias
    scale: float | None = None  # factor of the attention scores; None: 1 / sqrt(width)
    sinks: bool = False  # each head has a learned score that joins the softmax and has no value
    cap: float | None = None  # scores x become cap * tanh(x / cap) before the softmax; None: no cap
    rope: str | None = ROPE  # the RoPE tables that rotate queries and keys; None: they are not rotated

    def dimensions(self) -> dict[str, int]:
        """Return the sizes that the weight rules of softmax attention use, by name."""
        return {
            "head": self.width,
            "groups": self.groups,
            "query": self.heads * self.width,
            "query_and_gate": 2 * self.heads * self.width,
            "kv": self.groups * self.width,
            "qkv": (self.heads + 2 * self.groups) * self.width,
            "normed_head": self.width if self.qk_norm else 0,
            "normed_query": self.heads * self.width if self.wide_norm else 0,
            "normed_kv": self.groups * self.width if self.wide_norm else 0,
            "query_bias": self.heads * self.width if self.qkv_bias else 0,
            "kv_bias": self.groups * self.width if self.qkv_bias else 0,
            "out_bias": int(self.out_bias),
            "sinks": self.heads if self.sinks else 0,
        }

    @property
    def normed(self) -> bool:
        """Whether queries and keys are normalised, per head or over all heads."""
        return self.qk_norm or self.wide_norm

    @property
    def unusual(self) -> bool:
        """Whether Transformer Engine's layers cannot compute this attention."""
        other_scores = self.sinks or self.scale is not None or self.cap is not None
        return self.out_bias or self.wide_norm or other_scores or self.rope != ROPE

    @property
    def factor(self) -> float:
        """The factor by which attention scores are multiplied before the softmax."""
        return self.width**-0.5 if self.scale is None else self.scale

    def widths(self) -> dict[str, int]:
        """Return the numbers of heads and of key/value heads, which tensor parallelism divides."""
        return {"attention heads": self.heads, "key/value heads": self.groups}

    def kept_elements(self, tp: int) -> float:
        """Return the elements per token that a rank keeps for the backward pass: the projection to queries, keys and
        values; a copy of the queries if there are several groups and the norm of queries keeps it; queries and keys
        after RoPE; the result of attention; with a gate, its projection, a float32 copy, and the gated result; with a
        cap, copies of all four in buckets."""
        q, k = self.heads / tp * self.width, self.groups / tp * self.width
        if self.cap is not None:
            return replace(self, cap=None).kept_elements(tp) + 2 * q + 2 * k
        return q + 2 * k + (q if self.normed and self.groups / tp > 1 else 0) + q + k + q + (4 * q if self.gate else 0)

    def attended_elements(self, tp: int) -> tuple[float, float]:
        """Return the elements per token of the queries, and of the keys and values together, on a rank."""
        return self.heads / tp * self.width, 2 * self.groups / tp * self.width

    @property
    def pair_flops(self) -> float:
        """FLOPs of one (query, key) pair: 2 per element of all heads for the score, and 2 to add the weighted value."""
        return 4.0 * self.heads * self.width

    def cache_elements(self, tp: int) -> float:
        """Return the elements of the keys and values that a rank caches per token; a key/value head is never
        divided."""
        return 2 * self.groups / min(tp, self.groups) * self.width

    def gathered_elements(self, tp: int, cp: int) -> float:
        """Return the elements of the keys and values that a rank receives per token of all context-parallel ranks."""
        return 2 * self.groups * self.width / tp


@dataclass(frozen=True)
class AttentionTraits:
    """The softmax attention of a class of models. Where a trait may be a string, it is the key of config.json that says
    whether a model has the trait; see `Attention` for the others.

    windows: the layers with a sliding window: `none`; `all`, if `sliding_window` is a number; `all_if_used`, if
    `use_sliding_window` is also set; `chosen`, the layers that `layer_types` names, and without it all layers from
    `max_window_layers` on; `every_other`, the layers that `layer_types` names, and without it every other layer below
    `max_window_layers`, beginning with the first.
    """

    windows: Literal["none", "all", "all_if_used", "chosen", "every_other"] = "none"
    qkv_bias: bool | str = False
    out_bias: bool | str = False
    qk_norm: bool | str = False
    wide_norm: bool = False
    gate: bool = False
    sinks: bool = False
    # function from the values of config.json to the factor of the scores; None: 1 / sqrt(width)
    scale: Callable[[Mapping[str, Any]], float] | None = None
    cap: str | None = None  # key of config.json with the cap of the scores; None: no cap

    def with_sizes(self, values: Mapping[str, Any], heads: int, groups: int, width: int) -> Attention:
        """Return the attention of a layer without a window, of these sizes.

        Traits, such as a gate, that depend on the model are read from `values`, its config.json.
        """

        def has(trait: bool | str) -> bool:
            return values[trait] if isinstance(trait, str) else trait

        return Attention(
            heads=heads,
            groups=groups,
            width=width,
            qk_norm=has(self.qk_norm),
            qkv_bias=has(self.qkv_bias),
            gate=self.gate,
            sinks=self.sinks,
            wide_norm=self.wide_norm,
            out_bias=has(self.out_bias),
            scale=self.scale(values) if self.scale else None,
            cap=values[self.cap] if self.cap else None,
        )


def attention_rules(*, norms: Norms = "before", fused: bool = False, gate: bool = False) -> tuple[WeightRule, ...]:
    """Return the rules for a layer's attention projections and for all norms of the layer.

    Biases and norms that a model does not have have no elements.

    Args:
        norms: where the layer has norms, see `Wiring`.
        fused: checkpoints have the projections to queries, keys and values as one tensor.
        gate: the projection to queries also has the output gate, for each head after its query.
    """

    def rule(param: str, split: Split, *sources: WeightSource, needs: tuple[str, ...] = ()) -> WeightRule:
        return WeightRule(f"{MCORE}self_attention.{param}", Attention.kind, split, sources, needs=needs)

    def source(name: str, *shape: str) -> WeightSource:
        return WeightSource(f"{HF}self_attn.{name}", shape)

    names = (("q", "query"), ("k", "kv"), ("v", "kv"))
    split, weights = QKV, names
    if gate:
        split, weights = GATED_QKV, (("q", "query_and_gate"), *names[1:])
    if fused:
        qkv = rule("linear_qkv.weight", FUSED_QKV, source("qkv_proj.weight", "qkv", "hidden"))
    else:
        qkv = rule("linear_qkv.weight", split, *(source(f"{n}_proj.weight", rows, "hidden") for n, rows in weights))
    first, *others = norm_rules(norms)
    return (
        first,
        qkv,
        rule("linear_qkv.bias", split, *(source(f"{n}_proj.bias", f"{rows}_bias") for n, rows in names)),
        rule("q_layernorm.weight", COPY, source("q_norm.weight", "normed_head")),
        rule("k_layernorm.weight", COPY, source("k_norm.weight", "normed_head")),
        rule("q_layernorm.weight", ROWS, source("q_norm.weight", "normed_query")),
        rule("k_layernorm.weight", ROWS, source("k_norm.weight", "normed_kv")),
        rule("linear_proj.weight", COLUMNS, source("o_proj.weight", "hidden", "query")),
        rule("core_attention.softmax_offset", ROWS, source("sinks", "sinks")),
        rule("linear_proj.bias", COPY, source("o_proj.bias", "hidden"), needs=("out_bias",)),
        *others,
    )


def _groups(parts: list[tuple[str, int, int]], tail: tuple[int, ...], groups: range) -> Cut:
    """Return how to cut the parameter of the query, key and value projections from a checkpoint's tensors: the rows of
    each key/value group are side by side.

    Args:
        parts: for queries, keys and values each: the source tensor, its first row, and its rows per group.
        tail: shape of a row.
        groups: numbers of the groups that the parameter contains.
    """
    pieces, offset = [], 0
    for group in groups:
        for name, first, height in parts:
            start = first + group * height
            source_region = ((start, start + height), *whole(tail))
            pieces.append(Piece(name, source_region, ((offset, offset + height), *whole(tail))))
            offset += height
    return (offset, *tail), tuple(pieces)


def _of_rank(ways: int, rank: int, size: dict[str, int]) -> range:
    groups = size["groups"] // ways
    return range(rank * groups, (rank + 1) * groups)


def _qkv(sources: Sources, ways: int, rank: int, size: dict[str, int]) -> Cut:
    parts = [(name, 0, shape[0] // size["groups"]) for name, shape in sources]
    return _groups(parts, sources[0][1][1:], _of_rank(ways, rank, size))


def _fused_qkv(sources: Sources, ways: int, rank: int, size: dict[str, int]) -> Cut:
    ((name, (_, *tail)),) = sources
    query, kv = size["query"], size["kv"]
    places = ((0, query), (query, kv), (query + kv, kv))
    parts = [(name, first, rows // size["groups"]) for first, rows in places]
    return _groups(parts, tuple(tail), _of_rank(ways, rank, size))


def _gated_qkv(sources: Sources, ways: int, rank: int, size: dict[str, int]) -> Cut:
    head = size["head"]
    per = size["query"] // size["groups"] // head
    (q, _), (k, _), (v, _) = sources
    pieces, offset = [], 0
    tail = whole(sources[0][1][1:])
    for group in _of_rank(ways, rank, size):
        queries = [2 * (group * per + number) * head for number in range(per)]
        firsts = [(q, row) for row in queries] + [(q, row + head) for row in queries]
        for name, row in (*firsts, (k, group * head), (v, group * head)):
            pieces.append(Piece(name, ((row, row + head), *tail), ((offset, offset + head), *tail)))
            offset += head
    return (offset, *sources[0][1][1:]), tuple(pieces)


QKV = Split("qkv", "rows", _qkv)  # by rows: for each key/value group its query heads, its key and its value
#: like QKV, from one tensor with all queries, then all keys, then all values
FUSED_QKV = Split("fused_qkv", "rows", _fused_qkv)
#: by rows: for each key/value group its query heads, their gates, its key and its value
GATED_QKV = Split("gated_qkv", "rows", _gated_qkv)
