"""Parameter counts of each part of a model, from the table of tensors that loading uses."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from megarl.architectures.tensors import Part, WeightRule

#: Parts of a model. `norms` are those of the layers, including queries and keys.
COMPONENTS = ("embedding", "norms", "attention", "router", "experts", "mlp", "final_norm", "head")


@dataclass(frozen=True)
class Elements:
    """The parameters of one component.

    Attributes:
        matrices: of matrices that tokens are multiplied with.
        vectors: of biases and scales.
    """

    matrices: int = 0
    vectors: int = 0

    @property
    def all(self) -> int:
        """Matrices and vectors."""
        return self.matrices + self.vectors


def elements(table: Iterable[WeightRule], size: Mapping[str, int]) -> dict[str, Elements]:
    """Return the parameters of each component: per layer or per expert for components of layers or experts.

    Args:
        table: tensors of the architecture, with its head.
        size: `megarl.architectures.values.dimensions`.
    """
    found = dict.fromkeys(COMPONENTS, Elements())
    for rule in table:
        name = component(rule)
        for source in rule.sources:
            count, matrix = math.prod(size[dimension] for dimension in source.shape), len(source.shape) > 1
            so_far = found[name]
            found[name] = Elements(so_far.matrices + matrix * count, so_far.vectors + (not matrix) * count)
    return found


_OF_PART: dict[Part, str] = {
    "embedding": "embedding",
    "dense": "mlp",
    "moe": "router",
    "expert": "experts",
    "final": "final_norm",
    "head": "head",
}


def component(rule: WeightRule) -> str:
    """Return the component that a tensor belongs to."""
    if rule.part != "layer":
        return _OF_PART[rule.part]
    return "norms" if "layernorm" in rule.param else "attention"
