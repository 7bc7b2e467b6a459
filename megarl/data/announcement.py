"""The part of a prompt that presents an environment's tools to the model."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Announcement:
    """The tools that every prompt presents.

    Attributes:
        schemas: JSON schemas for the variable `tools` of the chat template.
        system: text for the end of the system message; empty: none.
    """

    schemas: list[dict[str, Any]] = field(default_factory=list)
    system: str = ""


#: What a run without tools has.
NO_TOOLS = Announcement()
