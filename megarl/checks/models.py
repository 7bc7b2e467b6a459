"""Checks of the section `models`: what stages take of them, and what can be trained."""

from __future__ import annotations

from megarl.checks.checklist import Checklist
from megarl.config.models import FurtherModelConfig
from megarl.config.run import RunConfig
from megarl.dag.graph import TaskGraph
from megarl.dag.stage import Kind, Role

#: Keys of a model that megarl's own updates follow, but a user's stage may ignore.
_OF_UPDATES = ("mini_batch_size", "ppo_epochs", "shuffle")


def check_models(config: RunConfig, graph: TaskGraph | None, checks: Checklist) -> None:
    """Check the further models of a training run against the stages of its graph."""
    for name, settings in config.models.items():
        _check_model(name, settings, config, graph, checks)


def _check_model(
    name: str, settings: FurtherModelConfig, config: RunConfig, graph: TaskGraph | None, checks: Checklist
) -> None:
    key = f"models.{name}"
    if settings.path is None and not settings.train:
        checks.fail(
            f"{key}.path",
            "a frozen model needs a folder",
            found=None,
            allowed="a Hugging Face folder or hub name; null for a model that is trained",
            fix=f"set {key}.path, or {key}.train=true",
        )
    if settings.path is None and config.model.lora is not None:
        checks.fail(
            f"{key}.path",
            "the policy trains adapters, and a further model trains all its weights, so it cannot begin as the policy",
            found="null, with model.lora",
            allowed="a Hugging Face folder or hub name",
            fix=f"set {key}.path",
        )
    if not config.task.writes_text:
        checks.fail(key, "a task without text has no further models", found=name, fix=f"remove {key}")
    if graph is None:
        return
    users = [node for node in graph if name in (node.role.value, *node.needs_roles, *node.may_take)]
    if Role(name) not in graph.roles:
        checks.warn(
            key,
            "no stage of the pipeline takes this model",
            found=f"nodes {', '.join(graph.order())}",
            fix=f"add a stage with the argument {name!r} (algorithm.pipeline=file.py:fn), or remove {key}",
        )
    training = [node.id for node in users if node.role is Role(name) and node.kind is Kind.MODEL_TRAIN]
    if training and not settings.train:
        checks.fail(
            f"{key}.train",
            f"the node {training[0]!r} trains this model",
            found=False,
            allowed=True,
            fix=f"set {key}.train=true",
        )
    of_policy = any(policy.model == name for policy in config.policies.values())
    changed = [field for field in _OF_UPDATES if getattr(settings, field) != type(settings).model_fields[field].default]
    if training and changed and not of_policy:
        checks.warn(
            f"{key}.{changed[0]}",
            f"the node {training[0]!r} is a stage of yours, which chooses its own mini-batches and passes; megarl only "
            "computes the length of the learning-rate schedule from these keys",
            found=", ".join(f"{field}={getattr(settings, field)}" for field in changed),
            fix="remove them, unless the stage follows them: megarl.runtime.stages.update.mini_batches(c, samples, "
            f"{name!r}, epoch) yields the mini-batches of a pass",
        )
    if settings.train and users and not training and not of_policy:
        checks.warn(
            f"{key}.train",
            "no node trains this model, which has an optimizer",
            found=f"nodes {', '.join(node.id for node in users)}",
            fix=f"declare the stage @stage(..., kind=Kind.MODEL_TRAIN, role=Role({name!r})), or set {key}.train=false "
            "and a path",
        )
