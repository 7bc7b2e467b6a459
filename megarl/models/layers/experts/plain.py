"""Mixtures of experts: sizes, routing rules and weights, without torch."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from megarl.models.layers.mlp.plain import mlp_rules
from megarl.models.layers.rules import COLUMNS, COPY, HF, MCORE, ROWS, Split, WeightRule, WeightSource

Score = Literal["softmax", "sigmoid", "softmax_of_chosen"]
BUFFER = "router.expert_bias"
"""The end of the names of correction biases in Megarl's models."""


@dataclass(frozen=True)
class RouterRules:
    """How a router turns a token's logits into experts and their weights.

    score: the function from logits to scores, by which experts are chosen and weighted; `softmax_of_chosen` chooses by
    the logits and takes the softmax over the chosen ones only, which equals a normalised `softmax`.
    """

    experts: int
    chosen: int  # experts per token
    score: Score
    normalized: bool = False  # divide the weights of a token by their sum plus `epsilon`
    epsilon: float = 0.0
    scale: float = 1.0  # factor of all weights
    # experts are chosen within the `chosen_groups` groups whose two highest scores have the largest sums
    groups: int = 1
    chosen_groups: int = 1
    correction: bool = False  # a float32 bias is added to the scores for the choice, not for the weights
    bias: bool = False  # the router's linear layer has a bias
    wide: bool = True  # logits are computed in float32, otherwise in the model's dtype


@dataclass(frozen=True)
class ClampedGate:
    """The activation (up + 1) * gate * sigmoid(alpha * gate), with gate <= limit and -limit <= up <= limit, of a
    projection whose outputs are gate, up, gate, up, ..."""

    limit: float
    alpha: float


@dataclass(frozen=True)
class Mixture:
    """A layer's routed experts, and the MLP that all tokens share."""

    router: RouterRules
    width: int  # width of one expert's MLP
    shared_width: int = 0  # width of the MLP that every token passes; 0: there is none
    shared_gate: bool = False  # the shared MLP's output is multiplied by sigmoid(w x)
    bias: bool = False  # experts' projections have biases
    clamped: ClampedGate | None = None  # the experts' gate; None: SwiGLU
    # parameters are [experts, in, out], as the tensors in checkpoints that have all experts of a layer
    stacked: bool = False


@dataclass(frozen=True)
class MixtureTraits:
    """The mixtures of experts of a class of models.

    describe: returns the mixture of a layer that has one, from the values of config.json.
    names: the field and the other name of the number of experts. transformers stores both in one attribute; if a config
    has both, the name that is not a field of the class is set last and wins. None: the name is `num_experts`.
    optional: a config without experts is a dense model.
    """

    describe: Callable[[Mapping[str, Any]], Mixture]
    names: tuple[str, str] | None = None
    optional: bool = False


def expert_rules(
    block: str, gate: str, up: str, down: str, *, shared: str | None = None, correction: str | None = None
) -> tuple[WeightRule, ...]:
    """Return the rules for a layer's router, its experts, and the MLP that all tokens share.

    Args:
        block: name of the mixture in a checkpoint.
        gate, up, down: names of an expert's projections, and of those of the shared MLP.
        shared: name of the shared MLP in a checkpoint; None: there is none.
        correction: name of the router's correction bias in a checkpoint; None: there is none.
    """
    names = (f"{HF}{block}.experts.{{e}}.{name}.weight" for name in (gate, up, down))
    rules = [_router("router.weight", f"{block}.gate.weight", "experts", "hidden")]
    if correction is not None:
        rules.append(_router(BUFFER, f"{block}.{correction}", "experts", buffer=True))
    rules += mlp_rules(f"{MCORE}mlp.experts.", "expert", "expert_ffn", *names)
    if shared is not None:
        names = (f"{HF}{block}.{shared}.{name}.weight" for name in (gate, up, down))
        rules += mlp_rules(f"{MCORE}mlp.shared_experts.", "shared", "shared_ffn", *names)
    return tuple(rules)


def stacked_expert_rules(block: str) -> tuple[WeightRule, ...]:
    """Return the rules for a layer's router and for its experts with biases. Checkpoints have one tensor for all
    experts, whose weights are [in, out]; `block`: name of the mixture in a checkpoint."""

    def rule(param: str, split: Split, source: str, *shape: str) -> WeightRule:
        tensor = WeightSource(f"{HF}{block}.experts.{source}", shape)
        return WeightRule(f"{MCORE}mlp.experts.{param}", "expert", split, (tensor,), stacked=True)

    return (
        _router("router.weight", f"{block}.router.weight", "experts", "hidden"),
        _router("router.bias", f"{block}.router.bias", "experts"),
        rule("linear_fc1.weight", COLUMNS, "gate_up_proj", "hidden", "expert_gate_up"),
        rule("linear_fc1.bias", ROWS, "gate_up_proj_bias", "expert_gate_up"),
        rule("linear_fc2.weight", ROWS, "down_proj", "expert_ffn", "hidden"),
        rule("linear_fc2.bias", COPY, "down_proj_bias", "hidden"),
    )


def _router(param: str, source: str, *shape: str, buffer: bool = False) -> WeightRule:
    return WeightRule(f"{MCORE}mlp.{param}", "moe", COPY, (WeightSource(f"{HF}{source}", shape),), buffer)


def shared_gate(source: str) -> WeightRule:
    """Return the rule for the gate of the shared MLP, from its Hugging Face name in a layer."""
    param = f"{MCORE}mlp.shared_experts.gate_weight"
    return WeightRule(param, "moe", COPY, (WeightSource(f"{HF}{source}.weight", ("one", "hidden")),))
