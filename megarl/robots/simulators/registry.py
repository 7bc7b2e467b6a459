"""Registry of simulators by name, as used in the process that runs them."""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import inspect
import sys
from pathlib import Path
from typing import Any, overload

from .batched import BatchedSimulator
from .protocol import Simulator

#: The built-in simulators by name, as MODULE:CLASS with a module of this folder.
SIMULATORS: dict[str, str] = {
    "libero": "libero:Libero",
    "maniskill": "maniskill:ManiSkill",
    "metaworld": "metaworld:MetaWorld",
    "reach": "reach:Reach",
    "robotwin": "robotwin:RoboTwin",
}
#: The built-in simulators that run many environments in one process (`batched`): name -> module and class.
BATCHED: dict[str, str] = {
    "isaaclab": "isaaclab:IsaacLab",
    "maniskill": "batched_maniskill:BatchedManiSkill",
    "reach": "batched_reach:BatchedReach",
}
#: The built-in simulators whose steps return `progress`, the completed part of the task, in each form that they have.
MEASURING = ("libero", "metaworld", "reach")
#: How a recipe names a user's simulator: by its file, or by a module that the simulator's interpreter can import.
FORMS = ("file.py:Class", "pkg.mod:Class")


def is_known(name: str) -> bool:
    """Return whether `name` is a built-in simulator or has one of the `FORMS`."""
    return name in SIMULATORS or name in BATCHED or all(name.rpartition(":")[::2])


def batched_problem(name: str, *, batched: bool) -> tuple[list[str], str] | None:
    """Return the allowed values of the setting `batched` for the simulator `name`, and how to fix a recipe with this
    value; None if the value is allowed, as it always is for a user's own simulator.
    """
    if name not in (SIMULATORS | BATCHED) or name in (BATCHED if batched else SIMULATORS):
        return None
    if batched:
        return ["false"], f"remove it; simulators with many environments in one process: {', '.join(BATCHED)}"
    return ["true"], f"set it to true: {name} has all environments in one process"


def measures_progress(name: str) -> bool | None:
    """Return whether the simulator `name` measures the progress of episodes; None: unknown, because it is a user's."""
    return name in MEASURING if name in SIMULATORS | BATCHED else None


@overload
def simulator_class(name: str) -> type[Simulator]: ...
@overload
def simulator_class(name: str, *, batched: bool) -> type[Simulator] | type[BatchedSimulator]: ...


def simulator_class(name: str, *, batched: bool = False) -> type[Simulator] | type[BatchedSimulator]:
    """Return the class that `name` names: a `Simulator`, or with `batched` a `BatchedSimulator`.

    Raises:
        LookupError: the module has no such class; the message lists its simulators.
        Exception: any error of importing the module.
    """
    known = BATCHED if batched else SIMULATORS
    base: type[Simulator] | type[BatchedSimulator] = BatchedSimulator if batched else Simulator
    if name in known:
        module_name, _, class_name = known[name].partition(":")
        module = importlib.import_module(f".{module_name}", __package__)
    else:
        module_name, _, class_name = name.rpartition(":")
        module = _import_named(module_name)
    kind = getattr(module, class_name, None)
    if not (inspect.isclass(kind) and issubclass(kind, base)):
        simulators = [
            key
            for key, value in vars(module).items()
            if inspect.isclass(value) and issubclass(value, base) and value.__module__ == module.__name__
        ]
        article = "simulator of many environments" if batched else "simulator"
        raise LookupError(f"{module_name} has no {article} {class_name!r}; allowed: {', '.join(simulators) or 'none'}")
    return kind


def _import_named(name: str) -> Any:
    try:
        return _from_file(Path(name)) if name.endswith(".py") else importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name != "megarl.simulators":
            raise
        text = f"import {__package__}, which was called {error.name}"
        raise LookupError(f"importing {name} failed: {text}") from error


def _from_file(file: Path) -> Any:
    file = file.expanduser().resolve()
    if not file.is_file():
        raise LookupError(f"file not found: {file}")
    name = f"simulator_file_{hashlib.sha256(str(file).encode()).hexdigest()[:12]}"
    spec = importlib.util.spec_from_file_location(name, file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.path.append(str(file.parent))  # the file may import helper modules in its folder
    sys.modules[name] = module  # dataclasses look their module up there
    spec.loader.exec_module(module)
    return module
