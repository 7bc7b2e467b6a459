"""Scorers by name: the included ones, and functions of the user's own files and packages."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any, Literal

from megarl.errors import ConfigError, close_matches

Mode = Literal["batch", "sequential"]

#: The included rewards: the function of each name.
REWARDS = {
    "exact_match": "megarl.rewards.exact_match:exact_match",
    "format": "megarl.rewards.format:format_reward",
    "gsm8k": "megarl.rewards.gsm8k:gsm8k",
    "math": "megarl.rewards.math:math",
    "numeric": "megarl.rewards.numeric:numeric",
}
#: Default of the scorer's `timeout_s` per sample. It is kept by an alarm, so such a scorer runs in the main thread of a
#: process of its own.
_TIME_LIMIT_S = {"math": 5.0}


@dataclass(frozen=True)
class Scorer:
    """One reward function, ready to call.

    Attributes:
        name: as the configuration spells it; errors use it.
        function: `(samples: list[dict], **kwargs) -> list` in batch mode, `(sample: dict, **kwargs)` in sequential
            mode; a result is a number or a dict with `overall`.
        file: source file, to find the user's line in a traceback.
    """

    name: str
    function: Callable[..., Any]
    mode: Mode
    file: str
    kwargs: dict[str, Any] = field(default_factory=dict)


def mode_of(name: str, mode: Mode) -> Mode:
    """How the function of `reward.name` is called: included ones always take one sample at a time."""
    return "sequential" if name in REWARDS else mode


def scorer_names() -> list[str]:
    """Names of the included scorers."""
    return sorted(REWARDS)


def time_limit_s(name: str, kwargs: dict[str, Any]) -> float | None:
    """CPU seconds per sample of a scorer that must run in a process of its own; None for every other one.

    Raises:
        ConfigError: `timeout_s` in `kwargs` is not a positive number.
    """
    default = _TIME_LIMIT_S.get(name)
    if default is None:
        return None
    limit = kwargs.get("timeout_s", default)
    if isinstance(limit, bool) or not isinstance(limit, (int, float)) or not limit > 0:
        raise ConfigError(
            "not a number of seconds", where="reward.kwargs.timeout_s", found=limit, allowed="a number above 0"
        )
    return float(limit)


def load_scorer(name: str, mode: Mode, kwargs: dict[str, Any]) -> Scorer:
    """Find the function that `name` names and check that it takes `kwargs`.

    Args:
        name: an included scorer, `path/to/file.py:function`, or `package.module:function`.
        mode: how the user's function is called; included scorers take one sample at a time.
        kwargs: keyword arguments of every call.

    Raises:
        ConfigError: unknown name, missing file or function, an error while importing, or arguments it does not take.
    """
    path = REWARDS.get(name, name)
    if ":" not in path:
        near = close_matches(name, REWARDS)
        raise ConfigError(
            "unknown reward",
            where="reward.name",
            found=name,
            allowed=[*scorer_names(), "file.py:function", "pkg.mod:fn"],
            fix=f"did you mean {near[0]!r}?" if near else None,
        )
    module_name, _, function_name = path.rpartition(":")
    module = _import_file(Path(module_name)) if module_name.endswith(".py") else _import_module(module_name)
    function = getattr(module, function_name, None)
    if not callable(function):
        local = [n for n, f in vars(module).items() if inspect.isfunction(f) and f.__module__ == module.__name__]
        raise ConfigError(
            f"{module_name} has no function {function_name!r}", where="reward.name", found=name, allowed=local or None
        )
    scorer = Scorer(name, function, mode_of(name, mode), str(module.__file__), kwargs)
    _check_kwargs(scorer)
    return scorer


def kwargs_error(
    name: str, kwargs: dict[str, object], signature: inspect.Signature, text: str, error: TypeError
) -> ConfigError:
    """The error for a reward that cannot be called with its keyword arguments.

    Args:
        name: of the reward.
        kwargs: `reward.kwargs`.
        signature: of its function; what cannot be read from the source may lack the values of defaults.
        text: the function and its parameters as the user reads them.
        error: why Python refuses the call.
    """
    named = [p for p in list(signature.parameters.values())[1:] if p.kind in _NAMED]
    missing = [p.name for p in named if p.default is p.empty and p.name not in kwargs]
    known = {p.name for p in named}
    any_name = any(p.kind is p.VAR_KEYWORD for p in signature.parameters.values())
    unknown = [] if any_name else [key for key in kwargs if key not in known]
    fixes = []
    if missing:
        fixes.append(f"set {' and '.join(f'reward.kwargs.{key}' for key in missing)}")
    if unknown:
        fixes.append(
            f"remove {', '.join(unknown)}; on the command line, reward='!replace {{name: {name}}}' drops the arguments "
            "of the recipe"
        )
    return ConfigError(
        f"{name} {'does not take' if unknown or not missing else 'needs more than'} these arguments: {error}",
        where="reward.kwargs",
        found=kwargs,
        allowed=f"{text}, whose first argument is the sample or the list of samples",
        fix=", and ".join(fixes) or "write its parameters so that one may be given by position and the others by name",
    )


#: Parameters that `reward.kwargs` can give.
_NAMED = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)


def _import_file(path: Path) -> ModuleType:
    if not path.is_file():
        raise ConfigError(
            "the reward file does not exist",
            where="reward.name",
            found=str(path),
            fix=f"relative paths start at the current folder, {os.getcwd()}",
        )
    path = path.resolve()
    name = f"megarl_reward_{path.stem}"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    if str(path.parent) not in sys.path:
        sys.path.append(str(path.parent))  # helper modules beside the file
    sys.modules[name] = module  # dataclasses and pickles look their module up here
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        del sys.modules[name]
        raise _import_error(str(path), error) from error
    return module


def _import_module(name: str) -> ModuleType:
    if os.getcwd() not in sys.path and "" not in sys.path:
        sys.path.append(os.getcwd())  # a console script does not put it there
    try:
        return importlib.import_module(name)
    except Exception as error:
        raise _import_error(name, error) from error


def _import_error(where: str, error: Exception) -> ConfigError:
    from megarl.rewards.scoring import location

    line = location(error, where)
    at = f" ({line})" if line else ""
    return ConfigError(
        f"importing {where} failed: {type(error).__name__}: {error}{at}", where="reward.name", fix="correct the file"
    )


def _check_kwargs(scorer: Scorer) -> None:
    try:
        signature = inspect.signature(scorer.function)
    except ValueError:  # a built-in without a signature: its own error will do
        return
    try:
        signature.bind(None, **scorer.kwargs)
    except TypeError as error:
        raise kwargs_error(scorer.name, scorer.kwargs, signature, f"{scorer.name}{signature}", error) from error
