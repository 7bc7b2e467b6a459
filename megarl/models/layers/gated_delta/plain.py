"""Sizes, weights, work and memory of the gated delta net of Qwen3-Next and Qwen3.5, without torch.

    hidden --in_proj--> Q | K | V | z | b | a          Q, K: key heads x dk;  V, z: value heads x dv;  b, a: value heads
    Q | K | V --causal convolution, silu--> q, k, v --gated delta rule (b, a)--> o --norm, silu(z), out_proj--> hidden

Each key head serves `per` consecutive value heads. Parameters have the sections in this order, each cut by tensor
parallelism, so that a rank has whole key heads with their value heads. Checkpoints of Qwen3.5 have the same sections;
those of Qwen3-Next have the rows of Q, K, V and z, and those of b and a, by key head.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

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

CHUNK = 64
"""Tokens of a chunk of the rule, see `megarl.models.layers.gated_delta.rule`."""
_STATE_BYTES = 4  # the state is float32


@dataclass(frozen=True, kw_only=True)
class GatedDelta(Mixer):
    """The gated delta net of one layer.

    key_heads, value_heads: their numbers. key, value: widths of a head. taps: width of the convolution.
    """

    kind: ClassVar[str] = "gated_delta"

    key_heads: int
    value_heads: int
    key: int
    value: int
    taps: int

    @property
    def per(self) -> int:
        """Value heads per key head."""
        return self.value_heads // self.key_heads

    def sections(self, tp: int) -> dict[str, int]:
        """Return the number of output rows of each section of the input projection on a rank; the causal convolution
        reads query, key and value.
        """
        keys, values = self.key_heads * self.key // tp, self.value_heads * self.value // tp
        heads = self.value_heads // tp
        return {"query": keys, "key": keys, "value": values, "z": values, "beta": heads, "alpha": heads}

    def channels(self, tp: int) -> int:
        """Return the number of channels of the causal convolution on a rank."""
        return (2 * self.key_heads * self.key + self.value_heads * self.value) // tp

    def dimensions(self) -> dict[str, int]:
        """Return the sizes that the weight rules of gated delta nets use, by name."""
        values = self.value_heads * self.value
        return {
            "delta_key_heads": self.key_heads,
            "delta_keys": self.key_heads * self.key,
            "delta_channels": self.channels(1),
            "delta_channels_and_z": self.channels(1) + values,
            "delta_heads": self.value_heads,
            "delta_beta_and_alpha": 2 * self.value_heads,
            "delta_values": values,
            "delta_value": self.value,
            "delta_taps": self.taps,
        }

    def widths(self) -> dict[str, int]:
        """Return the number of key heads, which the tensor-parallel size must divide."""
        return {"key heads of the gated delta net": self.key_heads}

    def kept_elements(self, tp: int) -> float:
        """Return the elements per token that a rank keeps for the backward pass: the input projection; the
        convolution's result; queries and keys of every value head, and the chunks' triangular matrices; the rule's
        result before and after its norm."""
        heads = self.value_heads / tp
        projected = 2 * self.channels(1) / tp + heads * (self.value + 2)
        return projected + heads * (2 * self.key + CHUNK + 2 * self.value)

    @property
    def token_flops(self) -> float:
        """FLOPs of the gated delta rule, computed in chunks: products of keys and queries within a chunk, the chunk's
        triangular system, and products with the state."""
        state = 6 * self.key * self.value
        return float(self.value_heads * (state + CHUNK * (5 * self.key + 3 * self.value)))

    def state_bytes(self, tp: int, element: int) -> float:
        """Return the bytes of the float32 state and of the last inputs of the convolution."""
        state = self.value_heads / tp * self.key * self.value * _STATE_BYTES
        return state + (self.taps - 1) * self.channels(1) / tp * element

    def gathered_elements(self, tp: int, cp: int) -> float:
        """Return the elements per token that a rank receives from context-parallel ranks: tokens are exchanged for
        heads before the convolution, and the results are exchanged back."""
        values = self.value_heads * self.value
        return (self.channels(1) + 2 * self.value_heads + values) / (tp * cp)

    def context_widths(self) -> dict[str, int]:
        """Return the number of key heads, which tensor and context parallelism divide together: a state is never
        divided, so a rank reads whole sequences for a part of the heads."""
        return self.widths()


def gated_delta_of(values: Mapping[str, Any]) -> GatedDelta:
    """Return the gated delta net of a config with Qwen's keys."""
    return GatedDelta(
        key_heads=values["linear_num_key_heads"],
        value_heads=values["linear_num_value_heads"],
        key=values["linear_key_head_dim"],
        value=values["linear_value_head_dim"],
        taps=values["linear_conv_kernel_dim"],
    )


def gated_delta_rules(*, by_key_head: bool) -> tuple[WeightRule, ...]:
    """Return the rules for a layer's gated delta net; parameters are named as in Megatron's GatedDeltaNet.

    Args:
        by_key_head: checkpoints have the rows of the input projection by key head (Qwen3-Next), not by section.
    """

    def rule(param: str, split: Split, *sources: tuple[str, ...]) -> WeightRule:
        tensors = tuple(WeightSource(f"{HF}linear_attn.{name}", tuple(shape)) for name, *shape in sources)
        return WeightRule(f"{MCORE}self_attention.{param}", GatedDelta.kind, split, tensors)

    if by_key_head:
        projection = rule(
            "in_proj.weight",
            BY_KEY_HEAD,
            ("in_proj_qkvz.weight", "delta_channels_and_z", "hidden"),
            ("in_proj_ba.weight", "delta_beta_and_alpha", "hidden"),
        )
    else:
        projection = rule(
            "in_proj.weight",
            SECTIONS,
            ("in_proj_qkv.weight", "delta_channels", "hidden"),
            ("in_proj_z.weight", "delta_values", "hidden"),
            ("in_proj_b.weight", "delta_heads", "hidden"),
            ("in_proj_a.weight", "delta_heads", "hidden"),
        )
    return (
        projection,
        rule("conv1d.weight", SECTIONS, ("conv1d.weight", "delta_channels", "one", "delta_taps")),
        rule("A_log", ROWS, ("A_log", "delta_heads")),
        rule("dt_bias", ROWS, ("dt_bias", "delta_heads")),
        rule("out_norm.weight", COPY, ("norm.weight", "delta_value")),
        rule("out_proj.weight", COLUMNS, ("out_proj.weight", "hidden", "delta_values")),
    )


def _cut_rows(sources: Sources, blocks: Iterator[tuple[int, int, int]]) -> Cut:
    """Return the cut of a parameter that consists of blocks of rows of its sources, each (number of the source, first
    row, number of rows)."""
    tail = sources[0][1][1:]
    pieces, offset = [], 0
    for source, first, rows in blocks:
        regions = (((start, start + rows), *whole(tail)) for start in (first, offset))
        pieces.append(Piece(sources[source][0], *regions))
        offset += rows
    return (offset, *tail), tuple(pieces)


def _sections(sources: Sources, ways: int, rank: int, size: dict[str, int]) -> Cut:
    def blocks() -> Iterator[tuple[int, int, int]]:
        keys = size["delta_keys"]
        for number, (_, shape) in enumerate(sources):
            first = 0
            for rows in (keys, keys, shape[0] - 2 * keys) if number == 0 else (shape[0],):
                yield number, first + rank * (rows // ways), rows // ways
                first += rows

    return _cut_rows(sources, blocks())


def _by_key_head(sources: Sources, ways: int, rank: int, size: dict[str, int]) -> Cut:
    heads = size["delta_key_heads"]
    keys, values, per = (size[name] // heads for name in ("delta_keys", "delta_values", "delta_heads"))

    def blocks() -> Iterator[tuple[int, int, int]]:
        for number, parts in enumerate(((keys, keys, values, values), (per, per))):
            first = 0
            for rows in parts:
                for head in range(rank * heads // ways, (rank + 1) * heads // ways):
                    yield number, head * sum(parts) + first, rows
                first += rows

    return _cut_rows(sources, blocks())


#: Tensor parallelism divides the rows of each section of the projection. In a checkpoint Q, K and V follow one another
#: in the first tensor, and each further tensor is one section.
SECTIONS = Split("sections", "rows", _sections)
#: Like SECTIONS, but for checkpoints whose first tensor has, key head after key head, the rows of Q, K, V and z, and
#: whose second tensor has those of b and a.
BY_KEY_HEAD = Split("by_key_head", "rows", _by_key_head)
