"""The task graph of a recipe that lists its nodes.

algorithm:
  pipeline:
    - rollout
    - scoring                                # a block: all nodes that the recipe's settings need for it
    - {stage: my_stages.py:token_price, config: {price: 0.01}, retry: 3}
    - advantage
    - actor_train
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from importlib import import_module
from pkgutil import iter_modules
from types import ModuleType
from typing import TYPE_CHECKING, Any

from pydantic import Field, NonNegativeInt, ValidationError

from megarl.config.base import ConfigErrors, Section
from megarl.config.fields import wrong_value
from megarl.dag.pipeline import Pipeline
from megarl.dag.stage import LOADER_FIELDS
from megarl.recipes import grpo, preference
from megarl.robots import stages as of_robots
from megarl.runtime import stages as of_text
from megarl.runtime.stages import kto, rollout
from megarl.runtime.stages.preference import PAIR_FIELDS
from megarl.system.errors import ConfigError, UserError, close_matches
from megarl.system.imports import is_file_reference, is_module_reference

if TYPE_CHECKING:
    from megarl.config.run import RunConfig
    from megarl.dag.graph import TaskGraph

KEY = "algorithm.pipeline"


def _stages(modules: Iterable[ModuleType]) -> dict[str, Callable[..., Any]]:
    """Return the functions of the modules that `@stage` declares, by name, in the order of modules and lines."""
    return {
        name: member
        for module in modules
        for name, member in vars(module).items()
        if inspect.isfunction(member) and hasattr(member, "__stage__") and member.__module__ == module.__name__
    }


#: Stages of the built-in pipelines, by the names that a list may have.
STAGES = _stages(
    [*(import_module(f"{of_text.__name__}.{module.name}") for module in iter_modules(of_text.__path__)), of_robots]
)
#: Blocks of nodes that depend on the recipe's settings, by the names that a list may have.
BLOCKS: dict[str, Callable[[Pipeline, RunConfig], None]] = {
    "scoring": grpo.add_scoring,
    "logprobs": grpo.add_logprobs,
    "rewards": grpo.add_reward,
    "filter": grpo.add_filter,
    "advantages": grpo.add_advantage,
}


class ListedNode(Section):
    """An entry of `algorithm.pipeline`."""

    stage: str = Field(description="a stage of the built-in pipelines, a block, file.py:fn or pkg.mod:fn")
    id: str | None = Field(None, description="name of the node; null: the stage's name")
    after: list[str] = Field([], description="nodes that run before it, in addition to those whose fields it reads")
    config: dict[str, Any] = Field({}, description="further arguments of the stage")
    retry: NonNegativeInt = Field(0, le=100, description="how often a step calls it again after a passing error")


def build_graph(config: RunConfig) -> TaskGraph:
    """Return the task graph whose nodes `algorithm.pipeline` lists, in this order.

    Raises:
        UserError: an entry is wrong; the message has its number.
    """
    p = Pipeline("listed", "the nodes that the recipe lists", config)
    stages: list[Callable[..., Any] | str] = []
    for number, entry in enumerate(config.algorithm.pipeline):
        where = f"{KEY}[{number}]"
        node = _read({"stage": entry} if isinstance(entry, str) else entry, where)
        if node.stage in BLOCKS:
            _refuse_settings(node, where)
            BLOCKS[node.stage](p, config)
        else:
            stages.append(_stage(node.stage, where))
            p.add(stages[-1], node.id, deps=node.after, config=node.config, retry=node.retry)
    for stage, pipeline in preference.TRAIN.items():
        if stage in stages:
            preference.check_loss(pipeline, config)
    if config.preference is None or rollout.rollout in stages:
        return p.build(LOADER_FIELDS)
    return p.build(kto.EXAMPLE_FIELDS if config.preference.labelled else PAIR_FIELDS)


def _read(entry: Any, where: str) -> ListedNode:
    """Return the validated entry at the place `where`."""
    problems = []
    fields = ListedNode.model_fields
    for key in [key for key in entry if key not in fields]:
        near = close_matches(key, fields)
        fix = f"did you mean {near[0]}?" if near else "remove it; arguments of the stage belong under config"
        problems.append(ConfigError(f"unknown key {key}", where=where, allowed=list(fields), fix=fix))
    try:
        node = ListedNode.model_validate({key: entry[key] for key in entry if key in fields}, strict=True)
    except ValidationError as error:
        for detail in error.errors(include_url=False):
            key = str(detail["loc"][0])
            if detail["type"] == "missing":
                problems.append(ConfigError(f"{key} is missing", where=where, fix="name the stage of the node"))
            else:
                problems.append(wrong_value(detail, key, fields[key], entry[key], where=where))
    if problems:
        raise problems[0] if len(problems) == 1 else ConfigErrors(problems)
    return node


def _stage(name: str, where: str) -> Callable[..., Any] | str:
    """Return the stage of this name, or the reference to the user's own stage."""
    if name in STAGES or is_file_reference(name) or is_module_reference(name):
        return STAGES.get(name, name)
    known = [*STAGES, *BLOCKS]
    near = close_matches(name, known)
    raise UserError(
        "unknown stage",
        where=where,
        found=name,
        allowed=[*known, "file.py:fn", "pkg.mod:fn"],
        fix=f"did you mean {near[0]}?" if near else "name one of these, or write file.py:fn",
    )


def _refuse_settings(node: ListedNode, where: str) -> None:
    given = sorted(node.model_fields_set - {"stage"})
    if given:
        raise ConfigError(
            f"{node.stage} is a block of several nodes, so it has no settings of its own",
            where=where,
            found=", ".join(given),
            fix="list the block's stages one by one, with their settings",
        )
