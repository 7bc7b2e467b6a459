"""Settings that do not go with a part of a run, such as replay or several policies."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from megarl.checks.checklist import Checklist


class Conflict(NamedTuple):
    """A setting that does not go with a part of the run.

    Attributes:
        key: dotted key of the setting.
        value: the setting's value.
        used: whether the recipe has it, so that it is refused.
        allowed: the value that goes with the part, as an override has it.
        why: why the setting does not go with the part.
    """

    key: str
    value: object
    used: bool
    allowed: str
    why: str


def refuse_conflicts(conflicts: Iterable[Conflict], part: str, without: str, checks: Checklist) -> None:
    """Record a problem for each setting that is used.

    Args:
        part: key of the section that the settings do not go with.
        without: overrides of a recipe without this part.
    """
    for conflict in conflicts:
        if conflict.used:
            checks.fail(
                conflict.key,
                f"{conflict.why}, so this does not go with {part}",
                found=conflict.value,
                allowed=conflict.allowed,
                fix=f"set {conflict.key}={conflict.allowed}, or {without}",
            )
