"""The tensors outside the layers, and the number of a model's parameters, which is that of its table of tensors.

An architecture's file composes the table from these and from the rules of its kinds of layers (`megarl.models.layers`).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Literal

from megarl.models.layers.rules import COPY, VOCAB, WeightRule, WeightSource

ModelPart = Literal["tower", "merger", "action_expert", "language_model"]
"""The vision tower; what turns its features, and a robot's state, into embeddings; the expert that denoises actions;
everything else."""
_MERGERS = ("visual.merger.", "visual.deepstack_merger_list.", "vision.projector.", "vision.proprio_projector.")


def part_of(parameter: str) -> ModelPart:
    """Return the part of a model to which a parameter belongs, by its name in the first pipeline chunk.

    >>> part_of("visual.merger.mlp.0.weight")
    'merger'
    """
    if parameter.startswith(_MERGERS):
        return "merger"
    if parameter.startswith("vision.expert."):
        return "action_expert"
    return "tower" if parameter.startswith(("visual.", "vision.")) else "language_model"


EMBEDDINGS, HEAD = "model.embed_tokens.weight", "lm_head.weight"
_EMBEDDING = WeightSource(EMBEDDINGS, ("vocab", "hidden"))
OUTER = (
    WeightRule("embedding.word_embeddings.weight", "embedding", VOCAB, (_EMBEDDING,)),
    WeightRule("decoder.final_layernorm.weight", "final", COPY, (WeightSource("model.norm.weight", ("hidden",)),)),
)

UNTIED_HEAD = WeightRule("output_layer.weight", "head", VOCAB, (WeightSource(HEAD, ("vocab", "hidden")),))
TIED_HEAD = WeightRule("output_layer.weight", "head", VOCAB, (_EMBEDDING,))
VALUE_HEAD = WeightRule("output_layer.weight", "head", COPY, (WeightSource("score.weight", ("one", "hidden")),))
VALUE_BIAS = WeightRule("output_layer.bias", "head", COPY, (WeightSource("score.bias", ("one",)),))


def is_of_value_head(name: str) -> bool:
    """Return whether a checkpoint's tensor belongs to a value head. The name may have a prefix, as for robot policies.

    >>> is_of_value_head("language_model.score.weight"), is_of_value_head("lm_head.weight")
    (True, False)
    """
    return name.endswith(("score.weight", "score.bias"))


_OF_PART = {"layer": "norms", "dense": "mlp", "moe": "router", "expert": "experts", "final": "final_norm"}


def component(rule: WeightRule) -> str:
    """Return the component of a model to which a tensor belongs: `embedding`, `norms` (of layers), the kind of a mixer
    such as `attention`, `router`, `experts`, `shared` (experts), `mlp`, `final_norm` or `head`."""
    return _OF_PART.get(rule.part, rule.part)


@dataclass(frozen=True)
class Elements:
    """The number of parameters of one component of a model, such as its attention."""

    matrices: int = 0  # elements of weight matrices
    vectors: int = 0  # elements of biases and scales

    @property
    def all(self) -> int:
        """Number of parameters."""
        return self.matrices + self.vectors


def elements(table: Iterable[WeightRule], size: Mapping[str, int]) -> dict[str, Elements]:
    """Return the parameter count of each component; for one that repeats per layer or per expert, the count of a single
    layer or expert.

    Args:
        table: tensors of the architecture, including its head.
        size: sizes from `megarl.architectures.values.dimensions`.
    """
    counts: dict[str, Elements] = {}
    for rule in table:
        name = component(rule)
        for source in () if rule.buffer else rule.sources:
            count, matrix = math.prod(size[dimension] for dimension in source.shape), len(source.shape) > 1
            so_far = counts.get(name, Elements())
            counts[name] = Elements(so_far.matrices + matrix * count, so_far.vectors + (not matrix) * count)
    return counts
