"""The teacher of each prompt, where there are several: the one that its row names, else one that is drawn."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from megarl.data.rows import Row
from megarl.system.errors import DataError, close_matches

if TYPE_CHECKING:
    from megarl.config.training import TeacherConfig

_KEY = "teacher.key"


def check_teachers(settings: TeacherConfig, rows: Iterable[Row]) -> None:
    """Check that the rows name teachers that there are; nothing where there is one teacher only.

    Raises:
        DataError: a row names another one, or none while no teacher has a weight.
    """
    if not settings.models:
        return
    weighted = any(model.weight for model in settings.models.values())
    for row in rows:
        name = _named(row, settings.key)
        if name is None and not weighted:
            raise DataError(
                "the row names no teacher, and all weights are 0",
                where=f"{row.where}, column {settings.key}",
                found=f"columns: {', '.join(row)}",
                allowed=sorted(settings.models),
                fix="name a teacher in the column, or give teachers a weight (teacher.models.NAME.weight)",
            )
        if name is not None and (not isinstance(name, str) or name not in settings.models):
            near = close_matches(str(name), settings.models)
            raise DataError(
                "the row names a teacher that there is not",
                where=f"{row.where}, column {settings.key}",
                found=name,
                allowed=sorted(settings.models),
                fix=f"did you mean {near[0]!r}?" if near else f"add teacher.models.{name}, or name another {_KEY}",
            )


def choose_teacher(settings: TeacherConfig, row: Mapping[str, Any], seed: int) -> str:
    """Return the name of the teacher of a prompt.

    Args:
        row: its columns, checked by `check_teachers`.
        seed: of the prompt, in [0, 2**63): a row that names no teacher gets each with a probability in proportion to
            its weight, which on average weighs their losses.

    >>> from megarl.config.training import TeacherConfig
    >>> both = TeacherConfig(models={"math": {"path": "m", "weight": 3}, "code": {"path": "c"}})
    >>> choose_teacher(both, {"teacher": "code"}, 0), choose_teacher(both, {}, 0), choose_teacher(both, {}, 2**63 - 1)
    ('code', 'math', 'code')
    """
    name = _named(row, settings.key)
    if name in settings.models:
        return str(name)
    left = seed / 2**63 * sum(model.weight for model in settings.models.values())
    for name, model in settings.models.items():
        left -= model.weight
        if left < 0:
            return name
    return next(name for name, model in reversed(settings.models.items()) if model.weight)  # rounding


def _named(row: Mapping[str, Any], key: str) -> Any:
    """Return what the row says in column `key`; None: nothing."""
    columns = row if isinstance(row, Row) else Row(row, "", 0)
    return (columns.column(key, _KEY) if columns.has(key) else None) or None
