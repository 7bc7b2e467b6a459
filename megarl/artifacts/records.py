"""Small JSON files of a run folder: written atomically, and readable after a power cut, a full disk or a manual edit.

    write_record   a reader sees the old file or the new one, and the new one is on disk
    read_record    an absent or damaged file is an empty record; damage is logged once
    set_aside      an obstructing file or folder is kept under another name

None of them decides whether a run starts, resumes or has succeeded: its state is in its checkpoints.
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
    "folder": str,  # where relative paths of the configuration start; runs of earlier versions lack it
}
_told: set[Path] = set()
log = logging.getLogger(__name__)


def write_record(path: Path, record: Mapping[str, Any]) -> None:
    """Write a JSON object; it is on disk on return."""
    if path.is_dir():
        set_aside(path, "a folder")
    write_atomically(path, json.dumps(record, indent=1, default=str), durable=True)


def read_record(path: Path, needs: Needs | None = None, *, tell: bool = True) -> dict[str, Any]:
    """Read the JSON object in a file; empty if there is none, or if something else is there, which is logged once.

    Args:
        path: the file.
        needs: required fields and their types.
        tell: log damage; False: the caller does.
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
        warn_once(path, f"{path} cannot be read and does not count: {reason}")
    return {}


def read_run(run_dir: Path, *, tell: bool = True) -> dict[str, Any]:
    """Read the record of a run, RUN_DIR/run.json, without fields of a wrong type; see `read_record`."""
    run = read_record(run_dir / RUN, tell=tell)
    return {key: value for key, value in run.items() if isinstance(value, _RUN_TYPES.get(key, object))}


def setting(run: Mapping[str, Any], section: str, key: str) -> Any:
    """Return `config.section.key` of the record of a run; None if it is missing."""
    found = run.get("config", {}).get(section)
    return found.get(key) if isinstance(found, dict) else None


def parse_object(data: bytes, needs: Needs) -> dict[str, Any]:
    """Parse the JSON object in `data`; NaN and infinity become None.

    Raises:
        ValueError: it is no object, or lacks a required field.
    """
    text = data.strip(b"\0 \t\r\n")  # zero bytes: a file system reserved the space and then lost power
    if not text:
        raise ValueError("it holds nothing but zero bytes" if b"\0" in data else "it is empty")
    try:
        found = json.loads(text, parse_constant=lambda name: None)
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error
    except ValueError as error:
        raise ValueError(f"it is not JSON ({error})") from error
    if not isinstance(found, dict):
        raise ValueError(f"it is no JSON object, but of type {type(found).__name__}")
    for name, kind in needs.items():
        value = found.get(name)
        if not isinstance(value, kind) or isinstance(value, bool):
            raise ValueError(f"its field {name} is missing or of another type")
    return found


def has_fields(found: object, needs: Needs) -> bool:
    """Return whether this is an object with these fields of these types."""
    return isinstance(found, dict) and all(
        isinstance(found.get(name), kind) and not isinstance(found[name], bool) for name, kind in needs.items()
    )


def set_aside(path: Path, why: str) -> Path:
    """Rename a damaged or obstructing file or folder to NAME.damaged-N, and log that."""
    number = 1
    while (target := path.with_name(f"{path.name}.damaged-{number}")).exists():
        number += 1
    path.rename(target)
    log.warning("%s was damaged (%s): it is %s now, and the run goes on without it", path, why, target.name)
    return target


def warn_once(path: Path, text: str) -> None:
    """Log a warning about a file once per process."""
    if path not in _told:
        _told.add(path)
        log.warning("%s", text)
