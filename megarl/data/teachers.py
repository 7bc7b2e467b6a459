"""Choose the teacher of each prompt in a run with several: the one its row names, else one at random by weight."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from megarl.data.rows import Row
from megarl.system.errors import DataError, close_matches

if TYPE_CHECKING:
    from megarl.config.training import TeacherConfig

_KEY = "teacher.key"


def check_teachers(settings: TeacherConfig, rows: Iterable[Row]) -> None:
    """Raise DataError for a row that names an unknown teacher, or that names none although all weights are 0.

    A recipe without `teacher.models` has one teacher, so its rows are not checked.
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
                "the row names an unknown teacher",
                where=f"{row.where}, column {settings.key}",
                found=name,
                allowed=sorted(settings.models),
                fix=f"did you mean {near[0]!r}?"
                if near
                else f"add teacher.models.{name}, or set {_KEY} to another column",
            )


def choose_teacher(settings: TeacherConfig, row: Mapping[str, Any], seed: int) -> str:
    """Return the name of the teacher for a prompt.

    Args:
        row: the prompt's columns, checked by `check_teachers`.
        seed: a random integer in [0, 2**63) per prompt. If the row names no teacher, it selects one with probabilities
            in proportion to the weights, which on average weights the teachers' losses.

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
    # Rounding errors of the sum of the weights may leave `left` at 0 or above: choose the last teacher with a weight.
    return next(name for name, model in reversed(settings.models.items()) if model.weight)


def _named(row: Mapping[str, Any], key: str) -> Any:
    """Return the row's value in column `key`; None if the column is missing or empty."""
    columns = row if isinstance(row, Row) else Row(row, "", 0)
    return (columns.column(key, _KEY) if columns.has(key) else None) or None
