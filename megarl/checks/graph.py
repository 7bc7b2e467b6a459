"""The task graph of a recipe, built once per command, and the roles of its nodes.

The nodes show whether a critic, a reference or a teacher is used, what is filtered and what is resampled, for built-in
pipelines and a user's own alike.
"""

from __future__ import annotations

from typing import Any

from megarl.algorithms.advantages import ADVANTAGES
from megarl.algorithms.group_filter import FILTERS
from megarl.algorithms.losses import POLICY_LOSSES
from megarl.algorithms.needs import estimator_fields, filter_fields, loss_fields
from megarl.algorithms.registry import Registry
from megarl.algorithms.user_code import name_of, place_of
from megarl.checks.checklist import Checklist
from megarl.checks.components import check_function_name
from megarl.config.engines import DEFAULT, KEY
from megarl.config.run import RunConfig
from megarl.config.training import PreferenceConfig
from megarl.dag.edges import MissingFieldError
from megarl.dag.graph import TaskGraph
from megarl.dag.stage import Kind, Role
from megarl.data.fields import FIELDS
from megarl.recipes.build import PIPELINES, build_task_graph
from megarl.runtime.stages.advantage import OFFERED
from megarl.runtime.stages.resampling import COPIES
from megarl.system.errors import UserError, close_matches


def build(config: RunConfig, checks: Checklist) -> TaskGraph | UserError | None:
    """Build the graph of `algorithm.pipeline`; return it, its error, or None (recorded) for an unknown name."""
    name = config.algorithm.pipeline
    if isinstance(name, str) and not check_function_name(
        name, "algorithm.pipeline", tuple(PIPELINES), "pipeline", checks.of("pipeline")
    ):
        return None
    try:
        return build_task_graph(config)
    except UserError as error:
        return error


def check_graph(config: RunConfig, built: TaskGraph | UserError | None, checks: Checklist) -> None:
    """Check that the graph can be built and that its nodes fit the recipe's settings."""
    if isinstance(built, MissingFieldError) and _is_users_mistake(config, built, checks):
        return
    if isinstance(built, MissingFieldError) and built.role is Role.ADVANTAGE:
        _check_estimator(config, built, checks)
    elif isinstance(built, UserError):
        if not checks.failed(built.where):
            checks.of("task graph").from_error(built)
    elif built is not None:
        if built.has_responses or config.preference is not None:
            _check_pairs(config, built, checks.of("preferences"))
        else:
            _check_critic(config, built, checks)
        _check_training(built, checks.of("task graph"))
        _check_sampling(config, built, checks)
        _check_filter(config, built, checks)
        _check_resampling(config, built, checks)


def _check_training(graph: TaskGraph, checks: Checklist) -> None:
    """Warn of a graph in which no model learns."""
    if not any(node.kind is Kind.MODEL_TRAIN for node in graph):
        checks.warn(
            "algorithm.pipeline",
            "no node trains a model, so all weights stay as they are",
            found=f"nodes {', '.join(graph.order())}",
            fix="add the stage actor_train (megarl.runtime.stages.update:actor_train), or declare a stage that "
            "trains by @stage(..., kind=Kind.MODEL_TRAIN)",
        )


def _is_users_mistake(config: RunConfig, missing: MissingFieldError, checks: Checklist) -> bool:
    """Record and return whether a component in a user's file reads a field that does not exist. An estimator reads
    fields by its parameters' names, a loss or a filter by its `reads`.
    """
    algorithm, field = config.algorithm, missing.field
    if field in FIELDS:
        return False  # the pipeline lacks a node that writes the field
    readers: dict[Registry[Any], tuple[str, list[str]]] = {
        ADVANTAGES: (algorithm.advantage.name, estimator_fields(algorithm)),
        POLICY_LOSSES: (algorithm.loss.name, loss_fields(algorithm)),
        FILTERS: (algorithm.filter.name, filter_fields(algorithm)),
    }
    for registry, (name, fields) in readers.items():
        if field not in fields:
            continue
        function = registry.get(name)
        known = [*OFFERED, *registry.spec(name).settings.model_fields] if registry is ADVANTAGES else FIELDS
        near = [name for name in known if field in name] or close_matches(field, known)
        reads = "has a parameter" if registry is ADVANTAGES else "names in `reads` the field"
        checks.of(registry.kind).fail(
            registry.key,
            f"the {registry.kind} {name_of(function)} {reads} {field!r}, which is not a field of the "
            f"samples{' or one of its settings' if registry is ADVANTAGES else ''}, and no node writes it",
            found=place_of(function),
            allowed=missing.allowed,
            fix=f"did you mean {near[0]!r}?" if near else "give it a default, or add a node that writes the field",
        )
        return True
    return False


def _check_estimator(config: RunConfig, missing: MissingFieldError, checks: Checklist) -> None:
    """Record that the estimator reads a field that no node of the pipeline writes."""
    name, pipeline = config.algorithm.advantage.name, config.algorithm.pipeline_name
    if missing.field == "values":
        checks.of("estimator").fail(
            "algorithm.advantage.name",
            f"{name} needs the values of a critic, but the {pipeline} pipeline has none",
            found=name,
            allowed=[other for other in ADVANTAGES.names() if "values" not in ADVANTAGES.required(other)],
            fix="set algorithm.pipeline=ppo, or another estimator",
        )
    elif missing.field == "greedy_score":
        checks.of("estimator").fail(
            "algorithm.pipeline",
            f"{name} needs a greedy rollout of every prompt, but the {pipeline} pipeline makes none",
            found=pipeline,
            allowed=["grpo", "dapo", "file.py:fn", "pkg.mod:fn"],
            fix="set algorithm.pipeline=grpo, or another estimator",
        )
    elif missing.field != "reward_parts" or not checks.failed("algorithm.advantage.parts"):
        checks.of("task graph").from_error(missing)


def _check_critic(config: RunConfig, graph: TaskGraph, checks: Checklist) -> None:
    name, pipeline = config.algorithm.advantage.name, config.algorithm.pipeline_name
    readers = [node for node in graph if "values" in node.reads and node.role is not Role.CRITIC]
    if name in ADVANTAGES.names() and Role.CRITIC in graph.roles and not readers:
        checks.of("estimator").warn(
            "algorithm.advantage.name",
            f"the {pipeline} pipeline trains a critic that {name} does not use",
            found=name,
            fix="set algorithm.advantage.name=gae, or algorithm.pipeline=grpo",
        )


def _check_sampling(config: RunConfig, graph: TaskGraph, checks: Checklist) -> None:
    """Check that dynamic sampling is both a node and a setting: one without the other has no effect."""
    checks = checks.of("dynamic sampling")
    algorithm, pipeline = config.algorithm, config.algorithm.pipeline_name
    samples_again = Role.DYNAMIC_SAMPLING in graph.roles
    if samples_again and not algorithm.dynamic_sampling.enabled:
        checks.warn(
            "algorithm.dynamic_sampling.enabled",
            f"the {pipeline} pipeline runs with its group filter off",
            found=False,
            fix="set algorithm.dynamic_sampling.enabled=true",
        )
    if algorithm.dynamic_sampling.enabled and not samples_again and pipeline in PIPELINES:
        checks.fail(
            "algorithm.dynamic_sampling.enabled",
            f"the {pipeline} pipeline has no node for this, so the setting would have no effect",
            found=True,
            allowed="false, or true with algorithm.pipeline=dapo",
            fix="set algorithm.pipeline=dapo",
        )


def _check_resampling(config: RunConfig, graph: TaskGraph, checks: Checklist) -> None:
    """Check that a user's pipeline has a node for the resampling setting."""
    if config.algorithm.resampling.active and not any(COPIES in node.writes for node in graph):
        checks.of("resampling").fail(
            "algorithm.resampling.name",
            "no node of this pipeline resamples, so the setting would have no effect",
            found=config.algorithm.resampling.name,
            allowed="none, or a pipeline with megarl.runtime.stages.resampling:resample after the advantage",
            fix="add the nodes with megarl.recipes.grpo.add_advantage, or set algorithm.resampling.name=none",
        )


def _check_filter(config: RunConfig, graph: TaskGraph, checks: Checklist) -> None:
    """Check that a built-in pipeline has the node `filter` that the filter setting needs."""
    chosen, pipeline = config.algorithm.filter, config.algorithm.pipeline_name
    if chosen.active and pipeline in PIPELINES and "filter" not in graph:
        checks.of("filter").fail(
            "algorithm.filter",
            f"the {pipeline} pipeline has no filter",
            found=chosen.model_dump(),
            allowed="name: bounds with null bounds and truncated: false, or the grpo or dapo pipeline",
            fix="remove algorithm.filter",
        )


_GIVEN = ("dpo", "kto", "reward_model")  # pipelines that train on given responses


def _check_pairs(config: RunConfig, graph: TaskGraph, checks: Checklist) -> None:
    """Check a run that trains on pairs of responses: its pipeline, and settings that it would ignore."""
    preference, pipeline = config.preference, config.algorithm.pipeline_name
    if preference is None:
        checks.fail(
            "preference",
            f"the {pipeline} pipeline trains on given responses, but the section preference is missing",
            found="null",
            allowed="a section",
            fix="add preference: {}",
        )
        return
    if not graph.has_responses:
        checks.fail(
            "algorithm.pipeline",
            f"the {pipeline} pipeline generates its responses, so it would not read the data of the section preference",
            found=pipeline,
            allowed=[*_GIVEN, "file.py:fn", "pkg.mod:fn"],
            fix="set one of these, or remove preference",
        )
        return
    teams = "several teams" if config.placement.has_several_teams else "one team"
    wrong: dict[str, tuple[object, object, str]] = {
        "rollout.sampling.temperature": (config.rollout.sampling.temperature, 1.0, "log-probs are those of the model"),
        "placement": (teams, "one team", "one team has the policy and its reference"),
        KEY: (config.rollout.engine, DEFAULT, "nothing is generated"),
        "algorithm.kl.use": (config.algorithm.kl.use, "none", "the loss holds the policy near its reference"),
        "algorithm.distillation.coef": (config.algorithm.distillation.coef, 0.0, "no teacher is used"),
        "algorithm.advantage.name": (config.algorithm.advantage.name, "grpo", "nothing estimates advantages"),
        "algorithm.loss.name": (config.algorithm.loss.name, "ppo", "the loss is that of the section preference"),
    }
    if not preference.scores and config.sft.steps:
        why = "a cold start is not evaluated (megarl sft is)"
        wrong["sft.stop_at_accuracy"] = (config.sft.stop_at_accuracy, None, why)
    for key, (value, wanted, why) in wrong.items():
        if value != wanted:
            checks.fail(
                key,
                f"this has no effect with preference pairs: {why}",
                found=value,
                allowed=wanted,
                fix="remove it",
            )
    _check_loss(config, preference, checks)


def _check_loss(config: RunConfig, preference: PreferenceConfig, checks: Checklist) -> None:
    """Check that the loss of pairs uses all keys that are set."""
    ignored = ["beta", "sft_coef", "length_normalised"] if preference.scores else ["margin_key", "center_coef"]
    ignored += ["sft_coef", "length_normalised"] if preference.labelled else ["desirable_weight", "undesirable_weight"]
    if preference.loss not in ("sigmoid", "robust"):
        ignored.append("label_smoothing")
    for name in ignored:
        value, default = getattr(preference, name), type(preference).model_fields[name].default
        if value != default:
            checks.fail(
                f"preference.{name}",
                f"the loss {preference.loss} does not use this key",
                found=value,
                allowed="null" if default is None else default,
                fix="remove the key, or choose another preference.loss",
            )
    shown_by, column = config.data.shows
    if preference.scores and (config.sft.steps or column is not None):
        key = "sft.steps" if config.sft.steps else shown_by
        checks.fail(
            key,
            "a reward model cannot train on responses as text: it has no vocabulary",
            found=config.sft.steps or column,
            allowed="0" if config.sft.steps else "null",
            fix="train the policy first (megarl sft), and name it in model.path"
            if config.sft.steps
            else "leave it out",
        )
    if preference.labelled and config.data.batch_size < 2:
        checks.fail(
            "data.batch_size",
            "KTO estimates a KL from responses to other prompts of the batch, but the batch has only one",
            found=config.data.batch_size,
            allowed="at least 2, better 16 or more",
            fix="set data.batch_size=16",
        )
    checks.ok(f"loss {preference.loss}" + ("" if preference.scores else f", beta {preference.beta:g}"))
