"""Descriptions of folders without a config.json that users name as a model by mistake."""

from __future__ import annotations

import json
from pathlib import Path

from megarl.errors import ConfigError

_GENERAL = "name the folder that save_pretrained or a hub download wrote"


def no_model(folder: Path, key: str) -> ConfigError:
    """Return the error for `folder`, named at `key`, without a config.json: its kind, and the one to name instead."""
    what, fix = _adapter(folder) or _run(folder) or _checkpoints(folder) or _other_form(folder) or ("", _GENERAL)
    return ConfigError(
        f"the model folder has no config.json{what and f': it {what}'}", where=key, found=str(folder), fix=fix
    )


def _adapter(folder: Path) -> tuple[str, str] | None:
    file = folder / "adapter_config.json"
    if not file.is_file():
        return None
    try:
        base = json.loads(file.read_text(encoding="utf-8"))["base_model_name_or_path"]
    except (OSError, ValueError, KeyError, TypeError):
        base = None
    fix = "merge the adapter into its model (peft: merge_and_unload), and name the folder of the result"
    return f"holds an adapter{f' of {base}' if base else ''}, and adapters are not applied to a model", fix


def _run(folder: Path) -> tuple[str, str] | None:
    if not (folder / "config.yaml").is_file():
        return None
    for name in ("hf_best", "hf"):
        if (folder / name / "config.json").is_file():
            return "is the folder of a run", f"name the model that the run has left: {folder / name}"
    made = _checkpoints(folder / "checkpoints")
    return "is the folder of a run", made[1] if made else "let the run finish: it has left no model yet"


def _checkpoints(folder: Path) -> tuple[str, str] | None:
    """Return the description of a checkpoint of a run, or of the folder of all checkpoints."""
    whole = (folder / "meta.json").is_file()
    inside = [file.parent for file in folder.glob("step_*/meta.json") if file.parent.name[5:].isdigit()]
    if not whole and not inside:
        return None
    newest = folder if whole else max(inside, key=lambda step: int(step.name[5:]))
    what = "is a checkpoint of a run" if whole else "holds the checkpoints of a run"
    return what, f"write the model first: megarl convert {newest} TARGET, and name TARGET"


def _other_form(folder: Path) -> tuple[str, str] | None:
    for pattern, form in (
        ("*.gguf", "GGUF"),
        ("consolidated*.pth", "Meta's own form"),
        ("*.index", "TensorFlow's form"),
    ):
        if any(folder.glob(pattern)):
            return f"holds weights in {form}", "convert them to safetensors with the tools of transformers"
    if (folder / "model_index.json").is_file():
        return "holds a pipeline of diffusers", "name a language model"
    inside = sorted(file.parent for file in folder.glob("*/config.json"))
    return ("has a model inside", f"did you mean {inside[0]}?") if inside else None
