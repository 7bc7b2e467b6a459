"""Turn `pkg.mod:fn` in a recipe into the function, with an error a user can act on; versions of what is installed."""

from __future__ import annotations

import importlib
import importlib.metadata
import re
from collections.abc import Callable
from typing import Any

from megarl.errors import UserError, close_matches

_MODULE = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_][\w.]*")
_FORMS = "pkg.mod:fn, pkg.mod:Class.method, or pkg.mod.fn"


def is_module_reference(text: str) -> bool:
    """True for `pkg.mod:fn`, a reference into an importable module."""
    return _MODULE.fullmatch(text) is not None and not text.partition(":")[0].endswith(".py")


def is_file_reference(text: str) -> bool:
    """True for `path/file.py:fn`."""
    return text.rpartition(":")[0].endswith(".py")


def import_callable(path: Callable[..., Any] | str, *, where: str) -> Callable[..., Any]:
    """The callable behind "pkg.mod:Class.method", "pkg.mod:fn" or "pkg.mod.fn"; a callable is returned as it is.

    Args:
        path: import path, or the callable itself.
        where: configuration key or node it was found at, for the message.

    Raises:
        UserError: the module does not import, the name is not in it, or it is not callable.
    """
    if callable(path):
        return path
    module_name, colon, qualname = path.partition(":")
    if not colon:
        module_name, _, qualname = path.rpartition(".")
    if not module_name or not qualname:
        raise UserError("this is not an import path", where=where, found=path, allowed=_FORMS)
    try:
        target: Any = importlib.import_module(module_name)
    except Exception as error:
        raise UserError(
            f"module {module_name!r} does not import: {type(error).__name__}: {error}",
            where=where,
            found=path,
            allowed=_FORMS,
            fix="install the module, put its folder on PYTHONPATH, or correct the name",
        ) from error
    for part in qualname.split("."):
        if not hasattr(target, part):
            near = close_matches(part, dir(target), n=3)
            raise UserError(
                f"{target.__name__!r} has no {part!r}",
                where=where,
                found=path,
                fix=f"did you mean {' or '.join(near)}?" if near else None,
            )
        target = getattr(target, part)
    if not callable(target):
        raise UserError("this is not callable", where=where, found=path, allowed=_FORMS)
    return target


def installed_version(package: str) -> str | None:
    """Version of an installed distribution, without importing it; None when it is missing."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None
