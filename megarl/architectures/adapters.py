"""The tensors of low-rank adapters on the linear layers of an architecture.

Each projection of the base model, W [out, in], has lora_A [rank, in] and lora_B [out, rank]. A parameter of Megatron
holds several projections, and its adapter too, in the same order, so that tensor parallelism divides B as it divides
W where that is split by rows, and A where it is split by columns; the other one is whole on every rank:

    W = [q; k; v] or [gate; up]    `a` = [A_q; A_k; A_v]    whole      `b`: rows in the order of W's   split as W
    W of o_proj or down_proj       `a` = A                  split as W `b` = B                         whole

Of experts, a parameter holds the tensors of each one below those of the one before, as it does for their weights.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator

from megarl.architectures.tensors import Part, WeightRule, WeightSource

MODULE = "adapter"
"""Adapters are a module of this name inside the linear layer that they are added to."""
DOWN, UP = ".lora_A.weight", ".lora_B.weight"
TARGETS: dict[Part, str] = {"layer": "attention", "dense": "mlp", "expert": "experts"}
"""Names in `model.lora.targets` of the parts of a model whose linear layers may have adapters."""
DEFAULT_TARGETS = ("attention", "mlp")
"""The targets of `model.lora.targets=null`: adapters of experts are as many as those, and are asked for by name."""


def is_adapter(param: str) -> bool:
    """Tell whether a parameter of a chunk is one of an adapter, by its name."""
    return f".{MODULE}." in param


def adapter_rules(table: tuple[WeightRule, ...], targets: Collection[str] | None) -> Iterator[WeightRule]:
    """Yield the rules of the adapters for the linear layers of a table of weights; `targets`: None selects the default
    ones.

    Sources are named as those of the weights, with `lora_A.weight` or `lora_B.weight` in place of `weight`. Their
    shapes name the size `rank` too.
    """
    wanted = DEFAULT_TARGETS if targets is None else targets
    for rule in table:
        target = TARGETS.get(rule.part)
        linear = rule.split in ("qkv", "gate_up", "row") and rule.param.endswith(".weight")
        if target not in wanted or not linear:
            continue
        stem = f"{rule.param.removesuffix('weight')}{MODULE}."
        down, up = [], []
        for source in rule.sources:
            name, (rows, columns) = source.name.removesuffix(".weight"), source.shape
            down.append(WeightSource(name + DOWN, ("rank", columns)))
            up.append(WeightSource(name + UP, (rows, "rank")))
        by_columns = rule.split == "row"  # of the weight
        yield WeightRule(f"{stem}a", rule.part, "row" if by_columns else "stack", tuple(down))
        yield WeightRule(f"{stem}b", rule.part, "stack" if by_columns else rule.split, tuple(up))
