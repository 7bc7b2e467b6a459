"""The part of a prompt that presents an environment's tools to the model."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Announcement:
    """The environment's tools, which every prompt announces to the policy."""

    # JSON schemas of the tools: the value of the chat template's variable `tools`
    schemas: list[dict[str, Any]] = field(default_factory=list)
    system: str = ""  # text that is added at the end of the system message; empty: nothing is added


#: The announcement of a run without tools.
NO_TOOLS = Announcement()
