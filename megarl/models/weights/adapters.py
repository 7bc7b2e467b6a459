"""The tensors of low-rank adapters under their PEFT names, and this process's parameters that hold parts of them.

This is for adapters what `megarl.models.weight_table` is for weights; the rules are in `megarl.architectures.adapters`.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from megarl.architectures.adapters import TARGETS, adapter_rules, vision_adapters
from megarl.architectures.tensors import part_of
from megarl.config.model import LoraConfig
from megarl.models.hf import encoder_of
from megarl.models.weight_table import Coordinate, Shard, WeightTable
from megarl.system.errors import ConfigError

if TYPE_CHECKING:
    from transformers import PretrainedConfig


def adapter_tensors(hf: PretrainedConfig, lora: LoraConfig) -> dict[str, tuple[int, ...]]:
    """Return name and shape of every adapter tensor of a whole model, in export order.

    Names are those of the base model's tensors with `lora_A.weight` or `lora_B.weight` in place of `weight`.
    """
    return _table(hf, lora).shapes()


def adapter_slices(hf: PretrainedConfig, at: Coordinate, lora: LoraConfig) -> list[Shard]:
    """Return the adapter parameters of the process with coordinate `at`, each with the tensor regions that fill it."""
    return _table(hf, lora).shards(at)


def _table(hf: PretrainedConfig, lora: LoraConfig) -> WeightTable:
    table = WeightTable.of(hf)
    rules = adapter_rules(table.rules, lora.targets)
    visual = {} if encoder_of(hf) is None else vision_adapters(table.visual, lora.targets, lora.rank)
    return replace(table, rules=tuple(rules), sizes={**table.sizes, "rank": lora.rank}, visual=visual)


def check_targets(hf: PretrainedConfig, lora: LoraConfig) -> None:
    """Raise an error if a target matches no layer of the model, or if experts' adapters have dropout, which PEFT does
    not support."""
    if lora.dropout and "experts" in (lora.targets or ()):
        raise ConfigError(
            "PEFT does not support dropout in adapters of experts",
            where="model.lora.dropout",
            found=lora.dropout,
            allowed="0 with experts among model.lora.targets",
            fix="set model.lora.dropout=0",
        )
    table = _table(hf, lora)
    present = {TARGETS[rule.part] for rule, _, _ in table.instances(Coordinate())}
    present |= {part_of(parameter) for parameter in table.visual}
    missing = [target for target in lora.targets or () if target not in present]
    if missing or not present:
        raise ConfigError(
            f"this model ({hf.model_type}) has no layers of target {' or '.join(missing) or 'attention or mlp'}",
            where="model.lora.targets",
            found=lora.targets,
            allowed=sorted(present),
            fix="choose from these, or set model.lora.targets=null (attention and mlp)",
        )
