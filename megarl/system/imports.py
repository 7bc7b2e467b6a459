"""Imports functions that a recipe names (`pkg.mod:fn` or `file.py:fn`), with helpful errors; versions of packages."""

from __future__ import annotations

import contextlib
import dis
import hashlib
import importlib
import importlib.metadata
import importlib.util
import linecache
import re
import sys
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

from megarl.system.errors import UserError, close_matches, describe, relative_path_fix, text_of

_MODULE = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_][\w.]*")
_FORMS = "pkg.mod:fn, pkg.mod:Class.method, pkg.mod.fn, or file.py:fn"


def is_module_reference(text: str) -> bool:
    """Return whether `text` has the form `pkg.mod:fn`."""
    return _MODULE.fullmatch(text) is not None and not text.partition(":")[0].endswith(".py")


def is_file_reference(text: str) -> bool:
    """Return whether `text` has the form `path/file.py:fn`."""
    return text.rpartition(":")[0].endswith(".py")


def source_file(reference: str) -> Path | None:
    """Return the Python file of `file.py:fn` or `pkg.mod:fn`; None when there is none."""
    module = reference.rpartition(":")[0]
    if is_file_reference(reference):
        file = Path(module).expanduser()
        return file if file.is_file() else None
    here = str(Path.cwd())
    added = here not in sys.path
    if added:
        sys.path.append(here)  # modules are also looked up in the current folder
    try:
        spec = importlib.util.find_spec(module) if module else None
    except (ImportError, ValueError):
        return None
    finally:
        if added:
            sys.path.remove(here)
    return Path(spec.origin) if spec is not None and spec.origin and spec.origin.endswith(".py") else None


#: Earlier names of modules that users' components may import -> current names.
_MOVED = {
    "megarl.errors": "megarl.system.errors",
    "megarl.envs.robots": "megarl.robots.envs",
    "megarl.metrics": "megarl.system.metrics",
    "megarl.simulators": "megarl.robots.simulators",
    "megarl.staleness": "megarl.dag.staleness",
    "megarl.tracing": "megarl.system.tracing",
}


def import_callable(path: Callable[..., Any] | str, *, where: str, component: bool = True) -> Callable[..., Any]:
    """Import the callable that "pkg.mod:Class.method", "pkg.mod:fn", "pkg.mod.fn" or "file.py:fn" names, relative to
    the current folder; return a callable unchanged. `component` marks its module as the user's own (see `of_user`).
    Raise UserError, which names the recipe key `where`.
    """
    if callable(path):
        return path
    module_name, colon, qualname = path.partition(":")
    if not colon:
        module_name, _, qualname = path.rpartition(".")
    if not module_name or not qualname:
        raise UserError("this is not an import path", where=where, found=path, allowed=_FORMS)
    is_file = module_name.endswith(".py")
    if is_file and not Path(module_name).expanduser().is_file():
        raise UserError(f"file not found: {module_name}", where=where, found=path, fix=relative_path_fix())
    try:
        target: Any = import_file(module_name) if is_file else import_module(module_name)
        target = of_user(target) if component else target
    except Exception as error:
        fix = "install the module, put its folder on PYTHONPATH, or correct the name"
        if isinstance(error, ModuleNotFoundError) and error.name in _MOVED:
            fix = f"import {_MOVED[error.name]}, which was called {error.name}"
        elif is_file or isinstance(error, ModuleExitError) or not isinstance(error, ImportError):
            fix = f"correct the {'file' if is_file else 'module'}"
        line = location(error, str(Path(module_name).expanduser().resolve()) if is_file else "")
        raise UserError(
            f"{'file' if is_file else 'module'} {module_name!r} does not import: {describe(error)}"
            f"{f' ({line})' if line else ''}",
            where=where,
            found=path,
            allowed=_FORMS,
            fix=fix,
        ) from error
    holder = module_name
    for part in qualname.split("."):
        if not hasattr(target, part):
            near = close_matches(part, dir(target), n=3)
            public = [key for key, value in vars(target).items() if callable(value) and not key.startswith("_")]
            raise UserError(
                f"{holder!r} has no {part!r}",
                where=where,
                found=path,
                allowed=public or f"nothing: {holder} defines no function",
                fix=f"did you mean {' or '.join(near)}?" if near else "name one of these" if public else "define it",
            )
        target, holder = getattr(target, part), part
    if not callable(target):
        raise UserError("this name is not callable", where=where, found=path, allowed=_FORMS)
    return target


def location(error: BaseException, file: str) -> str | None:
    """Return `file:line: code` of the innermost frame of `error` in `file`, or of its innermost frame if none is."""
    frames = traceback.extract_tb(error.__traceback__)
    if isinstance(error, SyntaxError) and error.filename:
        return f"{error.filename}:{error.lineno}: {(error.text or '').strip()}"
    inside = [frame for frame in frames if frame.filename == file] or list(frames)
    if not inside or "importlib" in inside[-1].filename:  # raised by the import itself, for example of a missing module
        return None
    frame = inside[-1]
    return f"{frame.filename}:{frame.lineno}: {linecache.getline(frame.filename, frame.lineno or 0).strip()}"


def is_of_user(error: BaseException) -> bool:
    """Return whether a line of the user's own module (see `of_user`) raised `error` and would raise it again. Errors
    of a disk, a connection or a library may not occur again.
    """
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    if not frames or isinstance(error, (OSError, MemoryError, SystemExit)):
        return False
    return frames[-1].f_globals.get("__name__") in _of_user and type(error).__name__ != "OutOfMemoryError"


def of_user(module: ModuleType) -> ModuleType:
    """Mark a module as the user's own, for `is_of_user`, and return it."""
    if module.__name__.partition(".")[0] != "megarl":
        _of_user.add(module.__name__)
    return module


_of_user: set[str] = set()  # names of the modules that users wrote


def import_module(name: str) -> ModuleType:
    """Import the module `pkg.mod`, which may be in the current folder."""
    here = str(Path.cwd())
    if here not in sys.path and "" not in sys.path:
        sys.path.append(here)  # workers have the current folder on the path, but a console script does not
    with _exits_are_errors():
        return importlib.import_module(name)


def import_file(path: str | Path) -> ModuleType:
    """Import a file as a module; later calls return the same module."""
    file = Path(path).expanduser().resolve()
    name = f"megarl_file_{hashlib.sha256(str(file).encode()).hexdigest()[:12]}_{file.stem}"
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    if str(file.parent) not in sys.path:
        sys.path.append(str(file.parent))  # for helper modules in the same folder
    sys.modules[name] = module  # dataclasses and pickle look up their module here
    try:
        with _exits_are_errors():
            spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module


class ModuleExitError(ImportError):
    """A module tried to exit the program while it was imported."""


@contextlib.contextmanager
def _exits_are_errors() -> Iterator[None]:
    """In this block, replace exceptions that end programs (SystemExit, KeyboardInterrupt, ...) by ModuleExitError."""
    try:
        yield
    except Exception:
        raise
    except BaseException as error:
        if isinstance(error, KeyboardInterrupt) and not _is_raised_by_code(error):
            raise  # an exception of a signal handler, which may interrupt any code
        text = f"it raises {type(error).__name__} while it is imported: {text_of(error)}".rstrip(": ")
        raise ModuleExitError(text).with_traceback(error.__traceback__) from error


def _is_raised_by_code(error: BaseException) -> bool:
    """Return whether a `raise` statement raised the exception, rather than a signal that interrupted other code."""
    last = error.__traceback__
    while last is not None and last.tb_next is not None:
        last = last.tb_next
    if last is None:
        return False
    operations = {operation.offset: operation.opname for operation in dis.get_instructions(last.tb_frame.f_code)}
    return operations.get(last.tb_lasti) == "RAISE_VARARGS"


def installed_version(package: str) -> str | None:
    """Return the version of an installed distribution without importing it; None when it is missing."""
    try:
        distribution = importlib.metadata.distribution(package)
    except importlib.metadata.PackageNotFoundError:
        return None
    # importlib.metadata.version would parse the package's whole description as a message.
    named = re.search(r"^Version: *(\S+)", distribution.read_text("METADATA") or "", re.MULTILINE)
    return named[1] if named else distribution.version
