"""`megarl convert ... --push-to-hub NAME`: write a model card and upload the folder with huggingface_hub.

huggingface_hub reads the token from `hf auth login` or from HF_TOKEN; megarl never writes it.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import megarl
from megarl.artifacts.facts import is_hub_name
from megarl.artifacts.jsonl import read_jsonl
from megarl.artifacts.records import read_run
from megarl.config.yamlio import to_yaml
from megarl.system.credentials import mask, mask_yaml
from megarl.system.errors import ConfigError, MegarlError

_WHERE = "--push-to-hub"


def check_push(name: str) -> None:
    """Refuse an upload that cannot succeed, before anything is written. No request is sent to the hub. Raise
    ConfigError if the name is invalid, the hub is switched off, or there is no token.
    """
    from huggingface_hub import constants, get_token
    from huggingface_hub.errors import HFValidationError
    from huggingface_hub.utils import validate_repo_id

    try:
        validate_repo_id(name)
    except HFValidationError as error:
        fix = "name it USER/MODEL or ORGANISATION/MODEL"
        raise ConfigError(f"the repository name is invalid: {error}", where=_WHERE, found=name, fix=fix) from error
    if constants.is_offline_mode():
        problem = "uploads are impossible because the hub is switched off"
        switches = [switch for switch in ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE") if os.environ.get(switch)]
        raise ConfigError(
            problem,
            where=_WHERE,
            found=", ".join(switches) or None,
            fix="unset HF_HUB_OFFLINE and TRANSFORMERS_OFFLINE",
        )
    if get_token() is None:
        fix = "run `hf auth login`, or set HF_TOKEN in the environment (never in a recipe)"
        raise ConfigError("the hub's token is missing", where=_WHERE, found=name, fix=fix)


def push(folder: Path, name: str, *, public: bool = False) -> str:
    """Upload the files of `folder` to the repository `name`, which is created if it is missing; return its address. The
    folder stays after a failure, whose message has the command that uploads it.
    """
    from huggingface_hub import HfApi

    api = HfApi()
    try:
        made = api.create_repo(name, private=not public, exist_ok=True)
        name = made.repo_id  # the hub adds the user's name to a name without one
        closed = public or bool(api.model_info(name).private)
        if closed:
            api.upload_folder(repo_id=name, folder_path=folder, commit_message="Upload by megarl convert")
    except Exception as error:  # errors of the hub, and of the HTTP client in use
        raise MegarlError(
            f"the upload to {name} failed ({type(error).__name__}: {mask(str(error))})\n"
            f"  the export is in {folder}\n"
            f"  fix:     upload it with: hf upload {name} {folder} .{'' if public else ' --private'}"
        ) from error
    if not closed:
        raise MegarlError(
            f"the repository {name} exists and is public, so nothing was uploaded; the export is in {folder}\n  fix:  "
            f"   name another repository, or upload it with: hf upload {name} {folder} ."
        )
    return str(made)


def write_card(folder: Path, source: Path) -> None:
    """Write README.md with base model, data, metrics, recipe and command of the run to which `source` belongs."""
    run = run_folder(source)
    record = {} if run is None else read_run(run)
    config: dict[str, Any] = record.get("config") or {}
    model = config.get("model", {}).get("path") or ("" if run is not None else str(source))
    data = [str(file) for file in config.get("data", {}).get("train_files") or []]
    head: dict[str, Any] = {"library_name": "transformers", "tags": ["megarl"]}
    if is_hub_name(model):
        head["base_model"] = model
    if names := [file.partition("@")[0].partition(":")[0] for file in data if is_hub_name(file.partition(":")[0])]:
        head["datasets"] = names
    title = record.get("name") or folder.name
    parts = [f"---\n{to_yaml(head)}---\n\n# {title}\n\nWritten by megarl {megarl.__version__}."]
    if model:
        parts.append(f"Base model: `{model}`.")
    if data:
        parts.append("Trained on: " + ", ".join(f"`{file}`" for file in data) + ".")
    if run is not None and (numbers := _last_metrics(run)):
        rows = "\n".join(f"| `{name}` | {value:.4g} | {step} |" for name, (value, step) in numbers.items())
        parts.append(f"## Metrics\n\n| metric | last value | step |\n|---|---|---|\n{rows}")
    if command := record.get("command"):
        parts.append(f"## Command\n\n```\n{command}\n```")
    if config:
        parts.append(f"## Recipe\n\n```yaml\n{mask_yaml(to_yaml(config))}```")
    text = mask("\n\n".join(parts) + "\n")
    if (home := str(Path.home())) != "/":
        text = text.replace(f"{home}/", "~/")
    (folder / "README.md").write_text(text, encoding="utf-8")


def run_folder(source: Path) -> Path | None:
    """Return the run folder that contains an export or checkpoint, or None."""
    above = [source.absolute().parent, source.absolute().parent.parent]
    return next((folder for folder in above if (folder / "run.json").is_file()), None)


def _last_metrics(run: Path) -> dict[str, tuple[float, int]]:
    """Return the last value of each held-out metric with its step; without held-out metrics, return the metrics of
    scores (`critic/score/`) and of supervised training (`sft/`).
    """
    last: dict[str, tuple[float, int]] = {}
    file = run / "metrics.jsonl"
    for line in read_jsonl(file, needs={"step": int}) if file.is_file() else []:
        for name, value in line.items():
            if name not in ("step", "time") and isinstance(value, int | float):
                last[name] = (float(value), line["step"])
    held_out = {name: value for name, value in last.items() if name.startswith("val/")}
    return held_out or {name: value for name, value in last.items() if name.startswith(("critic/score/", "sft/"))}
