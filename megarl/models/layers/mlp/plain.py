"""The gated MLP: its weights, without torch."""

from __future__ import annotations

from megarl.models.layers.rules import COLUMNS, HF, MCORE, ROWS, WeightRule, WeightSource


def mlp_rules(param: str, part: str, width: str, gate: str, up: str, down: str) -> tuple[WeightRule, ...]:
    """Return the rules for a gated MLP.

    Args:
        param: beginning of its parameters' names in Megatron.
        part: see `WeightRule`.
        width: name of its inner size.
        gate, up, down: names of its tensors in a checkpoint.
    """
    halves = (WeightSource(gate, (width, "hidden")), WeightSource(up, (width, "hidden")))
    return (
        WeightRule(f"{param}linear_fc1.weight", part, ROWS, halves),
        WeightRule(f"{param}linear_fc2.weight", part, COLUMNS, (WeightSource(down, ("hidden", width)),)),
    )


DENSE = mlp_rules(f"{MCORE}mlp.", "dense", "ffn", *(f"{HF}mlp.{name}_proj.weight" for name in ("gate", "up", "down")))
