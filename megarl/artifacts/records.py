"""Small JSON files of a run folder: written atomically, read safely after a power cut, a full disk or an edit.

    write_record   atomic: a reader sees the old or the new file; durable
    read_record    an absent or damaged file gives an empty record; damage is logged once
    set_aside      renames a damaged or obstructing file or folder

No record decides whether a run starts, resumes or has succeeded: its state is in its checkpoints.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megarl.system.processes import write_atomically

RUN = "run.json"
Needs = Mapping[str, type | tuple[type, ...]]
_NUMBER = (int, float)
_RUN_TYPES: Needs = {
    "name": str,
    "stage": str,
    "status": str,
    "started": _NUMBER,  # unix time
    "ended": _NUMBER,
    "machine": dict,
    "config": dict,
    "folder": str,  # base of relative paths in the configuration; missing in runs of earlier versions
}
_reported: set[Path] = set()
log = logging.getLogger(__name__)


def write_record(path: Path, record: Mapping[str, Any]) -> None:
    """Write a JSON object atomically and durably."""
    if path.is_dir():
        set_aside(path, "a folder")
    write_atomically(path, json.dumps(record, indent=1, default=str), durable=True)


def read_record(path: Path, needs: Needs | None = None, *, tell: bool = True) -> dict[str, Any]:
    """Read the JSON object in a file; {} if the file is missing or damaged. Damage is logged once.

    Args:
        path: the file.
        needs: required fields and their types.
        tell: whether to log damage.
    """
    try:
        return parse_object(path.read_bytes(), needs or {})
    except FileNotFoundError:
        return {}
    except OSError as error:
        reason = error.strerror or str(error)
    except ValueError as error:
        reason = str(error)
    if tell:
        warn_once(path, f"{path} cannot be read and is ignored: {reason}")
    return {}


def read_run(run_dir: Path, *, tell: bool = True) -> dict[str, Any]:
    """Read the record of a run, RUN_DIR/run.json, without fields of a wrong type; see `read_record`."""
    run = read_record(run_dir / RUN, tell=tell)
    return {key: value for key, value in run.items() if isinstance(value, _RUN_TYPES.get(key, object))}


def setting(run: Mapping[str, Any], section: str, key: str) -> Any:
    """Return `config.section.key` from a run's record; None if it is missing."""
    values = run.get("config", {}).get(section)
    return values.get(key) if isinstance(values, dict) else None


def parse_object(data: bytes, needs: Needs) -> dict[str, Any]:
    """Parse the JSON object in `data`; NaN and infinity become None.

    Raises:
        ValueError: `data` is not a JSON object, or lacks a required field.
    """
    text = data.strip(b"\0 \t\r\n")  # a file system may leave zero bytes after a power cut
    if not text:
        raise ValueError("the JSON text has only zero bytes" if b"\0" in data else "the JSON text is empty")
    try:
        parsed = json.loads(text, parse_constant=lambda name: None)
    except RecursionError as error:
        raise ValueError("the JSON text is nested too deeply") from error
    except ValueError as error:
        raise ValueError(f"the text is not JSON ({error})") from error
    if not isinstance(parsed, dict):
        raise ValueError(f"the JSON text is not an object but a value of type {type(parsed).__name__}")
    for name, kind in needs.items():
        value = parsed.get(name)
        if not isinstance(value, kind) or isinstance(value, bool):
            raise ValueError(f"the field {name} of the JSON object is missing or has a wrong type")
    return parsed


def has_fields(found: object, needs: Needs) -> bool:
    """Return whether `found` is an object with the fields and types in `needs`."""
    return isinstance(found, dict) and all(
        isinstance(found.get(name), kind) and not isinstance(found[name], bool) for name, kind in needs.items()
    )


def set_aside(path: Path, why: str) -> Path:
    """Rename a damaged or obstructing file or folder to NAME.damaged-N, and log that."""
    number = 1
    while (target := path.with_name(f"{path.name}.damaged-{number}")).exists():
        number += 1
    path.rename(target)
    log.warning("%s is damaged (%s): renamed it to %s; the run continues without it", path, why, target.name)
    return target


def warn_once(path: Path, text: str) -> None:
    """Log a warning about a file once per process."""
    if path not in _reported:
        _reported.add(path)
        log.warning("%s", text)
