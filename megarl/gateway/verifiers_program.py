"""Plays an episode of an environment of the package verifiers, in the interpreter that has the package.

    play(task)                                 the agent's function
    start.py megarl.gateway.verifiers_program ORDER ROWS
                                               write the tasks of the taskset that the file ORDER names to the file ROWS

Calls of a model go to the endpoint of the episode, as they would go to a provider's.
"""

from __future__ import annotations

import asyncio
import json
import math
import os
import sys
from typing import Any

import verifiers.v1 as vf  # type: ignore[import-not-found,unused-ignore]
from verifiers.v1.utils.loaders import (  # type: ignore[import-not-found,unused-ignore]
    load_environment,
    resolve_env_config,
)


def play(task: dict[str, Any]) -> dict[str, Any]:
    """Play the task of the row and return its reward and numbers.

    Args:
        task: `row`, with the column `verifiers` (JSON text of the task's data); and `verifiers`, the section `[env]` of
            the package's configuration.

    Raises:
        RuntimeError: the episode failed.
    """
    if "verifiers" not in task["row"]:
        sys.exit("the row has no column `verifiers`: take the rows from megarl.gateway.verifiers:rows")
    episode = asyncio.run(_episode(task["verifiers"], json.loads(task["row"]["verifiers"])))
    errors = [*episode.errors, *(error for trace in episode.traces for error in trace.errors)]
    if not episode.ok:
        sys.exit("; ".join(f"{error.type}: {error.message}" for error in errors) or "the episode failed")
    trained = [trace for trace in episode.traces if trace.agent.trainable] or episode.traces
    info: dict[str, float] = {}
    for trace in trained:
        values = {**trace.metrics, **{name: part and part.value for name, part in trace.rewards.items()}}
        for name, value in values.items():
            if isinstance(value, int | float) and math.isfinite(value):
                info[f"verifiers/{name}"] = info.get(f"verifiers/{name}", 0.0) + value / len(trained)
    return {"reward": sum(trace.reward for trace in trained) / len(trained), "info": info}


async def _episode(settings: dict[str, Any], data: dict[str, Any]) -> Any:
    environment = load_environment(resolve_env_config(settings))
    kind = type(environment.taskset).task_type()
    task = kind(kind.data_type().model_validate(data), environment.config.taskset.task)
    client = vf.EvalClientConfig(base_url=os.environ["OPENAI_BASE_URL"], api_key_var="OPENAI_API_KEY")
    context = vf.ModelContext(client=client, model=os.environ["MEGARL_MODEL"], sampling=vf.SamplingConfig())
    async with environment.serving():
        (slot,) = environment.slots(task)
        return await environment.run_slot(slot, context)


def tasks(order: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the rows of a taskset.

    Args:
        order: `env`, the section `[env]`; `select`, the package's selection of tasks, such as `{limit: 100}`.
    """
    taskset = load_environment(resolve_env_config(order["env"])).taskset
    taskset = taskset.select(vf.SelectConfig(**order["select"]))
    if not taskset.bounded:
        sys.exit("the taskset has no end: set select.limit in data.loader_kwargs")
    kind = type(taskset).task_type().data_type()
    if hidden := [name for name, field in kind.model_fields.items() if field.exclude]:
        sys.exit(f"{kind.__name__} leaves {', '.join(hidden)} out of its data, so that a row cannot hold the task")
    rows = []
    for number, task in enumerate(taskset):
        data = task.data
        prompt = data.prompt_text or data.name or f"task {number}"
        rows.append(
            {
                "prompt": prompt,
                "data_source": order["env"]["taskset"]["id"],
                "verifiers": data.model_dump_json(),
            }
        )
    return rows


def main() -> None:
    """Write the tasks of the taskset that the first argument, a file, describes to the file of the second argument."""
    with open(sys.argv[1], encoding="utf-8") as file:
        listed = tasks(json.load(file))
    with open(sys.argv[2], "w", encoding="utf-8") as file:
        json.dump(listed, file)
