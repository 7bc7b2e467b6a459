"""The plan of low-rank adapters: their tensors by the names of PEFT, and the local parameters that hold them.

Each projection of the base model, W [out, in], has lora_A [rank, in] and lora_B [out, rank]. A parameter of Megatron
holds several projections, and its adapter too, in the same order, so that tensor parallelism divides B as it divides
W where that is split by rows, and A where it is split by columns; the other one is whole on every rank:

    W = [q; k; v] or [gate; up]    `a` = [A_q; A_k; A_v]    whole      `b`: rows in the order of W's   split as W
    W of o_proj or down_proj       `a` = A                  split as W `b` = B                         whole
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from megarl.architectures import ARCHITECTURES
from megarl.architectures.tensors import Part, WeightRule, WeightSource
from megarl.config.model import LoraConfig, Target
from megarl.errors import ConfigError
from megarl.models.hf import dimensions
from megarl.models.weights.plan import Coordinate, Shard, instances, shard_of

if TYPE_CHECKING:
    from transformers import PretrainedConfig

#: Adapters are a module of this name inside the linear layer that they are added to.
MODULE = "adapter"
DOWN, UP = ".lora_A.weight", ".lora_B.weight"
_TARGETS: dict[Part, Target] = {"layer": "attention", "dense": "mlp"}


def is_adapter(param: str) -> bool:
    """Tell whether a parameter of a chunk is one of an adapter, by its name."""
    return f".{MODULE}." in param


def adapter_tensors(hf: PretrainedConfig, lora: LoraConfig) -> dict[str, tuple[int, ...]]:
    """Return name and shape of every tensor of the adapters of a whole model, in export order.

    Names are those of the base model's tensors with `lora_A.weight` or `lora_B.weight` in place of `weight`.

    Raises:
        ConfigError: the model has none of the layers that a target names.
    """
    size = _sizes(hf, lora)
    found: dict[str, tuple[int, ...]] = {}
    for rule, _, names in instances(hf, Coordinate(), _rules(hf, lora)):
        for source, name in zip(rule.sources, names, strict=True):
            found[name] = tuple(size[d] for d in source.shape)
    return found


def adapter_slices(hf: PretrainedConfig, at: Coordinate, lora: LoraConfig) -> list[Shard]:
    """Return every adapter parameter of the process at `at`, and the boxes it is filled from."""
    size = _sizes(hf, lora)
    return [
        shard_of(rule, chunk, param, names, at, size)
        for rule, (chunk, param), names in instances(hf, at, _rules(hf, lora))
    ]


def _sizes(hf: PretrainedConfig, lora: LoraConfig) -> dict[str, int]:
    return {**dimensions(hf), "rank": lora.rank}


def _rules(hf: PretrainedConfig, lora: LoraConfig) -> tuple[WeightRule, ...]:
    return tuple(adapter_rules(ARCHITECTURES[hf.model_type].tensors, lora))


def adapter_rules(table: tuple[WeightRule, ...], lora: LoraConfig) -> Iterator[WeightRule]:
    """Yield the rules of the adapters for the linear layers of a table of weights that `lora.targets` select."""
    for rule in table:
        target = _TARGETS.get(rule.part)
        linear = rule.split in ("qkv", "gate_up", "row") and rule.param.endswith(".weight")
        if target is None or not linear or (lora.targets is not None and target not in lora.targets):
            continue
        stem = f"{rule.param.removesuffix('weight')}{MODULE}."
        down, up = [], []
        for source in rule.sources:
            name, (rows, columns) = source.name.removesuffix(".weight"), source.shape
            down.append(WeightSource(name + DOWN, ("rank", columns)))
            up.append(WeightSource(name + UP, (rows, "rank")))
        by_columns = rule.split == "row"  # of the weight
        yield WeightRule(f"{stem}a", rule.part, "row" if by_columns else "stack", tuple(down))
        yield WeightRule(f"{stem}b", rule.part, "copy" if by_columns else rule.split, tuple(up))


def check_targets(hf: PretrainedConfig, lora: LoraConfig) -> None:
    """Refuse targets of which the model has no layer.

    Raises:
        ConfigError: names them.
    """
    present = {_TARGETS[rule.part] for rule, _, _ in instances(hf, Coordinate(), _rules(hf, lora))}
    missing = [target for target in lora.targets or () if target not in present]
    if missing or not present:
        raise ConfigError(
            f"this model ({hf.model_type}) has no layers that are {' or '.join(missing) or 'a target'}",
            where="model.lora.targets",
            found=lora.targets,
            allowed=sorted(present),
            fix="name what it has, or set model.lora.targets=null: all that it has",
        )
