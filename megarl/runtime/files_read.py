"""Checksums of the files that a recipe names, so that a resumed run notices files that were changed in place.

Checkpoints keep the checksums from the start of the run. Weights that a resumed run reads again (reference, teacher,
reward model, base of adapters) have checksums of their own, see `frozen_models`; the weights of policy and critic come
from the checkpoint.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from megarl.data.sources import visible_files
from megarl.runtime.resume_compatibility import COLD_START, Command, Plain, announcements, value_at
from megarl.system.errors import ConfigError
from megarl.training.checksums import FileChecksum, checksum_of, few, text_checksum

#: Checksums by key of the recipe and by file.
FilesRead = dict[str, dict[str, FileChecksum]]

_SECTIONS = ("model", "algorithm", "data", "reward", "env", "critic", "reward_model", "teacher", "sft", "preference")
# last parts of keys that name models, and of keys whose value may be a folder
_MODELS, _FOLDERS = ("path", "tokenizer"), ("path", "tokenizer", "train_files", "val_files")
_WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".h5", ".msgpack", ".onnx")
_INDEX = ".index.json"
_CACHE = "cache"  # a judge's cache, which the run itself writes
_TEMPLATE, _CRITIC = "chat_template", "critic.path"
#: Keys of config.json that do not change what a model computes.
_NOTES = frozenset({"transformers_version", "_name_or_path", "torch_dtype", "dtype"})
_TOKENIZER = frozenset(
    ("tokenizer.json", "tokenizer.model", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json")
) | {"vocab.json", "vocab.txt", "merges.txt", "spiece.model"}


def files_read(config: Plain) -> FilesRead:
    """Return the checksums of the local files that a recipe (as plain data) names; unreadable files are left out."""
    checksums: FilesRead = {}
    for section in _SECTIONS:
        for key, text in _texts(config.get(section), section):
            for name, file in _files(key, text):
                checksums.setdefault(key, {}).update(_checksums(name, file))
    if (pictures := value_at(config, "data.image_dir")) and isinstance(pictures, str):
        checksums["data.image_dir"] = _listing(Path(os.path.expanduser(pictures)))
    return checksums


def changed_lines(
    meta: Mapping[str, Any],
    state: Mapping[str, Any],
    now: Plain,
    read: FilesRead,
    command: Command,
    *,
    begun: bool,
    generated: int | None = None,
) -> list[str]:
    """Return the lines of `announcements` and `changes_in_place` for a checkpoint with this meta.json and state.

    `now` is the recipe of this start, and `read` has the checksums of its files. Errors are those of both functions.
    """
    lines = announcements(meta["config"], now, command, begun=begun, generated=generated)
    lines += changes_in_place(state.get("read"), read, (meta["config"], now), command, begun=begun)
    return [f"changed since the checkpoint: {line}" for line in lines]


def changes_in_place(
    before: Mapping[str, Mapping[str, FileChecksum]] | None,
    now: FilesRead,
    configs: tuple[Plain, Plain],
    command: Command,
    *,
    begun: bool,
) -> list[str]:
    """Return one line per recipe key whose value is unchanged since the checkpoint but whose files have changed.

    Args:
        before: checksums in the checkpoint; None: an earlier version wrote it without checksums.
        now: checksums of the files as they are now.
        configs: the recipe of the checkpoint, and the recipe of this start.
        command: the megarl command, for example `train`.
        begun: whether RL has begun; False: the checkpoint is the result of a cold start.

    Raises:
        ConfigError: the checkpoint cannot be continued with the changed files.
    """
    if before is None:
        return []
    lines = []
    for key in sorted(set(before) | set(now)):
        old, new = before.get(key, {}), now.get(key, {})
        if value_at(configs[0], key) != value_at(configs[1], key) or old == new:
            continue
        names = [name for name in dict.fromkeys([*old, *new]) if old.get(name) != new.get(name)]
        if fixed := [name for name in names if _is_fixed(key, name) and (key != _CRITIC or name in new)]:
            raise ConfigError(
                "files have changed since the checkpoint, which cannot be continued with the new contents",
                where=key,
                found=few([_change(name, old, new) for name in fixed]),
                allowed="the contents that the run began with",
                fix="put the files back; trainer.resume=never starts from the beginning with the new ones",
            )
        if key == _CRITIC:
            continue  # a continued run reads the critic from its checkpoint, not from these files
        over = key.startswith("sft.") and command == "train" and begun
        lines.append(f"{key}: {few([_change(name, old, new) for name in names])}" + f" ({COLD_START})" * over)
    return lines


def _change(name: str, old: Mapping[str, Any], new: Mapping[str, Any]) -> str:
    if name not in new:
        return f"{name} is gone or cannot be read"
    return f"{name} {'has other contents' if name in old else 'is new'}"


def _is_fixed(key: str, name: str) -> bool:
    """Return whether a run cannot continue from its checkpoint if the content of this file has changed."""
    file = Path(name).name
    if file == "config.json":
        return key in ("model.path", _CRITIC)
    return key == "model.hf_config" or (key in ("model.path", "model.tokenizer") and file in _TOKENIZER)


def _texts(value: Any, key: str) -> Iterator[tuple[str, str]]:
    """Yield (text, recipe key) of every one-line text in a section; texts in a list have the key of the list."""
    if isinstance(value, Mapping):
        for name, inner in value.items():
            yield from _texts(inner, f"{key}.{name}")
    elif isinstance(value, list):
        for inner in value:
            yield from _texts(inner, key)
    elif isinstance(value, str) and "\n" not in value and len(value) < 1000:
        yield key, value


def _files(key: str, text: str) -> Iterator[tuple[str, Path]]:
    """Yield the files that the value `text` names: a file, `file.py` of `file.py:name`, or the files in a folder."""
    last = key.rpartition(".")[2]
    if last == _CACHE:
        return
    for name in dict.fromkeys((text, text.rpartition(":")[0], text.partition("@")[0])):
        path = Path(os.path.expanduser(name))  # Path.expanduser raises an error for a text such as "~you are"
        if path.suffix and _is(path, "is_file"):
            yield name, path
            return
        if last in _FOLDERS and name and _is(path, "is_dir"):
            for file in sorted(path.glob("*")) if last in _MODELS else visible_files(path):
                weights = file.suffix in _WEIGHTS or file.name.endswith(_INDEX)
                if _is(file, "is_file") and not (last in _MODELS and weights):
                    yield f"{name}/{file.relative_to(path)}", file
            return


def _is(path: Path, kind: str) -> bool:
    try:
        return bool(getattr(path, kind)())
    except (OSError, ValueError):
        return False


def _checksums(name: str, file: Path) -> dict[str, FileChecksum]:
    """Return the checksum of a file; a model's JSON is compared by its values, and its chat template separately."""
    try:
        if file.name not in _TOKENIZER | {"config.json"} or file.suffix != ".json":
            with file.open("rb") as opened:
                return {name: checksum_of(opened)}
        text = file.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return {}
    try:
        content = json.loads(text)
    except (ValueError, RecursionError):
        return {name: [text_checksum(text)]}
    templates: dict[str, FileChecksum] = {}
    if isinstance(content, dict):
        content = {key: value for key, value in content.items() if key not in _NOTES}
        if (template := content.pop(_TEMPLATE, None)) is not None:
            templates[f"{name} ({_TEMPLATE})"] = [text_checksum(json.dumps(template))]
    return {name: [text_checksum(json.dumps(content, sort_keys=True))], **templates}


def _listing(folder: Path) -> dict[str, FileChecksum]:
    """Return one checksum over names, sizes and times of all files in a folder of images, without reading them."""
    entries = []
    for file in sorted(folder.rglob("*")) if _is(folder, "is_dir") else []:
        try:
            status = file.stat()
        except OSError:
            continue
        entries.append(f"{file.relative_to(folder)} {status.st_size} {status.st_mtime_ns}")
    return {str(folder): [len(entries), text_checksum("\n".join(entries))]}
