"""Checks of `megarl convert` and `doctor parity` before heavy imports: the source has a model, the target is free."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import NoReturn

from megarl.artifacts.facts import hub_snapshot, is_hub_name, model_facts, near_folder
from megarl.artifacts.trained import steps_in
from megarl.config.model import ModelConfig
from megarl.system.errors import ConfigError, relative_path_fix

_WHERE = "megarl convert"
_SOURCES = "a folder with config.json and *.safetensors, a hub name, a checkpoint (step_N), or a PEFT adapter"


def check_conversion(source: Path, target: Path, max_shard_gb: float) -> None:
    """Check the source, target and shard size of a conversion."""
    _check_source(source)
    check_target(target)
    if not max_shard_gb > 0:
        raise ConfigError(
            "the size of a file must be above 0", where="--max-shard-gb", found=max_shard_gb, allowed="number > 0"
        )
    if not any((source / name).is_file() for name in ("meta.json", "adapter_config.json")):
        model_facts(ModelConfig(path=str(source)))


def check_target(target: Path) -> None:
    """Check that `target` is free (or an empty folder) and that a folder can be created there."""
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise ConfigError(
            "the target already exists and is not an empty folder",
            where=_WHERE,
            found=str(target),
            fix="choose another target",
        )
    above = next(folder for folder in target.absolute().parents if folder.exists())
    if not above.is_dir():
        raise ConfigError(
            "cannot create the target below a file", where=_WHERE, found=str(above), fix="choose another target"
        )
    try:
        # try to write, because permissions do not show that a file system is read-only
        with tempfile.TemporaryDirectory(dir=above):
            pass
    except OSError as error:
        raise ConfigError(
            f"cannot write into the target's folder ({error.strerror or error})",
            where=_WHERE,
            found=str(above),
            fix="choose another target, or check permissions and free space",
        ) from error


def _check_source(source: Path) -> None:
    if any((source / name).is_file() for name in ("meta.json", "config.json", "adapter_config.json")):
        return
    name = str(source)
    if not source.is_dir() and is_hub_name(name):
        if hub_snapshot(name) is None and source.parent.is_dir():  # probably a path, not a hub name
            raise ConfigError(
                _absent(source),
                where=_WHERE,
                found=name,
                allowed=_SOURCES,
                fix=f"{near_folder(source)}; for the hub's model of this name, run hf download {name} first",
            )
        return
    refuse_without_model(source, _WHERE, _SOURCES)


def _absent(source: Path) -> str:
    return "this is a file, not a folder" if source.exists() else "the folder does not exist"


def refuse_without_model(source: Path, where: str, allowed: str) -> NoReturn:
    """Raise an error for a folder that has no model or does not exist; `where` names the command."""
    newest = [root / f"step_{steps[-1]}" for root in (source, source / "checkpoints") if (steps := steps_in(root))]
    inside = [*newest, *(file.parent for file in source.glob("hf/config.json"))]
    raise ConfigError(
        "this folder has neither a model nor a checkpoint" if source.is_dir() else _absent(source),
        where=where,
        found=str(source),
        allowed=allowed,
        fix=f"did you mean {inside[-1]}?" if inside else relative_path_fix(),
    )
