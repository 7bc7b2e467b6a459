"""Mixtures of experts: their weights, without torch."""

from __future__ import annotations

from megarl.models.layers.mlp.plain import mlp_rules
from megarl.models.layers.rules import COPY, HF, MCORE, WeightRule, WeightSource


def expert_rules(block: str, gate: str, up: str, down: str) -> tuple[WeightRule, ...]:
    """Return the rules for a layer's router and experts, from the Hugging Face names of the block and its
    projections."""
    names = (f"{HF}{block}.experts.{{e}}.{name}.weight" for name in (gate, up, down))
    router = WeightSource(f"{HF}{block}.gate.weight", ("experts", "hidden"))
    return (
        WeightRule(f"{MCORE}mlp.router.weight", "moe", COPY, (router,)),
        *mlp_rules(f"{MCORE}mlp.experts.", "expert", "expert_ffn", *names),
    )
