"""The tensors of low-rank adapters for the linear layers of an architecture.

Each projection W [out, in] of the base model has lora_A [rank, in] and lora_B [out, rank]. A parameter of Megatron
combines several projections, and its adapter does, too, in the same order. So tensor parallelism splits B as it splits
W, if W is split by rows, or A, if W is split by columns; the other one is whole on every rank:

    W = [q; k; v] or [gate; up]    `a` = [A_q; A_k; A_v]    whole      `b`: rows in the order of W's   split as W
    W of o_proj or down_proj       `a` = A                  split as W `b` = B                         whole
    W that is not split            `a` = A                  whole      `b` = B                         whole

An adapter parameter of experts concatenates those of all experts by rows, as the weight does.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator

from megarl.models.layers.rules import COLUMNS, STACK, WeightRule, WeightSource
from megarl.system.errors import ConfigError

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


def is_adapter(param: str) -> bool:
    """Return whether a chunk's parameter belongs to an adapter, by its name."""
    return f".{MODULE}." in param


def refuse_stacks(model_type: str, table: tuple[WeightRule, ...], targets: Collection[str] | None) -> None:
    """Raise an error if `targets` has experts that checkpoints have in stacks, where PEFT cannot name a single one."""
    if "experts" not in (targets or ()) or not any(rule.stacked for rule in table):
        return
    raise ConfigError(
        f"experts of a {model_type} cannot have adapters: checkpoints have all experts of a layer in one tensor",
        where="model.lora.targets",
        found=targets,
        allowed=["attention"],
        fix="set model.lora.targets=[attention]",
    )


def adapter_rules(table: tuple[WeightRule, ...], targets: Collection[str] | None) -> Iterator[WeightRule]:
    """Yield the adapter rules for the linear layers in a table of weights; `targets` None selects the default layers.

    Stacks of experts have none, see `refuse_stacks`. Source names are those of the weights with `lora_A.weight` or
    `lora_B.weight` in place of `weight`. Their shapes also use the size `rank`.
    """
    wanted = DEFAULT_TARGETS if targets is None else targets
    for rule in table:
        target = TARGETS.get(rule.part)
        linear = rule.param.endswith(".weight") and len(rule.sources[0].shape) == 2
        if target not in wanted or not linear or rule.stacked:
            continue
        stem = f"{rule.param.removesuffix('weight')}{MODULE}."
        down, up = [], []
        for source in rule.sources:
            name, (rows, columns) = source.name.removesuffix(".weight"), source.shape
            down.append(WeightSource(name + DOWN, ("rank", columns)))
            up.append(WeightSource(name + UP, (rows, "rank")))
        by_columns = rule.split is COLUMNS  # whether tensor parallelism splits the weight's columns
        yield WeightRule(f"{stem}a", rule.part, COLUMNS if by_columns else STACK, tuple(down))
        yield WeightRule(f"{stem}b", rule.part, STACK if by_columns else rule.split, tuple(up))
