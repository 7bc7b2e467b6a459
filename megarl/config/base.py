"""Base classes of all configuration sections, and errors that list several problems."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, ClassVar

import annotated_types
from pydantic import BaseModel, ConfigDict, field_validator
from pydantic_core import PydanticCustomError

from megarl.system.errors import ConfigError, UserError

#: Largest integer of a recipe: beyond it JSON and floating-point numbers lose digits, and no count is as large.
LARGEST = 2**53
#: A year at most: beyond, clocks of libraries overflow.
Seconds = Annotated[float, annotated_types.Gt(0), annotated_types.Le(31_536_000)]


class Section(BaseModel):
    """A frozen section: unknown keys are refused, defaults are validated, every field has a description."""

    model_config = ConfigDict(
        extra="forbid",
        frozen=True,
        validate_default=True,
        protected_namespaces=(),
        allow_inf_nan=False,
    )

    @field_validator("*", mode="after")
    @classmethod
    def _is_no_larger(cls, value: Any) -> Any:
        for number in value if isinstance(value, list) else [value]:
            if isinstance(number, int) and abs(number) > LARGEST:
                raise PydanticCustomError("less_than_largest", "an integer of a recipe has 15 digits at most")
        return value


class ComponentSection(Section):
    """A section that names a component and also holds that component's own keys.

    Here those keys are plain values. The components themselves (`megarl.algorithms`) know which keys exist and which
    values they take; `megarl.config.components` validates one against the other.
    """

    model_config = ConfigDict(extra="allow")

    #: The key that names the component.
    named_by: ClassVar[str] = "name"

    @property
    def component(self) -> str:
        """The component's name."""
        return str(getattr(self, self.named_by))

    @property
    def own(self) -> dict[str, Any]:
        """The component's own keys that the recipe gives."""
        return dict(self.model_extra or {})


_LONG_LIST = 60  # characters of allowed values that a list of problems shows once


class ConfigErrors(ConfigError):
    """Several problems found at once, numbered in the message; `problems` lists them."""

    def __init__(self, problems: Sequence[ConfigError]) -> None:
        self.problems = list(problems)
        numbered, listed = [], dict[str, int]()
        for number, problem in enumerate(problems, 1):
            first = listed.setdefault(problem.allowed, number) if problem.allowed is not None else number
            if first < number and len(str(problem.allowed)) > _LONG_LIST:
                problem = ConfigError(
                    problem.what,
                    where=problem.where,
                    found=problem.found,
                    allowed=f"as listed in {first}.",
                    fix=problem.fix,
                )
            numbered.append(f"{number}. {problem}")
        super().__init__("\n".join([f"{len(problems)} problems in the configuration", *numbered]))


def as_config_error(error: UserError, where: str | None = None) -> ConfigError:
    """Return the same problem as a ConfigError, so that it can be listed with others; `where`: at another place."""
    return ConfigError(error.what, where=where or error.where, found=error.found, allowed=error.allowed, fix=error.fix)


def raise_problems(problems: Sequence[ConfigError]) -> None:
    """Raise the only problem, or all of them as one ConfigErrors; do nothing when there is none."""
    if problems:
        raise problems[0] if len(problems) == 1 else ConfigErrors(problems)
