"""The models in a run folder, and the overrides with which a command uses one of them."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

from megarl.artifacts.jsonl import STEP, read_jsonl
from megarl.artifacts.records import RUN, read_run, setting
from megarl.system.errors import UserError
from megarl.system.processes import write_atomically

Which = Literal["best", "last"]
LAST, BEST = "hf", "hf_best"
_RECORD = "exported.json"
log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Exported:
    """A Hugging Face model in a run folder: its folder's name, its step, and whether it is the best or the last."""

    folder: str
    step: int
    which: Which


def write_exported(run_dir: Path, models: list[Exported]) -> None:
    """Write the record of a run's exported models."""
    write_atomically(run_dir / _RECORD, json.dumps([asdict(model) for model in models], indent=1))


def exported(run_dir: Path) -> list[Exported]:
    """Return the models that a finished run exported, the last one first; empty while the run is in progress."""
    record = run_dir / _RECORD
    try:
        models = [Exported(**fields) for fields in json.loads(record.read_text())]
    except FileNotFoundError:
        return []
    except (OSError, ValueError, TypeError, RecursionError) as error:
        log.warning("%s cannot be read, so no model counts as exported: %s", record, error)
        return []
    return [model for model in models if (run_dir / model.folder / "config.json").is_file()]


def forget_exported(run_dir: Path) -> None:
    """Remove the record of exported models because the run continues; their folders stay until they are rewritten."""
    (run_dir / _RECORD).unlink(missing_ok=True)


def steps_in(checkpoints: Path) -> list[int]:
    """Return the steps of all complete checkpoints in a folder of checkpoints, ascending."""
    return steps_of(file.parent for file in checkpoints.glob("step_*/meta.json"))


def steps_of(folders: Iterable[Path]) -> list[int]:
    """Return the steps of folders called step_N, ascending; other names, such as step_07, are ignored."""
    names = [folder.name.removeprefix("step_") for folder in folders]
    return sorted(int(name) for name in names if name.isascii() and name.isdigit() and str(int(name)) == name)


def best_step(checkpoints: Path) -> int | None:
    """Return the step that best.json records; its checkpoint may no longer exist."""
    path = checkpoints / "best.json"
    try:
        return int(json.loads(path.read_text())["step"])
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        log.warning("%s cannot be read, so no checkpoint counts as the best: %s", path, error)
        return None


def untrained_best_note(run_dir: Path) -> str | None:
    """Return a note if no step beat the model before training and no step 0 was kept, else None.

    It compares `trainer.best_metric` from run.json and metrics.jsonl; without these files there is no note.
    """
    if any(model.which == "best" for model in exported(run_dir)) or 0 in steps_in(run_dir / "checkpoints"):
        return None
    metric = setting(read_run(run_dir), "trainer", "best_metric")
    if not isinstance(metric, str):
        return None
    lines = read_jsonl(run_dir / "metrics.jsonl", needs=STEP)
    logged = [line for line in lines if line["stage"] == "train" and isinstance(line.get(metric), (int, float))]
    values = {line["step"]: line[metric] for line in logged}
    before = values.pop(0, None)
    if before is None or not values or before <= max(values.values()):
        return None
    then = f"{metric} was {before:.4g} before training and {max(values.values()):.4g} at best after it"
    return f"{then}; no model of step 0 was kept, so the recipe's original model is better than the exported one"


def run_folder_fix(folder: Path) -> str:
    """Return advice for a folder that is not a run folder: to use the newest training run in it, if there is one."""
    inside = [record.parent for record in folder.glob("*/config.yaml")]
    trained = sorted(run for run in inside if not any(f"-{job}" in run.name for job in ("eval", "generate")))
    if trained:
        return f"did you mean {trained[-1]}, the newest run in this folder?"
    return "use RUNS/<name>/<stamp>, such as runs/my_run/20261122-142359"


def check_holds_run(run_dir: Path) -> None:
    """Check that a training run wrote this folder."""
    if not (run_dir / "config.yaml").is_file():
        raise _no_run(run_dir)


def _no_run(folder: Path) -> UserError:
    model = (folder / "config.json").is_file()
    return UserError(
        f"this folder has {'a model, not a' if model else 'no'} run",
        where="RECIPE",
        found=str(folder),
        allowed="a recipe file, the name of a shipped recipe, or a run folder with its config.yaml and run.json",
        fix=f"use a recipe with this model: RECIPE model.path={folder}" if model else run_folder_fix(folder),
    )


def overrides_for_model(run_dir: Path, which: Which) -> tuple[list[str], str]:
    """Return overrides of the run's config.yaml that select one of its models, and a description of the model.

    Exported models are preferred to checkpoints. If no best model is known, the last one is used.

    Args:
        run_dir: folder of a training run.
        which: best or last model.
    """
    check_holds_run(run_dir)
    models = {model.which: model for model in exported(run_dir)}
    steps = steps_in(run_dir / "checkpoints")
    best = best_step(run_dir / "checkpoints") if which == "best" else None
    if model := models.get(which) or models.get("last"):
        folder = run_dir / model.folder
        note = "" if model.which == which else _why_last(model.step, best)
        return (
            [f"model.path={folder}", "model.hf_config=null", "model.lora=null", "trainer.resume=auto"],
            f"{folder} ({model.which}, step {model.step}{note})",
        )
    if steps:
        step = best if best in steps else steps[-1]
        folder = run_dir / "checkpoints" / f"step_{step}"
        name = "best" if step == best else "last" if which == "last" else f"last{_why_last(step, best)}"
        return [f"trainer.resume={folder}"], f"{folder} ({name})"
    if not (run_dir / RUN).is_file():  # a config.yaml that does not belong to a run
        raise _no_run(run_dir)
    raise UserError(
        "this run has no model yet, neither exported nor as a checkpoint",
        where="RECIPE",
        found=str(run_dir),
        fix="let the run finish, or set trainer.save_every",
    )


def _why_last(step: int, best: int | None) -> str:
    """Explain why the last model (from step `step`) is used although the best was requested."""
    if best == step:
        return ", which is the best"
    return "; no best model is known" if best is None else f"; the best model, of step {best}, is missing"
