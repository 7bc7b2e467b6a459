"""Checks of the environment: packages that only some recipes use (without importing them), and secrets."""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path

from megarl.checks.checklist import Checklist
from megarl.config.other_values import value_fix
from megarl.config.run import RunConfig
from megarl.dag.placement import Placement
from megarl.rewards import REWARDS
from megarl.rewards.parts import functions_of
from megarl.system.credentials import MASK, PASSWORD, USER, hide, mask, put_back, take_out
from megarl.system.imports import is_file_reference, is_module_reference, source_file
from megarl.tracking.loggers import LOGGERS


def check_packages(
    config: RunConfig, placement: Placement | None, checks: Checklist, launcher: str | None, job: str, *, starts: bool
) -> None:
    """Check the packages of launcher, tracking, rewards and data files, beyond the packages that every run needs."""
    sources = {"data.train_files": config.data.train_files, "data.val_files": config.data.val_files}
    tables = next((key for key, names in sources.items() if any(n.endswith(".parquet") for n in names)), None)
    if launcher == "ray":
        _require("ray", "--launcher", "ray", "use --launcher local or torchrun", checks)
    elif launcher == "local" and placement is not None and placement.separate:
        teams = ", ".join(team.name for team in placement.teams)
        _require("ray", "placement", teams, "leave placement out: one team needs no Ray", checks)
    if job != "generate" and config.tracking.mlflow:
        _require("mlflow", "tracking.mlflow", True, "set tracking.mlflow=false", checks)
    for logger in config.tracking.loggers if job != "generate" else ():
        _check_logger(logger, checks, starts=starts and launcher != "ray")
    places: dict[str, str] = {}
    for place, section in functions_of(config).items():
        places.setdefault(section.name, place)
    for reward, place in places.items():
        package = REWARDS.spec(reward).package if reward in REWARDS.names() else None
        if job != "generate" and package is not None:
            _require(package, f"{place}.name", reward, "choose another reward, for example numeric", checks)
    if tables is not None:
        _require("pyarrow", tables, sources[tables], "convert the data to .jsonl", checks)


def _check_logger(name: str, checks: Checklist, *, starts: bool) -> None:
    """Check that a tracker's package is installed, or that its reference has a valid form. Workers import it later."""
    checks = checks.of("packages")
    key = "tracking.loggers"
    if is_file_reference(name) or is_module_reference(name):
        file = source_file(name)
        if file is None:
            checks.fail(key, "file or module not found", found=name, fix="correct the name, or install the module")
    elif name not in LOGGERS:
        allowed = [*LOGGERS, "file.py:Class", "pkg.mod:Class"]
        checks.fail(key, "unknown tracker", found=name, allowed=allowed, fix=value_fix(key, name) or "correct the name")
    else:
        _require(name, key, name, "remove it from the list", checks)
        if name == "wandb" and not _wandb_has_a_key():
            text = "no API key of W&B is known here, without which the run ends after its first validation"
            fix = "wandb login, or WANDB_MODE=offline for a copy in the run folder"
            (checks.fail if starts else checks.warn)(key, text, found=name, fix=fix)


def _wandb_has_a_key() -> bool:
    """Return whether W&B needs no key, or finds one in a variable, its settings, or the file of `wandb login`."""
    home = Path(os.path.expanduser("~"))
    netrc = Path(os.environ.get("NETRC", home / ".netrc"))
    settings = Path(os.environ.get("WANDB_CONFIG_DIR", home / ".config/wandb")) / "settings"
    return (
        os.environ.get("WANDB_MODE", "online") != "online"
        or any(name in os.environ for name in ("WANDB_API_KEY", "WANDB_IDENTITY_TOKEN_FILE"))
        or any(path.is_file() for path in (netrc, netrc.with_name("_netrc"), settings))
    )


def _require(package: str, key: str, found: object, instead: str, checks: Checklist) -> None:
    checks = checks.of("packages")
    if _is_installed(package.replace("-", "_")):
        checks.ok(f"{package} is installed ({key})")
    else:
        checks.fail(
            key,
            f"the package {package} is needed, and is not installed",
            found=found,
            fix=f"pip install {package}, or {instead}",
        )


def _is_installed(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ValueError:  # raised for a module loaded without a specification
        return True


def check_secrets(config: RunConfig, checks: Checklist) -> None:
    """Refuse credentials in the recipe: files of the run would show them, so they belong in the environment."""
    uri = config.tracking.mlflow_uri
    if uri is not None and mask(without := take_out(uri, {})) != without:
        checks.of("tracking").fail(
            "tracking.mlflow_uri",
            "this address contains a secret that would be written to config.yaml, run.json and the report",
            found=mask(uri),
            allowed="user name and password in front of the host, or in the environment, and no other secret",
            fix=f"write scheme://USER:PASSWORD@host, or scheme://***@host and export {USER} and {PASSWORD}",
        )
    if config.tracking.mlflow and uri is not None:
        try:
            put_back(uri, os.environ)
        except KeyError:
            checks.of("tracking").fail(
                "tracking.mlflow_uri",
                "this address hides the store's user name and password, and the environment lacks them",
                found=uri,
                allowed=f"both in the environment: {USER} and {PASSWORD}",
                fix="export them, or give them in the address again, or set tracking.mlflow=false",
            )
    _, places = hide(config.model_copy(update={"tracking": type(config.tracking)()}).model_dump())
    for key in places:
        checks.of("secrets").fail(
            key,
            "this looks like a secret; config.yaml, run.json, report.html, checkpoints and trackers would show it",
            found=MASK,
            allowed="names of environment variables, which processes of the run inherit",
            fix=_instead(key),
        )


def _instead(key: str) -> str:
    """Return where the secret at `key` belongs."""
    if key.startswith("env.mcp."):
        return "export it, and name the variable in token_env (for a url) or pass_env (for a command)"
    if key.startswith("launch."):
        return "export it in the shell that submits the run"
    above = key.rpartition(".")[0]
    if key.startswith("reward."):
        return f"export it, and name the variable: {above}.api_key_env for http and judge; a function reads os.environ"
    return f"export it, and give {above or 'the recipe'} the name of the variable to read"
