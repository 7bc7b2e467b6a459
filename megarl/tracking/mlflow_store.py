"""Checks that MLflow's store can be opened and its server replies, before MLflow starts, whose retries take minutes."""

from __future__ import annotations

import contextlib
import http.client
import os
import shutil
import sqlite3
import ssl
import tempfile
import urllib.error
import urllib.request
from collections.abc import Callable
from importlib.metadata import entry_points
from pathlib import Path
from urllib.parse import unquote, urlsplit

from megarl.system.credentials import mask
from megarl.system.errors import ConfigError

_FILE = "mlflow.db"
_KEY = "tracking.mlflow_uri"
_ANSWER_S = 3.0
_SCHEMES = ("sqlite", "http", "https", "postgresql", "mysql", "mssql", "file", "databricks", "databricks-uc", "uc")


def check_store(uri: str) -> None:
    """Check the scheme of `uri` and, for a SQLite store, its file and folder. Nothing is created. Raise ConfigError if
    MLflow has no store for this scheme, or the file cannot be written.
    """
    scheme, colon, _ = uri.partition(":")
    kind = scheme.lower().partition("+")[0]  # the part before + in postgresql+psycopg2
    if colon and kind not in _SCHEMES and scheme not in entry_points(group="mlflow.tracking_store").names:
        raise ConfigError(
            f"MLflow has no store for {kind!r}",
            where=_KEY,
            found=mask(uri),
            allowed=", ".join(f"{name}:" for name in _SCHEMES),
            fix="correct the address, or set tracking.mlflow=false",
        )
    file = _sqlite_file(uri)
    why = None if file is None else _unwritable(file)
    if why is not None:
        raise ConfigError(
            f"this SQLite store cannot be opened: {why}",
            where=_KEY,
            found=mask(uri),
            allowed="sqlite:///FILE (relative) or sqlite:////FILE, in a folder that exists and that you may write to",
            fix="create the folder, name another one, or leave out tracking.mlflow_uri to use a store in tracking.dir",
        )


def _sqlite_file(uri: str) -> Path | None:
    scheme, _, rest = uri.partition(":")
    name = unquote(rest.removeprefix("///").partition("?")[0])
    if scheme.lower().partition("+")[0] != "sqlite" or not rest.startswith("///"):
        return None
    return None if name in ("", ":memory:") or name.startswith("file:") else Path(name)


def make_store(uri: str, connect: Callable[[str], object]) -> None:
    """Create the file of a SQLite store with all its tables, unless the file exists.

    MLflow creates one table after another. A run that is interrupted meanwhile would leave a file that no later run can
    open, so the tables are created in a temporary file, which is then put in place at once.
    """
    file = _sqlite_file(uri)
    if file is None or file.exists():
        return
    with tempfile.TemporaryDirectory(prefix="megarl-mlflow-") as folder:
        whole, copy = Path(folder) / _FILE, file.with_name(f".{file.name}.{os.getpid()}")
        connect(f"sqlite:///{whole}")
        try:
            shutil.copyfile(whole, copy)
            # `link` fails if another run has created the store meanwhile, or if the file system has no hard links.
            with contextlib.suppress(OSError):
                os.link(copy, file)
        finally:
            copy.unlink(missing_ok=True)


def default_store(folder: Path) -> tuple[str, str]:
    """Return the addresses of the store in `folder` (the value of `tracking.dir`) and of its artifacts. Raise
    ConfigError if the folder's name is not UTF-8.
    """
    file = folder.absolute() / _FILE
    try:
        text = file.as_posix()
        text.encode()
    except UnicodeEncodeError as error:
        problem = "the path of the folder is not UTF-8, which MLflow requires"
        fix = "name another folder, or set tracking.mlflow=false"
        raise ConfigError(problem, where="tracking.dir", found=os.fsencode(folder.absolute()), fix=fix) from error
    return _sqlite_uri(text), (folder.absolute() / "mlartifacts").as_uri()


def folder_of_default_store(uri: str) -> Path | None:
    """Return the folder of megarl's default MLflow store (a SQLite file) at `uri`; None if `uri` is another kind of
    store, or if the file is gone."""
    file = _sqlite_file(uri)
    return file.parent if file is not None and file.name == _FILE and file.is_file() else None


def _sqlite_uri(path: str) -> str:
    """Return the address of a SQLite file; SQLAlchemy's version decides which characters it must quote."""
    if not set(path) & set("%?"):
        return f"sqlite:///{path}"
    from sqlalchemy.engine import URL, make_url

    uri = URL.create("sqlite", database=path).render_as_string()
    if make_url(uri).database != path:
        raise ConfigError(
            "the path of the folder has a character that MLflow's addresses cannot contain",
            where="tracking.dir",
            found=path,
            allowed="a path without % and ?",
            fix="name another folder, or set tracking.mlflow_uri",
        )
    return uri


def check_default_store(folder: Path) -> None:
    """Check the store in `tracking.dir`, if it exists. Raise ConfigError if the folder's name is not UTF-8, or the file
    cannot be used.
    """
    default_store(folder)
    file = folder.absolute() / _FILE
    why = _unusable(file) if file.is_file() else None
    if why is not None:
        fix = "end the process that uses it, name another folder, or set tracking.mlflow=false"
        raise ConfigError(f"MLflow's store cannot be used: {why}", where="tracking.dir", found=str(file), fix=fix)


def _unusable(file: Path) -> str | None:
    """Return why a SQLite file cannot be written, such as a lock of another process; None if it can be written."""
    try:
        with contextlib.closing(sqlite3.connect(file, timeout=_ANSWER_S, isolation_level=None)) as database:
            database.execute("BEGIN IMMEDIATE")
            database.execute("ROLLBACK")
    except sqlite3.Error as error:
        return str(error)
    return None


def _unwritable(path: Path) -> str | None:
    if not path.parent.is_dir():
        return f"folder not found: {path.parent}"
    if path.is_dir():
        return f"{path} is a folder"
    if path.exists() and not os.access(path, os.W_OK):
        return f"the file {path} is read-only"
    if path.is_file() and (why := _unusable(path)) is not None:
        return why
    try:
        if os.access(path.parent, os.W_OK):
            # Try to create the file: in file systems such as /proc, root may write but not create files.
            if not path.exists():
                tempfile.NamedTemporaryFile(dir=path.parent).close()
            return None
    except OSError:
        pass
    return f"the folder {path.parent} is read-only"


_GATEWAY_ERRORS = (502, 503, 504)  # status codes with which proxies report that a server is down


def unreachable(uri: str) -> str | None:
    """Return why no server replies at `uri` within a few seconds; None if one replies or `uri` is not http(s).

    Any reply counts, even a rejection, because MLflow's client checks user names, certificates and paths. Proxies from
    the environment are used, as by this client.
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
        return None  # the text is no address; MLflow's client will report that
    except (OSError, http.client.HTTPException) as error:
        return f"{type(error).__name__}: {error}".rstrip(": ")
    return None


def down_text(uri: str, reason: str) -> str:
    """Return the warning that a server does not reply."""
    return (
        f"tracking.mlflow_uri: MLflow does not reply at {mask(uri)} ({reason}); the run continues without it, and "
        "metrics.jsonl has every number"
    )
