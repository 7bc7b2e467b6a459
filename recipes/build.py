"""The task graph of a recipe, built by the function or from the list of nodes in `algorithm.pipeline`, and checked."""

from __future__ import annotations

import traceback
from collections.abc import Callable

from megarl.config.run import RunConfig
from megarl.dag.graph import TaskGraph
from megarl.dag.stage import role_named
from megarl.recipes import dapo, grpo, listed, ppo, preference, srpo
from megarl.runtime.policies import by_model
from megarl.system.errors import ConfigError, UserError
from megarl.system.imports import import_callable

#: The functions that build the graphs of the built-in pipelines.
PIPELINES: dict[str, Callable[[RunConfig], TaskGraph]] = {
    "grpo": grpo.build_graph,
    "ppo": ppo.build_graph,
    "dapo": dapo.build_graph,
    "srpo": srpo.build_graph,
    "dpo": preference.build_dpo,
    "kto": preference.build_kto,
    "reward_model": preference.build_reward_model,
}


def build_task_graph(config: RunConfig) -> TaskGraph:
    """Return the checked task graph of `algorithm.pipeline`. Raise UserError if the pipeline is unknown or invalid."""
    name = config.algorithm.pipeline
    build = (PIPELINES.get(name) or _users_function(name)) if isinstance(name, str) else listed.build_graph
    return by_model(_sound_graph(build, config), config)


def _users_function(name: str) -> Callable[[RunConfig], object]:
    """Import the function `file.py:fn` or `pkg.mod:fn`; the file may be in the current folder."""
    try:
        return import_callable(name, where="algorithm.pipeline")
    except UserError as error:
        raise ConfigError(
            f"cannot import the pipeline: {error.what}",
            where="algorithm.pipeline",
            found=name,
            allowed=[*PIPELINES, "file.py:fn", "pkg.mod:fn"],
            fix=error.fix or "check the file or module, and the function's name",
        ) from error


def _sound_graph(function: Callable[[RunConfig], object], config: RunConfig) -> TaskGraph:
    """Call the pipeline function, check the task graph that it returns, and return the graph."""
    name = config.algorithm.pipeline_name
    try:
        graph = function(config)
    except UserError:
        raise
    except Exception as error:  # any exception of the user's function
        place = traceback.extract_tb(error.__traceback__)[-1]
        raise ConfigError(
            f"the pipeline function raised {type(error).__name__}: {error}",
            where="algorithm.pipeline",
            found=f"{name}, at {place.filename}:{place.lineno}: {place.line}",
            fix="fix the error at this line",
        ) from error
    if not isinstance(graph, TaskGraph):
        raise ConfigError(
            "the pipeline function did not return a task graph",
            where="algorithm.pipeline",
            found=f"{name} returned {type(graph).__name__}",
            allowed="a TaskGraph, made with Pipeline(...).add(...).build()",
            fix="end the function with `return pipeline.build()`",
        )
    _check_models(graph, config)
    _check_correction_node(graph, config)
    return graph


def _check_models(graph: TaskGraph, config: RunConfig) -> None:
    """Reject a pipeline whose stages take a further model that the recipe does not have."""
    for node in graph:
        for role in (node.role, *map(role_named, node.needs_roles)):
            if role.is_further and role.value not in config.models:
                raise ConfigError(
                    f"a stage works with the model {role.value!r}, which the recipe does not have",
                    where=f"models.{role.value}",
                    found=f"node {node.id}",
                    allowed=list(config.models) or "models of the section `models`",
                    fix=f"add models.{role.value}.train=true, or models.{role.value}.path=FOLDER for a frozen one",
                )


def _check_correction_node(graph: TaskGraph, config: RunConfig) -> None:
    """Reject a pipeline without a correction node, which would silently ignore the recipe's rollout correction."""
    correction = config.rollout_correction.resolved()
    if correction.active and not correction.bypass and not any("loss_mask" in node.writes for node in graph):
        raise ConfigError(
            "the recipe sets rollout correction, but the pipeline has no node for it",
            where="algorithm.pipeline",
            found=f"{config.algorithm.pipeline_name}, nodes {', '.join(graph.order())}",
            allowed="a pipeline with megarl.runtime.stages.correction:rollout_correction after the old log-probs",
            fix="add the nodes with megarl.recipes.grpo.add_scoring, or set rollout_correction.preset=disabled",
        )
