"""Files beside a model's weights: those of its tokenizer, and generation_config.json. Read without transformers.

Also descriptions of folders without a config.json that users name as a model by mistake.
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
# One of these holds the tokens, or names the code that builds them.
_TOKENS = ("tokenizer.json", "tokenizer_config.json", "*.model", "vocab*", "*.tiktoken", "tekken.json")


def check_tokenizer_files(folder: Path, key: str) -> None:
    """Refuse a folder without a tokenizer, for which transformers would invent one with a few tokens. `key` names it.

    Raises:
        ConfigError: names the folder.
    """
    if not any(any(folder.glob(pattern)) for pattern in _TOKENS):
        raise ConfigError(
            "there are no files of a tokenizer in this folder",
            where=key,
            found=str(folder),
            allowed="a folder with tokenizer.json, or another form of a tokenizer that transformers reads",
            fix="copy them from the model that it was made of, or set model.tokenizer to that model",
        )


GENERATION_CONFIG = "generation_config.json"


def end_token_ids(folder: Path) -> list[int]:
    """Return `eos_token_id` of the file in `folder` as a list; empty if it or the file is missing.

    Raises:
        ConfigError: the file cannot be read, or the value has another type.
    """
    file = folder / GENERATION_CONFIG
    if not file.is_file():
        return []
    try:
        value = json.loads(file.read_text(encoding="utf-8")).get("eos_token_id")
    except (OSError, ValueError, AttributeError, RecursionError) as error:
        raise ConfigError(
            f"the model's {GENERATION_CONFIG} cannot be read: {error}",
            where=str(file),
            fix="correct it, or copy or download the model again",
        ) from error
    ids = value if isinstance(value, list) else [] if value is None else [value]
    if wrong := [token for token in ids if isinstance(token, bool) or not isinstance(token, int) or token < 0]:
        raise ConfigError(
            "an end token is no token id",
            where=f"{file}: eos_token_id",
            found=wrong[0],
            allowed="an integer >= 0, or a list of them",
            fix="correct it",
        )
    return list(ids)


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
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
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
    whole, inside = (folder / "meta.json").is_file(), steps_in(folder)
    if not whole and not inside:
        return None
    newest = folder if whole else folder / f"step_{inside[-1]}"
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
