"""Environments of the package verifiers: an agent that plays them, and rows for
`data.train_files: [megarl.gateway.verifiers:rows]`.

The package may need other versions of megarl's packages, so it runs in an interpreter that the recipe may name, and is
never imported here: `verifiers_program.py` is what runs there.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

from pydantic import Field

from megarl.gateway.agent import Agent, AgentSettings
from megarl.gateway.programs import START
from megarl.system.errors import ConfigError

_PROGRAM = "megarl.gateway.verifiers_program"
_CHECK_S, _ROWS_S = 30.0, 1800.0
_NO_PACKAGE = 3  # exit code of an interpreter without the package
_OF_ROWS = "data.loader_kwargs"  # section of the recipe with the arguments of `rows`


class VerifiersSettings(AgentSettings):
    """The keys of the section `env` for the environment `verifiers`."""

    function: str | None = Field(f"{_PROGRAM}:play", description="the function that plays an episode")
    taskset: str | dict[str, Any] = Field(
        description="id of the taskset, or its configuration with the key `id`, as in `env.taskset` of verifiers"
    )
    config: dict[str, Any] = Field(
        default_factory=dict,
        description="the other keys of the section `env` of verifiers, such as {agent: {harness: {id: null}}}",
    )


def section(
    taskset: str | Mapping[str, Any], config: Mapping[str, Any] | None = None, where: str = "env"
) -> dict[str, Any]:
    """Return the settings by which the package `verifiers` opens a taskset; raise ConfigError, which names the
    section `where` of the recipe, if none is named."""
    chosen = {"id": taskset} if isinstance(taskset, str) else dict(taskset)
    if not chosen.get("id"):
        raise ConfigError("no taskset is named", where=f"{where}.taskset", found=taskset, fix="add its id")
    return {**(config or {}), "taskset": chosen}


class Verifiers(Agent):
    """Plays an episode of an environment of verifiers."""

    Settings: ClassVar[type[AgentSettings]] = VerifiersSettings

    @classmethod
    def check_program(cls, settings: Any) -> None:
        """Check that the interpreter has the package."""
        section(settings.taskset, settings.config)
        _check_package(settings.python)

    def task(self, row: dict[str, Any], seed: int) -> dict[str, Any]:
        """Return the task that the agent's program reads: row, seed, and the section `env` of verifiers."""
        return {**super().task(row, seed), "verifiers": section(self.settings.taskset, self.settings.config)}


def _check_package(python: str | None, where: str = "env") -> None:
    """Raise ConfigError if the interpreter (None: the trainer's) does not start or does not have verifiers.

    Args:
        where: section of the recipe that names the interpreter.
    """
    look = f"import importlib.util as u, sys; sys.exit({_NO_PACKAGE} if u.find_spec('verifiers') is None else 0)"
    interpreter, key = python or sys.executable, f"{where}.python"
    try:
        code = subprocess.run([interpreter, "-c", look], timeout=_CHECK_S, check=False).returncode
        problem = f"exit code {code}" if code not in (0, _NO_PACKAGE) else ""
    except (OSError, subprocess.TimeoutExpired) as error:
        code, problem = 1, str(error)
    if problem:
        raise ConfigError(
            f"the interpreter does not start: {problem}", where=key, found=interpreter, fix="name .../bin/python"
        )
    if code:
        raise ConfigError(
            "this interpreter has no package verifiers",
            where=key,
            found=interpreter,
            fix="python -m venv ENV; ENV/bin/pip install 'verifiers>=0.4,<0.5'; and set python to ENV/bin/python",
        )


def rows(
    taskset: str | Mapping[str, Any],
    split: str = "train",
    python: str | None = None,
    config: Mapping[str, Any] | None = None,
    select: Mapping[str, Any] | None = None,
    val: Mapping[str, Any] | None = None,
) -> list[dict[str, Any]]:
    """Return the tasks of a taskset.

    Args:
        taskset, config, python: as in the section `env`.
        split: `train`, or `val` for the held-out tasks.
        select: the package's selection of tasks, such as `{limit: 1000, shuffle: true, seed: 0}`.
        val: keys of the taskset's configuration and of `select` (under `select`) that differ for held-out tasks.

    Returns:
        Rows with `prompt`, `data_source` (the taskset's id) and `verifiers`, the task's data as JSON text.

    Raises:
        ConfigError: the interpreter does not have the package, or cannot list the tasks.
    """
    _check_package(python, _OF_ROWS)
    differs = dict(val or {}) if split == "val" else {}
    selection = {**(select or {}), **differs.pop("select", {})}
    env = section(taskset, config, _OF_ROWS)
    order = {"env": {**env, "taskset": {**env["taskset"], **differs}}, "select": selection}
    with tempfile.TemporaryDirectory() as folder:
        ask, reply = Path(folder) / "order.json", Path(folder) / "rows.json"
        ask.write_text(json.dumps(order))
        try:
            done = subprocess.run(
                [python or sys.executable, str(START), _PROGRAM, str(ask), str(reply)],
                capture_output=True,
                text=True,
                errors="replace",
                timeout=_ROWS_S,
                check=False,
            )
            silent = f"its program ended with exit code {done.returncode} and wrote no rows"
            problem = "" if reply.exists() and not done.returncode else done.stderr.strip()[-1500:] or silent
        except subprocess.TimeoutExpired:
            problem = f"it did not end within {_ROWS_S:g} s"
        if problem:
            raise ConfigError(
                f"verifiers cannot list the tasks: {problem}",
                where=_OF_ROWS,
                found=order,
                fix="correct the taskset, its configuration or the selection",
            )
        listed: list[dict[str, Any]] = json.loads(reply.read_text())
    return listed
