"""Checks that packages needed by only some recipes are installed. None of them is imported."""

from __future__ import annotations

import importlib.util

from megarl.checks.checklist import Checklist
from megarl.config.run import RunConfig
from megarl.dag.placement import Placement
from megarl.rewards import REWARDS


def check_packages(
    config: RunConfig, placement: Placement | None, checks: Checklist, launcher: str | None, job: str
) -> None:
    """Check the packages of launcher, tracking, rewards and data files, beyond those that every run needs."""
    sources = {"data.train_files": config.data.train_files, "data.val_files": config.data.val_files}
    tables = next((key for key, names in sources.items() if any(n.endswith(".parquet") for n in names)), None)
    if launcher == "ray":
        _need("ray", "--launcher", "ray", "use --launcher local or torchrun", checks)
    elif launcher == "local" and placement is not None and placement.separate:
        teams = ", ".join(team.name for team in placement.teams)
        _need("ray", "placement", teams, "leave placement out: one team needs no Ray", checks)
    if job != "generate" and config.tracking.mlflow:
        _need("mlflow", "tracking.mlflow", True, "set tracking.mlflow=false", checks)
    reward = config.reward.name
    package = REWARDS.spec(reward).package if reward in REWARDS.names() else None
    if job != "generate" and package is not None:
        _need(package, "reward.name", reward, "choose another reward, for example numeric", checks)
    if tables is not None:
        _need("pyarrow", tables, sources[tables], "convert the data to .jsonl", checks)


def _need(package: str, key: str, found: object, instead: str, checks: Checklist) -> None:
    if _is_installed(package.replace("-", "_")):
        checks.ok("packages", f"{package} is installed ({key})")
    else:
        checks.fail(
            "packages",
            key,
            f"this needs the package {package}, which is not installed",
            found=found,
            fix=f"pip install {package}, or {instead}",
        )


def _is_installed(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ValueError:  # loaded without a specification
        return True
