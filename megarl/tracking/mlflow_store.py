"""Checks that MLflow's store can be opened and its server answers, before MLflow, which tries again for minutes."""

from __future__ import annotations

import http.client
import os
import ssl
import tempfile
import urllib.error
import urllib.request
from importlib.metadata import entry_points
from pathlib import Path
from urllib.parse import unquote, urlsplit

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


_ANSWER_S = 3.0
_GATEWAY_ERRORS = (502, 503, 504)  # proxies' status codes for a server that is down


def unreachable(uri: str) -> str | None:
    """Explain why no server answers at `uri` within seconds; None when one does, or `uri` is no http(s) address.

    Any answer counts, also a refusal: MLflow's client judges user names, certificates and paths. Proxies of the
    environment are used, as by that client.
    """
    parts = urlsplit(uri)
    if parts.scheme not in ("http", "https"):
        return None
    host = parts.netloc.rpartition("@")[2]
    address = parts._replace(netloc=host, path=parts.path.rstrip("/") + "/health", query="", fragment="").geturl()
    try:
        urllib.request.urlopen(address, timeout=_ANSWER_S).close()
    except urllib.error.HTTPError as error:
        return f"HTTP status {error.code}" if error.code in _GATEWAY_ERRORS else None
    except urllib.error.URLError as error:
        return None if isinstance(error.reason, ssl.SSLError) else str(error.reason)
    except (http.client.InvalidURL, ValueError):
        return None  # not an address: MLflow's client reports the error
    except (OSError, http.client.HTTPException) as error:
        return f"{type(error).__name__}: {error}".rstrip(": ")
    return None


def down_text(uri: str, reason: str) -> str:
    """Return the warning for a server that does not answer."""
    return (
        f"tracking.mlflow_uri: MLflow does not answer at {mask(uri)} ({reason}); the run goes on without it and "
        "metrics.jsonl has every number"
    )
