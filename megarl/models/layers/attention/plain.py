"""Softmax attention with grouped queries: sizes, weights, work and memory, without torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from megarl.models.layers.mixer import Mixer
from megarl.models.layers.rules import (
    COLUMNS,
    HF,
    MCORE,
    ROWS,
    Cut,
    Piece,
    Sources,
    Split,
    WeightRule,
    WeightSource,
    norm,
    whole,
)


@dataclass(frozen=True)
class Attention(Mixer):
    """Softmax attention of one layer."""

    kind: ClassVar[str] = "attention"
    heads: int = 0
    groups: int = 0  # key/value heads
    width: int = 0  # width of a head
    qk_norm: bool = False  # queries and keys are normalised per head
    qkv_bias: bool = False  # the projections to queries, keys and values have biases
    gate: bool = False  # the result of each head is multiplied by the sigmoid of a projection of the hidden state
    wide_norm: bool = False  # queries and keys are normalised over all heads together

    def dimensions(self) -> dict[str, int]:
        """Implement `Mixer.dimensions`."""
        return {
            "head": self.width,
            "groups": self.groups,
            "query": self.heads * self.width,
            "query_and_gate": 2 * self.heads * self.width,
            "kv": self.groups * self.width,
            "normed_head": self.width if self.qk_norm else 0,
            "normed_query": self.heads * self.width if self.wide_norm else 0,
            "normed_kv": self.groups * self.width if self.wide_norm else 0,
            "query_bias": self.heads * self.width if self.qkv_bias else 0,
            "kv_bias": self.groups * self.width if self.qkv_bias else 0,
        }

    def widths(self) -> dict[str, int]:
        """Implement `Mixer.widths`."""
        return {"attention heads": self.heads, "key/value heads": self.groups}

    def kept_elements(self, tp: int) -> float:
        """Implement `Mixer.kept_elements`: the projection to queries, keys and values; a copy of the queries if there
        are several groups and the norm of queries keeps it; queries and keys after RoPE; the result of attention; with
        a gate, its projection, a float32 copy, and the gated result."""
        q, k = self.heads / tp * self.width, self.groups / tp * self.width
        return q + 2 * k + (q if self.qk_norm and self.groups / tp > 1 else 0) + q + k + q + (4 * q if self.gate else 0)

    def attended_elements(self, tp: int) -> tuple[float, float]:
        """Implement `Mixer.attended_elements`."""
        return self.heads / tp * self.width, 2 * self.groups / tp * self.width

    @property
    def pair_flops(self) -> float:
        """2 FLOPs per element of all heads for the score, and 2 to add the weighted value."""
        return 4.0 * self.heads * self.width

    def cache_elements(self, tp: int) -> float:
        """Implement `Mixer.cache_elements`."""
        return 2 * self.groups / min(tp, self.groups) * self.width

    def gathered_elements(self, tp: int) -> float:
        """Implement `Mixer.gathered_elements`."""
        return 2 * self.groups * self.width / tp


def attention_rules(*, gate: bool = False) -> tuple[WeightRule, ...]:
    """Return the rules for a layer's attention projections and norms, and for the norm before its MLP.

    Biases and norms that a model does not have have no elements. `gate`: the projection to queries also has the output
    gate, for each head after its query.
    """

    def qkv(what: str, sizes: tuple[str, str], *tail: str) -> WeightRule:
        names = zip(("q", "k", "v"), (sizes[0], sizes[1], sizes[1]), strict=True)
        sources = tuple(WeightSource(f"{HF}self_attn.{n}_proj.{what}", (rows, *tail)) for n, rows in names)
        split = GATED_QKV if gate else QKV
        return WeightRule(f"{MCORE}self_attention.linear_qkv.{what}", Attention.kind, split, sources)

    rules = [
        norm("input_layernorm", "input_layernorm", "hidden"),
        qkv("weight", ("query_and_gate" if gate else "query", "kv"), "hidden"),
    ]
    rules.append(qkv("bias", ("query_bias", "kv_bias")))
    rules.append(norm("self_attention.q_layernorm", "self_attn.q_norm", "normed_head", Attention.kind))
    rules.append(norm("self_attention.k_layernorm", "self_attn.k_norm", "normed_head", Attention.kind))
    for name, size in (("q", "normed_query"), ("k", "normed_kv")):
        source = WeightSource(f"{HF}self_attn.{name}_norm.weight", (size,))
        rules.append(WeightRule(f"{MCORE}self_attention.{name}_layernorm.weight", Attention.kind, ROWS, (source,)))
    out = WeightSource(f"{HF}self_attn.o_proj.weight", ("hidden", "query"))
    rules.append(WeightRule(f"{MCORE}self_attention.linear_proj.weight", Attention.kind, COLUMNS, (out,)))
    rules.append(norm("pre_mlp_layernorm", "post_attention_layernorm", "hidden"))
    return tuple(rules)


def _qkv(sources: Sources, ways: int, rank: int, size: dict[str, int]) -> Cut:
    groups = size["groups"] // ways
    heights = [shape[0] // size["groups"] for _, shape in sources]
    tail = whole(sources[0][1][1:])
    pieces, offset = [], 0
    for group in range(rank * groups, (rank + 1) * groups):
        for (name, _), height in zip(sources, heights, strict=True):
            source_rows = (group * height, (group + 1) * height)
            pieces.append(Piece(name, (source_rows, *tail), ((offset, offset + height), *tail)))
            offset += height
    return (offset, *sources[0][1][1:]), tuple(pieces)


QKV = Split("qkv", "rows", _qkv)  # by rows: for each key/value group its query heads, its key and its value


def _gated_qkv(sources: Sources, ways: int, rank: int, size: dict[str, int]) -> Cut:
    groups, head = size["groups"] // ways, size["head"]
    per = size["query"] // size["groups"] // head
    tail = whole(sources[0][1][1:])
    pieces, offset = [], 0
    for group in range(rank * groups, (rank + 1) * groups):
        queries = [2 * (group * per + number) * head for number in range(per)]
        firsts = [(0, row) for row in queries] + [(0, row + head) for row in queries]
        for source, row in (*firsts, (1, group * head), (2, group * head)):
            target = ((offset, offset + head), *tail)
            pieces.append(Piece(sources[source][0], ((row, row + head), *tail), target))
            offset += head
    return (offset, *sources[0][1][1:]), tuple(pieces)


#: By rows: for each key/value group its query heads, their gates, its key and its value.
GATED_QKV = Split("gated_qkv", "rows", _gated_qkv)
