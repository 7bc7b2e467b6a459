"""Tools that are Python functions: found by name, run in supervised processes."""

from __future__ import annotations

import functools
import queue
import time
from collections.abc import Sequence
from typing import Any

from megarl.envs.registry import import_source
from megarl.envs.tools.schema import Tool, tool_of
from megarl.rewards.pool import ScorerPool
from megarl.rewards.scoring import Result, ScoringFailure
from megarl.rewards.signatures import IMAGES
from megarl.system.errors import ConfigError
from megarl.system.plain import Malformed, flag, short, text

_KEY = "env.tools"
_IMAGE_CHARS, _DATA_URL = 8 << 20, "data:image/png;base64,"


#: A result: text or parts of text and images, and whether the call failed.
Said = tuple[str | list[dict[str, str]], bool]


def load_tools(names: Sequence[str]) -> list[Tool]:
    """Return the tools of `file.py:fn` and `pkg.mod:fn`. Raise ConfigError if a file or function is missing, cannot be
    imported, or is not a tool, or two have the same name.
    """
    tools: list[Tool] = []
    for name in names:
        source, colon, function_name = name.rpartition(":")
        if not colon:
            raise ConfigError(
                "this name has no colon before the function",
                where=_KEY,
                found=name,
                allowed="file.py:fn, pkg.mod:fn",
            )
        module = import_source(source, _KEY)
        function = getattr(module, function_name, None)
        if not callable(function):
            raise ConfigError(
                f"{source} has no function {function_name!r}",
                where=_KEY,
                found=name,
                fix="correct the name, or define the function there",
            )
        tools.append(tool_of(function))
    names_ = [tool.name for tool in tools]
    twice = sorted({name for name in names_ if names_.count(name) > 1})
    if twice:
        raise ConfigError("two tools have the same name", where=_KEY, found=twice, fix="rename or remove one")
    return tools


def _read_answer(max_chars: int, value: Any) -> Result:
    """Read a process's reply to a call: the result `said` (text or parts), and whether it `failed`. Raise Malformed if
    the reply has another form.
    """
    if not isinstance(value, dict) or value.keys() != {"said", "failed"}:
        raise Malformed(
            "the reply of a tool's process is not an object with exactly the fields `said` (the tool's result) and "
            f"`failed` (true or false); found: {short(value)}"
        )
    result = value["said"]
    if isinstance(result, list):
        result = [_read_part(part, max_chars) for part in result]
    else:
        result = text(result, max_chars, "a result")
    return {"said": result, "failed": flag(value["failed"], "the field `failed` of a result")}


def _read_part(part: Any, max_chars: int) -> dict[str, str]:
    kind = part.get("type") if isinstance(part, dict) else None
    if kind not in ("text", "image") or part.keys() != {"type", kind}:
        raise Malformed(
            "a part of a result must be an object with exactly the fields `type` (text or image) and `text` or "
            f"`image`, not {short(part)}"
        )
    content = text(part[kind], max_chars if kind == "text" else _IMAGE_CHARS, f"a part of a result ({kind})")
    if kind == "image" and not content.startswith(_DATA_URL):
        # An image is never read from a path.
        raise Malformed(f"an image of a result must begin with {_DATA_URL}, not {short(content)}")
    return {"type": kind, kind: content}


class Functions:
    """A pool of processes that run tools, one call at a time each. Calls may come from any thread.

    Args:
        names: the functions.
        workers: number of processes.
        timeout_s: a call that takes longer ends with an error, and its process is replaced.
        memory_mb: maximum address space of a process, in MiB.
        max_chars: maximum number of characters of a result; longer results are cut.

    Attributes:
        names: names of the tools.
        seeing: names of the tools that use images.

    Raises:
        ConfigError: a process could not load a tool.
    """

    def __init__(self, names: Sequence[str], *, workers: int, timeout_s: float, memory_mb: int, max_chars: int) -> None:
        late = {"said": f"error: no result within {timeout_s:g} s", "failed": True}
        tools = load_tools(names)
        self.names, self.seeing = [tool.name for tool in tools], {tool.name for tool in tools if tool.uses_images}
        self._free: queue.SimpleQueue[ScorerPool] = queue.SimpleQueue()
        self._pools = [
            ScorerPool(
                "tools",
                "sequential",
                {"tools": list(names), "memory_mb": memory_mb, "max_chars": max_chars},
                1,
                sample_limit_s=timeout_s,
                limit_result=late,
                program="megarl.envs.tools.worker",
                noun="environment",
                read=functools.partial(_read_answer, max_chars),
                repeats=False,  # not repeated, because a call may have had an effect
                quiet=True,
            )
            for _ in range(workers)
        ]
        for pool in self._pools:
            self._free.put(pool)

    def call(self, name: str, arguments: dict[str, Any], deadline: float, images: Sequence[str]) -> Said:
        """Return the tool's result, or its error as text for the model, and whether it failed."""
        try:
            pool = self._free.get(timeout=max(0.0, deadline - time.monotonic()))
        except queue.Empty:
            return "error: no process was free to run the tool before the turn's deadline", True
        left = deadline - time.monotonic()
        seen = {IMAGES: list(images)} if name in self.seeing else {}
        try:
            # `left` covers the call and the start of a new process; `timeout_s` limits only the call.
            outcome = pool.score([{"name": name, "arguments": arguments, **seen}], max(0.0, left), False)[0]
        finally:
            self._free.put(pool)
        if isinstance(outcome, ScoringFailure):
            late = time.monotonic() >= deadline
            why = "error: no result before the turn's deadline" if late else f"error: the tool {outcome.reason}"
            return why, True
        return outcome["said"], outcome["failed"]

    def close(self) -> None:
        """End the processes."""
        for pool in self._pools:
            pool.close()
