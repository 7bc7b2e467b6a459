"""The tensors of an architecture: the Megatron parameter to which each Hugging Face tensor belongs, and its shape.

`{i}` is the layer number, global in Hugging Face names and local to the chunk in Megatron names; `{e}` is the expert.
One Megatron parameter holds the tensors of all experts of a process. An architecture's file composes its table from
these parts. The number of a model's parameters is that of its table.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Literal

Part = Literal["embedding", "layer", "dense", "moe", "expert", "final", "head"]
Split = Literal["copy", "stack", "vocab", "row", "qkv", "gate_up"]
ModelPart = Literal["tower", "merger", "language_model"]
"""The vision tower; what turns its features, and a robot's state, into embeddings; and everything else."""
_MERGERS = ("visual.merger.", "visual.deepstack_merger_list.", "vision.projector.", "vision.proprio_projector.")


def part_of(parameter: str) -> ModelPart:
    """Return the part of a model to which a parameter belongs, by its name in the first pipeline chunk.

    >>> part_of("visual.merger.mlp.0.weight")
    'merger'
    """
    if parameter.startswith(_MERGERS):
        return "merger"
    return "tower" if parameter.startswith(("visual.", "vision.")) else "language_model"


@dataclass(frozen=True)
class WeightSource:
    """A Hugging Face tensor; `shape` has names of sizes from `megarl.architectures.values.dimensions`."""

    name: str
    shape: tuple[str, ...]


@dataclass(frozen=True)
class WeightRule:
    """One Megatron parameter and the tensors from which it is built.

    part: the layers and pipeline chunks that have it. split: how tensor parallelism splits it (`copy`: not at all;
    `stack`: not at all, with sources concatenated by rows; `vocab`: by rows, the last padded; `row`: by columns of the
    weight; `qkv`: by rows, interleaved by key/value group; `gate_up`: by rows of the gate and of the up projection).
    For experts, `sources` are those of each expert.
    """

    param: str
    part: Part
    split: Split
    sources: tuple[WeightSource, ...]


_HF, _MCORE = "model.layers.{i}.", "decoder.layers.{i}."


def attention(*, bias: bool = False, qk_norm: bool = False) -> tuple[WeightRule, ...]:
    """Return the rules for a layer's attention projections and norms, and the norm before its MLP."""

    def qkv(kind: str, *tail: str) -> WeightRule:
        names = (("q", "query"), ("k", "kv"), ("v", "kv"))
        sources = tuple(WeightSource(f"{_HF}self_attn.{n}_proj.{kind}", (rows, *tail)) for n, rows in names)
        return WeightRule(f"{_MCORE}self_attention.linear_qkv.{kind}", "layer", "qkv", sources)

    def norm(param: str, source: str, size: str) -> WeightRule:
        return WeightRule(f"{_MCORE}{param}.weight", "layer", "copy", (WeightSource(f"{_HF}{source}.weight", (size,)),))

    rules = [norm("input_layernorm", "input_layernorm", "hidden"), qkv("weight", "hidden")]
    if bias:
        rules.append(qkv("bias"))
    if qk_norm:
        rules.append(norm("self_attention.q_layernorm", "self_attn.q_norm", "head"))
        rules.append(norm("self_attention.k_layernorm", "self_attn.k_norm", "head"))
    out = WeightSource(f"{_HF}self_attn.o_proj.weight", ("hidden", "query"))
    rules.append(WeightRule(f"{_MCORE}self_attention.linear_proj.weight", "layer", "row", (out,)))
    rules.append(norm("pre_mlp_layernorm", "post_attention_layernorm", "hidden"))
    return tuple(rules)


def _mlp(param: str, part: Part, width: str, gate: str, up: str, down: str) -> tuple[WeightRule, ...]:
    halves = (WeightSource(gate, (width, "hidden")), WeightSource(up, (width, "hidden")))
    return (
        WeightRule(f"{param}linear_fc1.weight", part, "gate_up", halves),
        WeightRule(f"{param}linear_fc2.weight", part, "row", (WeightSource(down, ("hidden", width)),)),
    )


def experts(block: str, gate: str, up: str, down: str) -> tuple[WeightRule, ...]:
    """Return the rules for a layer's router and experts, from the Hugging Face names of the block and its
    projections."""
    names = (f"{_HF}{block}.experts.{{e}}.{name}.weight" for name in (gate, up, down))
    router = WeightSource(f"{_HF}{block}.gate.weight", ("experts", "hidden"))
    return (
        WeightRule(f"{_MCORE}mlp.router.weight", "moe", "copy", (router,)),
        *_mlp(f"{_MCORE}mlp.experts.", "expert", "expert_ffn", *names),
    )


EMBEDDINGS, HEAD = "model.embed_tokens.weight", "lm_head.weight"
_EMBEDDING = WeightSource(EMBEDDINGS, ("vocab", "hidden"))
OUTER = (
    WeightRule("embedding.word_embeddings.weight", "embedding", "vocab", (_EMBEDDING,)),
    WeightRule("decoder.final_layernorm.weight", "final", "copy", (WeightSource("model.norm.weight", ("hidden",)),)),
)
DENSE = _mlp(f"{_MCORE}mlp.", "dense", "ffn", *(f"{_HF}mlp.{name}_proj.weight" for name in ("gate", "up", "down")))

UNTIED_HEAD = WeightRule("output_layer.weight", "head", "vocab", (WeightSource(HEAD, ("vocab", "hidden")),))
TIED_HEAD = WeightRule("output_layer.weight", "head", "vocab", (_EMBEDDING,))
VALUE_HEAD = WeightRule("output_layer.weight", "head", "copy", (WeightSource("score.weight", ("one", "hidden")),))
VALUE_BIAS = WeightRule("output_layer.bias", "head", "copy", (WeightSource("score.bias", ("one",)),))

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
