"""A benchmark case: a recipe, and the model file that every program of a comparison starts from."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import tempfile
from pathlib import Path
from typing import Any

from megarl.config.load import find_recipe, load_config, recipe_names
from megarl.config.run import RunConfig
from megarl.system.errors import UserError

FOLDER = Path(__file__).parent / "cases"


def case_file(case: str) -> Path:
    """Return the recipe of a case of this folder (S, M, ...), a shipped recipe, or a recipe file."""
    path = FOLDER / f"{case}.yaml" if case in case_names() else Path(case)
    if not path.is_file() and case in recipe_names():
        return find_recipe(case)
    if not path.is_file():
        allowed = f"{', '.join(case_names())}, a shipped recipe, or a recipe file"
        raise UserError("unknown case", where="--case", found=case, allowed=allowed)
    return path


def case_names() -> list[str]:
    """Return the cases that are shipped."""
    return sorted(file.stem for file in FOLDER.glob("*.yaml"))


def cache_folder() -> Path:
    """Return the folder that keeps models and environments of benchmarks between runs."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "megarl"


def model_folder(case: str) -> Path:
    """Return the Hugging Face folder with the random weights (fp32) and tokenizer of a case that has `model.hf_config`.

    It is made when it is not there yet.
    """
    config = load_config(case_file(case), ["model.dtype=fp32", "cluster.nproc=1"])
    identity = json.dumps(config.model.model_dump(mode="json"), sort_keys=True)
    folder = cache_folder() / "bench" / f"{config.name}-{hashlib.sha256(identity.encode()).hexdigest()[:12]}"
    if not folder.is_dir():
        _make_model(config, folder)
    return folder


def _make_model(config: RunConfig, folder: Path) -> None:
    from megarl.launchers.common import run_workers

    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent) as scratch:
        if run_workers("local", "megarl.benchmarks.case:export_model", config, Path(scratch)) != 0:
            raise UserError("the model of the case could not be made", where="megarl bench", found=config.name)
        shutil.move(Path(scratch) / "hf", folder)


def export_model(config: RunConfig, run_dir: Path) -> None:
    """Write the random model of a configuration to RUN_DIR/hf. Runs in a worker."""
    from megarl.models.weights import export_weights
    from megarl.runtime.setup import build_rank_state

    c = build_rank_state(config, run_dir, trainable=False, scored=())
    export_weights(c.actor.chunks, run_dir / "hf", c.hf_config, c.tokenizer, world=c.layout.world)


def digit_share(samples: list[dict[str, Any]]) -> list[float]:
    """Share of digits in a response: differs between the samples of a random model, so that advantages are not 0."""
    return [sum(c.isdigit() for c in s["response"]) / max(1, len(s["response"])) for s in samples]
