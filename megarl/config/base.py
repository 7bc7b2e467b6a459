"""Base of all configuration sections."""

from __future__ import annotations

from collections.abc import Sequence

from pydantic import BaseModel, ConfigDict

from megarl.errors import ConfigError


class Section(BaseModel):
    """A frozen section: unknown keys are refused, defaults are validated, every field has a description."""

    model_config = ConfigDict(
        extra="forbid",
        frozen=True,
        validate_default=True,
        protected_namespaces=(),
        allow_inf_nan=False,
    )


class ConfigErrors(ConfigError):
    """Several problems found at once, numbered in the message. `problems` holds them one by one."""

    def __init__(self, problems: Sequence[ConfigError]) -> None:
        self.problems = list(problems)
        numbered = [f"{number}. {problem}" for number, problem in enumerate(problems, 1)]
        super().__init__("\n".join([f"{len(problems)} problems in the configuration", *numbered]))


def raise_problems(problems: Sequence[ConfigError]) -> None:
    """Raise the problem, or all of them as one ConfigErrors; return when there is none."""
    if problems:
        raise problems[0] if len(problems) == 1 else ConfigErrors(problems)
