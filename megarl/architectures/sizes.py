"""Parameter counts of the parts of a model, from the table of tensors that loading uses."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from megarl.architectures.tensors import Part, WeightRule

#: Parts of a model; `norms` are the norms in layers, including those of queries and keys.
COMPONENTS = ("embedding", "norms", "attention", "router", "experts", "mlp", "final_norm", "head")


@dataclass(frozen=True)
class Elements:
    """The number of parameters of one component."""

    matrices: int = 0  # elements of matrices
    vectors: int = 0  # elements of biases and scales

    @property
    def all(self) -> int:
        """Number of parameters."""
        return self.matrices + self.vectors


def elements(table: Iterable[WeightRule], size: Mapping[str, int]) -> dict[str, Elements]:
    """Return the parameter counts of each component: per layer or per expert for components of layers or experts.

    Args:
        table: tensors of the architecture, including its head.
        size: sizes from `megarl.architectures.values.dimensions`.
    """
    counts = dict.fromkeys(COMPONENTS, Elements())
    for rule in table:
        name = component(rule)
        for source in rule.sources:
            count, matrix = math.prod(size[dimension] for dimension in source.shape), len(source.shape) > 1
            so_far = counts[name]
            counts[name] = Elements(so_far.matrices + matrix * count, so_far.vectors + (not matrix) * count)
    return counts


_OF_PART: dict[Part, str] = {
    "embedding": "embedding",
    "dense": "mlp",
    "moe": "router",
    "expert": "experts",
    "final": "final_norm",
    "head": "head",
}


def component(rule: WeightRule) -> str:
    """Return the component to which a tensor belongs."""
    if rule.part != "layer":
        return _OF_PART[rule.part]
    return "norms" if "layernorm" in rule.param else "attention"
