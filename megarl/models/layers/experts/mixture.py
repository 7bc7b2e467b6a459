"""The sizes and routing rules of a mixture of experts, without torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class RouterRules:
    """How a router turns a token's logits into experts and their weights.

    score: the function from logits to scores, by which experts are chosen and weighted; `softmax_of_chosen` chooses by
    the logits and takes the softmax over the chosen ones only, which equals a normalised `softmax`.
    """

    experts: int
    chosen: int  # experts per token
    score: Literal["softmax", "sigmoid", "softmax_of_chosen"]
    normalized: bool = False  # divide the weights of a token by their sum plus `epsilon`
    epsilon: float = 0.0
    scale: float = 1.0  # factor of all weights
    groups: int = 1  # experts are chosen within the `chosen_groups` groups with the largest sum of two scores
    chosen_groups: int = 1
    correction: bool = False  # a float32 bias is added to the scores for the choice, not for the weights
    bias: bool = False  # the router's linear layer has a bias
    wide: bool = True  # logits are computed in float32, otherwise in the model's dtype


@dataclass(frozen=True)
class ClampedGate:
    """The activation (up + 1) * gate * sigmoid(alpha * gate), with gate <= limit and -limit <= up <= limit."""

    limit: float
    alpha: float


@dataclass(frozen=True)
class Mixture:
    """A layer's routed experts, and the MLP that all tokens share."""

    router: RouterRules
    width: int  # of one expert's MLP
    shared_width: int = 0  # of the MLP that every token passes; 0: none
    shared_gate: bool = False  # the shared MLP's output is multiplied by sigmoid(w x)
    bias: bool = False  # experts' projections have biases
    clamped: ClampedGate | None = None  # None: SwiGLU
