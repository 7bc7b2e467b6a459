"""One process that runs tools: `python -m megarl.envs.tools.worker FD`, controlled like those of the reward pool.

It loads the functions itself after limiting its own memory, so no tool runs in a training process.
"""

from __future__ import annotations

import resource
from collections.abc import Iterator, Sequence
from typing import Any

from megarl.envs.tools.functions import load_tools
from megarl.rewards.images import with_images
from megarl.rewards.pool_worker import Work, run
from megarl.rewards.signatures import IMAGES
from megarl.system.errors import DataError, describe, text_of


def main() -> None:
    """Run the user's tool functions for the parent process until it closes the connection."""
    run(_tools)


def _tools(setup: dict[str, Any]) -> tuple[Work, bool]:
    limit = setup["kwargs"]["memory_mb"] << 20
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    tools = {tool.name: tool for tool in load_tools(setup["kwargs"]["tools"])}

    most = setup["kwargs"]["max_chars"]

    def work(calls: list[dict[str, Any]], stop_at_failure: bool) -> Iterator[tuple[int, dict[str, Any]]]:
        for index, call in enumerate(with_images(calls)):
            result, failed = _answer(tools[call["name"]], call["arguments"], call.get(IMAGES, ()))
            yield index, {"said": _cut(result, most), "failed": failed}

    return work, any(tool.uses_images for tool in tools.values())


def _cut(said: Any, most: int) -> Any:
    """Return a tool's result cut to `most` characters of text, over all its parts together."""
    if isinstance(said, str):
        return said[:most]
    left, parts = most, []
    for part in said:
        if "text" in part:
            part = {**part, "text": part["text"][:left]}
            left -= len(part["text"])
        parts.append(part)
    return parts


def _answer(tool: Any, arguments: dict[str, Any], images: Sequence[Any]) -> tuple[Any, bool]:
    """Return the tool's result, or its error as text for the model, and whether it failed."""
    try:
        return tool.call(arguments, images), False
    except BaseException as error:  # catches SystemExit and KeyboardInterrupt too, which only the tool can raise here
        text = text_of(error) if isinstance(error, ValueError | DataError) else describe(error)
        return f"error: {text}".rstrip(": "), True


if __name__ == "__main__":
    main()
