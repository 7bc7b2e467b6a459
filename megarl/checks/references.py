"""Checks of references to user code, `pkg.mod:fn` and `file.py:fn`, by reading the source without running it.

Only the functions that get `data.loader_kwargs` are imported, in another process.
"""

from __future__ import annotations

import ast
import importlib.util
import inspect
import sys
from pathlib import Path
from typing import Any

from megarl.config.data import DataConfig
from megarl.config.run import RunConfig
from megarl.data.sources import check_loader_kwargs, is_function
from megarl.rewards.preflight import ask
from megarl.rewards.registry import kwargs_error
from megarl.rewards.signatures import bind
from megarl.system.errors import ConfigError, close_files, close_matches, relative_path_fix
from megarl.system.imports import is_file_reference

_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
_DEFINITIONS = (*_FUNCTIONS, ast.ClassDef)
_IMPORT_S = 5.0


def check_reference(text: str, key: str) -> ast.Module | None:
    """Find the function that `text` names and return its source code (None if it is not Python). Raise ConfigError at
    `key` if the file, module or name is missing or broken.
    """
    module, _, function = text.rpartition(":")
    file = _file_of(module, text, key) if is_file_reference(text) else _source_of(module, text, key)
    if file is None:
        return None
    try:
        tree = ast.parse(file.read_bytes(), str(file))
    except (SyntaxError, ValueError) as error:  # ValueError: null bytes, as in UTF-16 text
        line, problem = (error.lineno, error.msg) if isinstance(error, SyntaxError) else (1, str(error))
        raise ConfigError(
            f"{file}:{line}: the file is not valid Python ({problem})",
            where=key,
            found=text,
            fix="correct the file; it has to be text in UTF-8",
        ) from error
    names = _top_level_names(tree)
    top = function.partition(".")[0]
    if names is not None and top not in names:
        close = close_matches(top, names)
        public = [node.name for node in tree.body if isinstance(node, _DEFINITIONS) and not node.name.startswith("_")]
        raise ConfigError(
            f"{file} defines no {top}",
            where=key,
            found=text,
            allowed=public or "the file defines no function",
            fix=f"did you mean {module}:{close[0]}?" if close else f"define {top} in {file.name}",
        )
    return tree


def check_reward_kwargs(tree: ast.Module, reference: str, kwargs: dict[str, object]) -> None:
    """Refuse keyword arguments that a reward function does not accept, as far as its source code shows."""
    definition = _definition(tree, reference)
    if definition is None:
        return
    signature = _signature(definition.args)
    try:
        bind(signature, kwargs)
    except TypeError as error:
        text = f"{definition.name}({ast.unparse(definition.args)})"
        raise kwargs_error(reference, kwargs, signature, text, error) from error


def signature_of(tree: ast.Module, reference: str) -> inspect.Signature | None:
    """Return the signature of the function as far as its source `tree` shows it; None when unknown."""
    definition = _definition(tree, reference)
    return None if definition is None else _signature(definition.args)


def _definition(tree: ast.Module, reference: str) -> ast.FunctionDef | ast.AsyncFunctionDef | None:
    function = reference.rpartition(":")[2]
    definitions = [node for node in _statements(tree.body) if isinstance(node, _FUNCTIONS) and node.name == function]
    # A decorator may change the signature.
    return definitions[0] if len(definitions) == 1 and not definitions[0].decorator_list else None


def strings(tree: ast.Module) -> set[str]:
    """Return every text constant and call keyword in a source: names that may be keys of its result."""
    return {node.value for node in ast.walk(tree) if isinstance(node, ast.Constant) and isinstance(node.value, str)} | {
        node.arg for node in ast.walk(tree) if isinstance(node, ast.keyword) and node.arg is not None
    }


def _signature(arguments: ast.arguments) -> inspect.Signature:
    """Return the signature of a function that was parsed but not imported; defaults have no values."""
    kind = inspect.Parameter
    plain = [*arguments.posonlyargs, *arguments.args]
    required = len(plain) - len(arguments.defaults)
    made = [
        kind(
            argument.arg,
            kind.POSITIONAL_ONLY if number < len(arguments.posonlyargs) else kind.POSITIONAL_OR_KEYWORD,
            default=kind.empty if number < required else None,
        )
        for number, argument in enumerate(plain)
    ]
    if arguments.vararg:
        made.append(kind(arguments.vararg.arg, kind.VAR_POSITIONAL))
    for argument, default in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True):
        made.append(kind(argument.arg, kind.KEYWORD_ONLY, default=kind.empty if default is None else None))
    if arguments.kwarg:
        made.append(kind(arguments.kwarg.arg, kind.VAR_KEYWORD))
    return inspect.Signature(made)


def _file_of(path: str, text: str, key: str) -> Path:
    file = Path(path).expanduser()
    if not file.is_file():
        siblings = [other.name for other in file.parent.glob("*.py")] if file.parent.is_dir() else []
        close = close_files(file.name, siblings)
        raise ConfigError(
            f"file not found: {path}",
            where=key,
            found=text,
            fix=f"did you mean {file.parent / close[0]}?" if close else relative_path_fix(),
        )
    return file


def _source_of(module: str, text: str, key: str) -> Path | None:
    """Return the source file of an importable module; None if it has no Python source (an extension module)."""
    here = str(Path.cwd())
    added = here not in sys.path and "" not in sys.path
    if added:
        sys.path.insert(0, here)
    try:
        spec = importlib.util.find_spec(module)
    except (ImportError, ValueError) as error:
        raise ConfigError(
            f"the module {module} cannot be found ({error})", where=key, found=text, fix="install it, or check its name"
        ) from error
    finally:
        if added:
            sys.path.remove(here)
    if spec is None:
        raise ConfigError(
            f"module not found: {module}",
            where=key,
            found=text,
            allowed="a module that `python -c 'import ...'` finds from this folder, or file.py:function",
            fix="install it, or check its name",
        )
    return Path(spec.origin) if spec.origin and spec.origin.endswith(".py") else None


def _top_level_names(tree: ast.Module) -> list[str] | None:
    """Return the names that a module defines; None when unknown (`import *`, a module-level `__getattr__`)."""
    names: list[str] = []
    for node in ast.walk(tree):
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            names += [alias.asname or alias.name for alias in node.names]
    for node in _statements(tree.body):
        if isinstance(node, _DEFINITIONS):
            names.append(node.name)
        elif isinstance(node, (ast.Assign, ast.AnnAssign)):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            names += [part.id for target in targets for part in ast.walk(target) if isinstance(part, ast.Name)]
    return None if "*" in names or "__getattr__" in names else names


def _statements(body: list[ast.stmt]) -> list[ast.stmt]:
    """Return the module-level statements, including those inside if, try and with."""
    statements = []
    for node in body:
        statements.append(node)
        if isinstance(node, (ast.If, ast.Try, ast.With)):
            inner = [*node.body, *getattr(node, "orelse", []), *getattr(node, "finalbody", [])]
            inner += [statement for handler in getattr(node, "handlers", []) for statement in handler.body]
            statements += _statements(inner)
    return statements


def check_arguments(config: RunConfig, limit_s: float = _IMPORT_S) -> None:
    """Refuse `data.loader_kwargs` that no source accepts; workers check functions that take longer to import."""
    data, more = config.data, config.sft.train_files or []
    if not data.loader_kwargs:
        return
    if any(is_function(source) for source in [*data.train_files, *data.val_files, *more]):
        kwargs = dict.fromkeys(data.loader_kwargs)  # only the names of the arguments are checked
        files = {"train_files": data.train_files, "val_files": data.val_files, "more": more}
        ask(_check_names, {"loader_kwargs": kwargs, **files}, limit_s, where="data.train_files / data.val_files")
    else:
        check_loader_kwargs(data, more)


def _check_names(more: list[str], **section: Any) -> None:
    check_loader_kwargs(DataConfig(**section), more)
