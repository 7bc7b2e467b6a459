"""The tensors of low-rank adapters for the linear layers of an architecture.

Each projection W [out, in] of the base model has lora_A [rank, in] and lora_B [out, rank]. A parameter of Megatron
combines several projections, and its adapter does, too, in the same order. So tensor parallelism splits B as it splits
W, if W is split by rows, or A, if W is split by columns; the other one is whole on every rank:

    W = [q; k; v] or [gate; up]    `a` = [A_q; A_k; A_v]    whole      `b`: rows in the order of W's   split as W
    W of o_proj or down_proj       `a` = A                  split as W `b` = B                         whole
    W that is not split            `a` = A                  whole      `b` = B                         whole

An adapter parameter of experts concatenates those of all experts by rows, as the weight does. Experts that checkpoints
have in one tensor [experts, in, out] have the same adapters, one for gate and up together; PEFT has those of a layer in
one A and one B (`megarl.models.weights.peft`).

The linear layers of a vision encoder are whole on every rank, and so are their adapters.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping

from megarl.architectures.tensors import part_of
from megarl.models.layers.rules import COLUMNS, ROWS, STACK, WeightRule, WeightSource

MODULE = "adapter"
"""Name of the adapter module inside the linear layer to which it is added."""
DOWN, UP = ".lora_A.weight", ".lora_B.weight"
TARGETS = {
    **dict.fromkeys(("attention", "gated_delta", "mla"), "attention"),
    "dense": "mlp",
    "shared": "mlp",
    "expert": "experts",
}
"""Names in `model.lora.targets` of the parts of a model whose linear layers can have adapters."""
DEFAULT_TARGETS = ("attention", "mlp")
"""The targets of `model.lora.targets=null`; adapters of experts are many, so they must be named."""
VISION_TARGETS = ("tower", "merger")
"""The parts of a vision encoder whose linear layers can have adapters; they must be named."""

_TRANSPOSED = {COLUMNS.name: ROWS, ROWS.name: COLUMNS}


def is_adapter(param: str) -> bool:
    """Return whether a chunk's parameter belongs to an adapter, by its name."""
    return f".{MODULE}." in param


def adapter_rules(table: tuple[WeightRule, ...], targets: Collection[str] | None) -> Iterator[WeightRule]:
    """Yield the adapter rules for the linear layers in a table of weights; `targets` None selects the default layers.

    Source names are those of the weights with `lora_A.weight` or `lora_B.weight` in place of `weight`; in a stack of
    experts each expert has a name. Their shapes also use the size `rank`.
    """
    wanted = DEFAULT_TARGETS if targets is None else targets
    for rule in table:
        target = TARGETS.get(rule.part)
        linear = rule.param.endswith(".weight") and len(rule.sources[0].shape) == 2
        if target not in wanted or not linear:
            continue
        stem = f"{rule.param.removesuffix('weight')}{MODULE}."
        down, up = [], []
        for source in rule.sources:
            name, (rows, columns) = source.name.removesuffix(".weight"), source.shape
            if rule.stacked:
                name, rows, columns = name.replace(".experts.", ".experts.{e}."), columns, rows
            down.append(WeightSource(name + DOWN, ("rank", columns)))
            up.append(WeightSource(name + UP, (rows, "rank")))
        split = _TRANSPOSED.get(rule.split.name, rule.split) if rule.stacked else rule.split
        by_columns = split is COLUMNS  # whether tensor parallelism splits the inputs
        yield WeightRule(f"{stem}a", rule.part, COLUMNS if by_columns else STACK, tuple(down))
        yield WeightRule(f"{stem}b", rule.part, STACK if by_columns else split, tuple(up))


def vision_adapters(
    visual: Mapping[str, tuple[str, tuple[int, ...]]], targets: Collection[str] | None, rank: int
) -> dict[str, tuple[str, tuple[int, ...]]]:
    """Return the adapters of a vision encoder's linear layers, in the form of `visual`: parameter -> name and shape of
    its tensor.

    Args:
        visual: parameters of the encoder, with name and shape of their tensors in a checkpoint.
    """
    adapters: dict[str, tuple[str, tuple[int, ...]]] = {}
    for parameter, (name, shape) in visual.items():
        stem = parameter.removesuffix("weight")
        linear = stem != parameter and len(shape) == 2 and not parameter.endswith("pos_embed.weight")
        if linear and part_of(parameter) in (targets or ()):
            base, (rows, columns) = name.removesuffix(".weight"), shape
            adapters[f"{stem}{MODULE}.a"] = base + DOWN, (rank, columns)
            adapters[f"{stem}{MODULE}.b"] = base + UP, (rows, rank)
    return adapters
