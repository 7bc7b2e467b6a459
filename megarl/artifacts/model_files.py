"""Files next to a model's weights (tokenizer, generation_config.json), and advice for folders that are not models.

Read without transformers.
"""

from __future__ import annotations

import json
from pathlib import Path

from megarl.artifacts.trained import steps_in
from megarl.system.errors import ConfigError

#: Names of the files that a tokenizer may consist of.
TOKENIZER_FILES = (
    *("tokenizer*", "vocab*", "merges.txt", "*.tiktoken", "*.model", "tekken.json", "tokenization*.py"),
    *("special_tokens_map.json", "added_tokens.json", "chat_template*", "additional_chat_templates/*.jinja"),
)
# Patterns of file names. A tokenizer has at least one such file: its tokens, or the name of the code that builds it.
_TOKENS = ("tokenizer.json", "tokenizer_config.json", "*.model", "vocab*", "*.tiktoken", "tekken.json")


def check_tokenizer_files(folder: Path, key: str) -> None:
    """Check that a folder, set at `key`, has a tokenizer; transformers would silently create one with only a few
    tokens.
    """
    if not any(any(folder.glob(pattern)) for pattern in _TOKENS):
        raise ConfigError(
            "this folder has no tokenizer files",
            where=key,
            found=str(folder),
            allowed="a folder with tokenizer.json, or another form of a tokenizer that transformers reads",
            fix="copy them from the original model, or set model.tokenizer to that model",
        )


GENERATION_CONFIG = "generation_config.json"


def end_token_ids(folder: Path) -> list[int]:
    """Return `eos_token_id` in the folder's generation_config.json as a list; empty if it or the file is missing."""
    file = folder / GENERATION_CONFIG
    if not file.is_file():
        return []
    try:
        value = json.loads(file.read_text(encoding="utf-8")).get("eos_token_id")
    except (OSError, ValueError, AttributeError, RecursionError) as error:
        raise ConfigError(
            f"cannot read the model's {GENERATION_CONFIG}: {error}",
            where=str(file),
            fix="correct it, or copy or download the model again",
        ) from error
    ids = value if isinstance(value, list) else [] if value is None else [value]
    if wrong := [token for token in ids if isinstance(token, bool) or not isinstance(token, int) or token < 0]:
        raise ConfigError(
            "the end token is invalid",
            where=f"{file}: eos_token_id",
            found=wrong[0],
            allowed="an integer >= 0, or a list of them",
            fix="correct it",
        )
    return list(ids)


_GENERAL = "use the folder that save_pretrained or a hub download wrote"


def no_model(folder: Path, key: str) -> ConfigError:
    """Return the error for a folder, set at `key`, without config.json: what the folder is, and what to use instead."""
    description, fix = _adapter(folder) or _run(folder) or _checkpoints(folder) or _other_form(folder) or ("", _GENERAL)
    return ConfigError(
        f"the model folder has no config.json{description and f': it {description}'}",
        where=key,
        found=str(folder),
        fix=fix,
    )


def _adapter(folder: Path) -> tuple[str, str] | None:
    file = folder / "adapter_config.json"
    if not file.is_file():
        return None
    try:
        base = json.loads(file.read_text(encoding="utf-8"))["base_model_name_or_path"]
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        base = None
    fix = "merge the adapter into its model (peft: merge_and_unload), and use the merged model"
    return f"has an adapter{f' of {base}' if base else ''}, not a whole model", fix


def _run(folder: Path) -> tuple[str, str] | None:
    if not (folder / "config.yaml").is_file():
        return None
    for name in ("hf_best", "hf"):
        if (folder / name / "config.json").is_file():
            return "is the folder of a run", f"use the model that the run has exported: {folder / name}"
    made = _checkpoints(folder / "checkpoints")
    return "is the folder of a run", made[1] if made else "let the run finish: it has exported no model yet"


def _checkpoints(folder: Path) -> tuple[str, str] | None:
    """Describe a checkpoint, or a folder of checkpoints, with the advice to convert it; None for other folders."""
    whole, inside = (folder / "meta.json").is_file(), steps_in(folder)
    if not whole and not inside:
        return None
    newest = folder if whole else folder / f"step_{inside[-1]}"
    kind = "is a checkpoint of a run" if whole else "has the checkpoints of a run"
    return kind, f"convert the checkpoint with megarl convert {newest} TARGET, and use TARGET"


def _other_form(folder: Path) -> tuple[str, str] | None:
    for pattern, form in (
        ("*.gguf", "GGUF"),
        ("consolidated*.pth", "Meta's own form"),
        ("*.index", "TensorFlow's form"),
    ):
        if any(folder.glob(pattern)):
            return f"has weights in {form}", "convert them to safetensors with the tools of transformers"
    if (folder / "model_index.json").is_file():
        return "has a pipeline of diffusers", "use a language model"
    inside = sorted(file.parent for file in folder.glob("*/config.json"))
    return ("has a model in a subfolder", f"did you mean {inside[0]}?") if inside else None
