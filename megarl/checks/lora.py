"""Checks of low-rank adapters: layers that the model has, and layouts that they work under."""

from __future__ import annotations

from pathlib import Path

from megarl.architectures.adapters import DEFAULT_TARGETS, VISION_TARGETS
from megarl.artifacts.adapter_settings import check_scale, read_settings
from megarl.artifacts.facts import ModelFacts
from megarl.checks.checklist import Checklist
from megarl.config.model import LoraConfig, ParallelConfig
from megarl.config.run import RunConfig
from megarl.dag.placement import Placement
from megarl.dag.stage import Role

_NAME = "adapters"


def check_lora(config: RunConfig, facts: ModelFacts | None, placement: Placement | None, checks: Checklist) -> None:
    """Check the section `model.lora`, if it is set."""
    checks = checks.of(_NAME)
    lora = config.model.lora
    if config.sync.adapters == "separate":
        _check_separate(config, checks)
    if lora is None:
        return
    if facts is not None:
        _check_targets(lora, facts, checks)
    if lora.path is not None:
        with checks.recorded():
            check_scale(read_settings(Path(lora.path), "model.lora.path"), lora, "model.lora.path")
            checks.ok(f"{lora.path}: its settings; its tensors are read when the run starts")
    experts = "experts" in (lora.targets or ())
    if lora.dropout and experts:
        checks.fail(
            "model.lora.dropout",
            "dropout is not supported in adapters of experts",
            found=f"{lora.dropout:g}",
            allowed="0 with experts among model.lora.targets",
            fix="set model.lora.dropout=0",
        )
    for role in ("actor", "critic"):
        if experts:
            _check_expert_layout(role, config.parallel_of(role), checks)
        tp = config.parallel_of(role).tp
        if lora.dropout and tp > 1:
            checks.fail(
                "model.lora.dropout",
                "adapter dropout needs tp=1: tensor-parallel ranks would drop different parts of the same input",
                found=f"{lora.dropout:g} with {role}.parallel.tp={tp}",
                allowed="0 with tp above 1",
                fix=f"set model.lora.dropout=0, or {role}.parallel.tp=1",
            )
            break
    if placement is not None:
        _check_critic(config, placement, checks)


def _check_separate(config: RunConfig, checks: Checklist) -> None:
    """Check that there are adapters, and servers that can get them without the other weights."""
    obstacles = (
        ("model.lora", config.model.lora is None, "a model without adapters has none to send", "model.lora={rank: 16}"),
        (
            "rollout.engine",
            config.rollout.servers is None,
            "only servers load adapters separately from the base model",
            "an engine of servers",
        ),
    )
    for key, is_set, why, allowed in obstacles:
        if is_set:
            checks.fail(
                "sync.adapters",
                why,
                found="separate",
                allowed=f"merged; separate with {allowed}",
                fix=f"set sync.adapters=merged, or change {key}",
            )


def _check_expert_layout(role: str, parallel: ParallelConfig, checks: Checklist) -> None:
    if parallel.expert_tp not in (1, parallel.tp):
        checks.fail(
            f"{role}.parallel.etp",
            "adapters of experts must be divided like the rest of the model, or not at all",
            found=parallel.expert_tp,
            allowed=f"1 or {role}.parallel.tp, which is {parallel.tp}",
            fix=f"set {role}.parallel.etp=1, or remove experts from model.lora.targets",
        )


def _check_targets(lora: LoraConfig, facts: ModelFacts, checks: Checklist) -> None:
    sees = facts.encoder is not None
    targets = {"attention": True, "mlp": facts.copies["mlp"] > 0, "experts": facts.copies["router"] > 0 and not sees}
    targets |= dict.fromkeys(VISION_TARGETS, sees)
    present = [target for target, exists in targets.items() if exists]
    default = [target for target in present if target in DEFAULT_TARGETS]
    missing = [target for target in lora.targets or () if target not in present]
    if missing == ["experts"] and facts.is_moe:
        checks.fail(
            "model.lora.targets",
            "PEFT has no form for adapters on the experts of a vision-language model",
            found=lora.targets,
            allowed=present,
            fix="remove experts, or set model.vision=false to train the language model only",
        )
    elif missing or lora.targets == []:
        checks.fail(
            "model.lora.targets",
            f"this model has no layers for {' or '.join(missing)}" if missing else "no layers for adapters are named",
            found=lora.targets,
            allowed=present,
            fix=f"name layers that the model has, or set model.lora.targets=null: {', '.join(default)}",
        )
    else:
        checks.ok(f"rank {lora.rank} on {', '.join(lora.targets or default)}")


def _check_critic(config: RunConfig, placement: Placement, checks: Checklist) -> None:
    home = placement.of_role(Role.CRITIC)
    if home is not None and home != placement.of_role(Role.ACTOR) and config.critic.path is None:
        checks.fail(
            "critic.path",
            "a critic with adapters in its own team needs a path from which to read its base model when it resumes",
            found="null",
            allowed="the folder or hub name of a model",
            fix="set critic.path to model.path, or place the critic in the actor's team",
        )
