"""The gated MLP: its weights, without torch."""

from __future__ import annotations

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


def mlp_rules(param: str, part: str, width: str, gate: str, up: str, down: str) -> tuple[WeightRule, ...]:
    """Return the rules for a gated MLP.

    Args:
        param: beginning of its parameters' names in Megatron.
        part: the layers that have the MLP, such as `dense` (`WeightRule.part`).
        width: name of its inner size.
        gate, up, down: names of its tensors in a checkpoint.
    """
    halves = (WeightSource(gate, (width, "hidden")), WeightSource(up, (width, "hidden")))
    return (
        WeightRule(f"{param}linear_fc1.weight", part, ROWS, halves),
        WeightRule(f"{param}linear_fc2.weight", part, COLUMNS, (WeightSource(down, ("hidden", width)),)),
    )


def _halves(sources: Sources, ways: int, rank: int, size: dict[str, int]) -> Cut:
    ((name, (total, *rest)),) = sources
    half, tail = total // 2, whole(tuple(rest))
    rows = half // ways
    pieces = []
    for number in range(2):
        first = number * half + rank * rows
        target = ((number * rows, (number + 1) * rows), *tail)
        pieces.append(Piece(name, ((first, first + rows), *tail), target))
    return (2 * rows, *rest), tuple(pieces)


HALVES = Split("halves", "rows", _halves)  # an equal block of rows of both halves of a tensor, gate and up
_GATE, _UP, _DOWN = (f"{HF}mlp.{name}_proj." for name in ("gate", "up", "down"))
_BIASES = tuple(WeightSource(f"{name}bias", ("ffn",)) for name in (_GATE, _UP))
DENSE = (
    *mlp_rules(f"{MCORE}mlp.", "dense", "ffn", *(f"{name}weight" for name in (_GATE, _UP, _DOWN))),
    WeightRule(f"{MCORE}mlp.linear_fc1.bias", "dense", ROWS, _BIASES, needs=("mlp_bias",)),
    WeightRule(
        f"{MCORE}mlp.linear_fc2.bias", "dense", COPY, (WeightSource(f"{_DOWN}bias", ("hidden",)),), needs=("mlp_bias",)
    ),
)
#: The MLP of checkpoints that have gate and up as one tensor.
FUSED = (
    WeightRule(
        f"{MCORE}mlp.linear_fc1.weight",
        "dense",
        HALVES,
        (WeightSource(f"{HF}mlp.gate_up_proj.weight", ("gate_up", "hidden")),),
    ),
    DENSE[1],
)
