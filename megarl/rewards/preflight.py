"""Imports users' code in a separate process before a run, so that a file that cannot be imported is found at once.

    python -m megarl.rewards.preflight MODULE:FUNCTION     # arguments as JSON on stdin; result or error on stdout

Effects of the import (output, threads, loaded packages) stay in that process, and its children end with it. If the
import takes longer than a few seconds, the check is left to the workers.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, cast

from megarl.rewards.parts import located, place_of_part
from megarl.rewards.registry import REWARDS, Mode, load_scorer, own_keys
from megarl.system.errors import ConfigError, UserError
from megarl.system.parents import as_parent, end_with_parents
from megarl.system.plain import Malformed, parsed
from megarl.system.processes import ending

if TYPE_CHECKING:
    from megarl.config.data import RewardConfig

_LIMIT_S = 2.0
#: Seconds in which a process must import a function and return its keys; importing torch is slow on a busy machine.
KEYS_LIMIT_S = 60.0
_DEPTH, _LINES = 100, 20
_PARTS = ("what", "where", "found", "allowed", "fix")


def check_import(reward: RewardConfig, limit_s: float = _LIMIT_S, *, images: bool = True) -> None:
    """Import the functions of the reward, each within `limit_s`, and bind their arguments; raise ConfigError as a
    worker would. Built-in rewards are not checked."""
    for label, function in reward.functions.items():
        if ":" in function.name:
            keys = {"name": function.name, "mode": function.mode, "kwargs": function.kwargs, "images": images}
            with located(place_of_part(label)):
                ask(_load, keys, limit_s, where=REWARDS.key)


def _load(name: str, mode: Mode, kwargs: dict[str, Any], images: bool) -> None:
    load_scorer(name, mode, kwargs, images=images)


def find_own_keys(name: str, limit_s: float = KEYS_LIMIT_S) -> list[str] | None:
    """Return the keys that a reward accepts in `reward.kwargs`; None if it accepts any, or if its import takes too
    long. Raise UserError if the reward cannot be found."""
    if name in REWARDS.names() or ":" not in name:
        return own_keys(name)
    return cast("list[str] | None", ask(own_keys, {"name": name}, limit_s, where=REWARDS.key))


def ask(work: Callable[..., object], request: Mapping[str, object], limit_s: float, *, where: str) -> object:
    """Return `work(**request)`, plain JSON, as run in another process; None if there was no result in time. Raise
    ConfigError if `work` raised it, or the process died while it loaded the file that the key `where` names."""
    environment = os.environ | as_parent() | {"PYTHONSAFEPATH": "1"}  # workers also run with PYTHONSAFEPATH
    command = [sys.executable, "-m", __name__, f"{work.__module__}:{work.__name__}"]
    pipe, nowhere = subprocess.PIPE, subprocess.DEVNULL
    with subprocess.Popen(
        command, stdin=pipe, stdout=pipe, stderr=nowhere, env=environment, start_new_session=True
    ) as process:
        try:
            stdout, _ = process.communicate(json.dumps(request).encode(), limit_s)
        except subprocess.TimeoutExpired:
            return None
        finally:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, signal.SIGKILL)  # also kills children that the import started
    for line in reversed(stdout.splitlines()[-_LINES:]):  # a thread of the import may print after the result
        with contextlib.suppress(Malformed):
            error, value = _answered(line)
            if error is not None:
                raise ConfigError(error.pop("what"), **error)
            return value
    code = process.returncode
    raise ConfigError(
        f"importing and checking this ended the process ({ending(code)})",
        where=where,
        found=request.get("name"),
        fix="remove what ends the program while the file is imported, such as sys.exit or os._exit",
    )


def _answered(line: bytes) -> tuple[dict[str, Any] | None, object]:
    """Return the parts of an error (None without one) and the result in a line of output, or raise Malformed."""
    message = parsed(line, _DEPTH)
    error = message.get("error")
    if message.keys() != {"error", "value"} or not (error is None or isinstance(error, dict)):
        raise Malformed("this line of output is not a reply")
    if error is not None and (error.keys() != set(_PARTS) or not isinstance(error["what"], str)):
        raise Malformed("the error in the reply is invalid")
    return error, message["value"]


def main() -> None:
    """Run the function that `ask` names; print its JSON result or its error as the last line of stdout."""
    end_with_parents()  # the import may never end, and the caller stops waiting at some time
    sys.path.append(os.getcwd())  # as workers do, so that the same modules are found
    module, _, name = sys.argv[1].partition(":")
    parts: dict[str, object] | None = None
    value = None
    try:
        value = getattr(importlib.import_module(module), name)(**json.load(sys.stdin))
    except UserError as error:
        parts = {name: getattr(error, name) for name in _PARTS}
        value_found = parts["found"]
        if value_found is not None and not isinstance(value_found, str | int | float | dict):
            parts["found"] = repr(value_found)
    print("\n" + json.dumps({"error": parts, "value": value}), end="", flush=True)


if __name__ == "__main__":
    main()
    os._exit(0)  # exit now, whatever threads the import has started
