"""Checks before the run that rewards can use the reference answers, and whether any component reads them."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from megarl.config.rollout import BRANCHING
from megarl.data.rows import MissingColumnError, Row
from megarl.rewards.answers import answer_texts
from megarl.rewards.parts import functions_of
from megarl.rewards.registry import REWARDS
from megarl.system.errors import DataError, shortened
from megarl.system.imports import source_file

if TYPE_CHECKING:
    from megarl.config.data import RewardConfig
    from megarl.config.run import RunConfig

#: Names that the reference answer has in sources: in a sample, or as a parameter of other trainers' functions.
_READS = re.compile(r"\b(answer|answers|ground_truth|ground_truths)\b")
_SCORES = re.compile(r"\bscores\s*(:\s*\w+\s*)?=\s*False\b")
#: Name of the built-in environment that leaves the score to the reward.
_TOOLS = "tools"
#: Names of the environments that read no reference answer.
_READ_NONE = (_TOOLS, "verifiers", "gymnasium", "openenv")


def reads_answers(config: RunConfig) -> bool:
    """Return whether the run's reward or environment reads reference answers, as far as their source code shows."""
    environment = str(config.env.get("name", "")) if config.has_turns else _TOOLS
    scored = uses_reward(config)
    read = any(
        REWARDS.spec(name).reference is not None if name in REWARDS.names() else _mentions(name)
        for name in (function.name for function in functions_of(config).values())
    )
    return (environment not in _READ_NONE and _mentions(environment)) or (scored and read)


@contextlib.contextmanager
def explain_missing_columns(config: RunConfig) -> Iterator[None]:
    """Convert errors of missing columns inside the block: in a recipe that learns from preferences, the DataError
    explains that scoring needs prompts with answers."""
    try:
        yield
    except MissingColumnError as error:
        if config.preference is None:
            raise
        raise DataError(
            error.what,
            where=error.where,
            found=error.found,
            allowed=error.allowed,
            fix="scoring, as in megarl eval, needs prompts with answers, which preferences do not have: set "
            "data.val_files=[prompts with answers], or data.answer_key to the column of the answers",
        ) from error


def uses_reward(config: RunConfig) -> bool:
    """Return whether `reward` scores the samples: without an environment, with `tools`, with agents where `env.score`
    is `reward`, and with a user's environment whose class sets `scores = False`; other environments score their
    episodes themselves."""
    environment = str(config.env.get("name", "")) if config.has_turns else _TOOLS
    if environment in BRANCHING:
        return config.env.get("score") == "reward"
    file = source_file(environment) if environment != _TOOLS else None
    return environment == _TOOLS or (
        file is not None and _SCORES.search(file.read_text("utf-8", "replace")) is not None
    )


def gives_images(config: RunConfig) -> bool:
    """Return whether every reward function that needs images gets them."""
    scores = config.preference is None and uses_reward(config)
    return config.data.image_key is not None or not scores


def check_answers(functions: Mapping[str, RewardConfig], key: str | None, answers: Iterable[tuple[Row, Any]]) -> None:
    """Raise DataError for a row whose reference answer a built-in reward cannot use; the error names the row, the
    value and the accepted form. Users' functions are not checked.

    Args:
        functions: the reward functions by the section that names each (`functions_of`).
        key: the column of the reference answers; None: there is none, and nothing is checked.
        answers: the rows with their reference answers.
    """
    pairs = list(answers)
    for place, function in functions.items():
        read = REWARDS.spec(function.name).reference if function.name in REWARDS.names() else None
        several = function.kwargs.get("answers", "one")
        if read is None or key is None:
            continue
        for row, value in pairs:
            try:
                for text in answer_texts(value, several):
                    read(text)
            except ValueError as error:
                forms = f"text or a finite number that {function.name} can read"
                raise DataError(
                    f"the reward {function.name} cannot use the answer in {key!r}: {error}",
                    where=row.where,
                    found=value if len(repr(value)) < 200 else shortened(repr(value), 200),
                    allowed=f"{forms}, or a list of these" if several == "any" else forms,
                    fix=_fix(value, key, place, several),
                ) from error


def _fix(value: Any, key: str, place: str, several: Any) -> str:
    if isinstance(value, dict) and value:
        inner = "ground_truth" if "ground_truth" in value else next(iter(value))
        return f"name the field inside the column: data.answer_key: {key}.{inner}"
    if isinstance(value, list) and value and several != "any":
        return f"set {place}.kwargs.answers: any, if matching one of them is enough"
    return "correct the row, or remove it"


def _mentions(reference: str) -> bool:
    """Return whether the source file of a user's function has a name of the reference answer; True without a file."""
    file = source_file(reference)
    return file is None or _READS.search(file.read_text("utf-8", "replace")) is not None
