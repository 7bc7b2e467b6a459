"""Check of an MLflow store that is not a server, before MLflow, which retries for minutes."""

from __future__ import annotations

import os
import tempfile
from importlib.metadata import entry_points
from pathlib import Path
from urllib.parse import unquote

from megarl.credentials import mask
from megarl.errors import ConfigError

_KEY = "tracking.mlflow_uri"
_SCHEMES = ("sqlite", "http", "https", "postgresql", "mysql", "mssql", "file", "databricks", "databricks-uc", "uc")


def check_store(uri: str) -> None:
    """Check the scheme of `uri` and, for a SQLite store, its file and folder. Nothing is created.

    Raises:
        ConfigError: MLflow has no store for this scheme, or the file cannot be written.
    """
    scheme, colon, rest = uri.partition(":")
    kind = scheme.lower().partition("+")[0]  # postgresql+psycopg2
    if colon and kind not in _SCHEMES and scheme not in entry_points(group="mlflow.tracking_store").names:
        raise ConfigError(
            f"MLflow has no store for {kind!r}",
            where=_KEY,
            found=mask(uri),
            allowed=", ".join(f"{name}:" for name in _SCHEMES),
            fix="correct the address, or set tracking.mlflow=false",
        )
    name = unquote(rest.removeprefix("///").partition("?")[0])
    if kind != "sqlite" or not rest.startswith("///") or name in ("", ":memory:") or name.startswith("file:"):
        return
    why = _unwritable(Path(name))
    if why is not None:
        raise ConfigError(
            f"this SQLite store cannot be opened: {why}",
            where=_KEY,
            found=mask(uri),
            allowed="sqlite:///FILE (relative) or sqlite:////FILE, in a folder that exists and that you may write to",
            fix="make the folder, name another, or leave tracking.mlflow_uri out: the store is then in tracking.dir",
        )


def _unwritable(path: Path) -> str | None:
    if not path.parent.is_dir():
        return f"there is no folder {path.parent}"
    if path.is_dir():
        return f"{path} is a folder"
    if path.exists() and not os.access(path, os.W_OK):
        return f"the file {path} is read-only"
    # Not /proc and the like, where root's permissions allow what no file system stores.
    if not os.access(path.parent, os.W_OK) or (not path.exists() and not _can_make_files(path.parent)):
        return f"the folder {path.parent} is read-only"
    return None


def _can_make_files(folder: Path) -> bool:
    try:
        handle, name = tempfile.mkstemp(dir=folder)
    except OSError:
        return False
    os.close(handle)
    os.unlink(name)
    return True
