"""Base classes of all configuration sections, and errors that list several problems."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, ClassVar

import annotated_types
from pydantic import BaseModel, ConfigDict, field_validator
from pydantic_core import PydanticCustomError

from megarl.system.errors import ConfigError, UserError

#: Largest integer in a recipe. Larger integers may lose digits in JSON and in floating-point numbers, and no count is
#: that large.
LARGEST = 2**53
#: A number of seconds, above 0 and at most a year. Some libraries' clocks overflow for much larger numbers.
Seconds = Annotated[float, annotated_types.Gt(0), annotated_types.Le(31_536_000)]


class Section(BaseModel):
    """The base class of the recipe's sections: immutable; it refuses unknown keys and validates defaults."""

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
                raise PydanticCustomError(
                    "less_than_largest", f"an integer of a recipe must lie from {-LARGEST:,} to {LARGEST:,}"
                )
        return value


class ComponentSection(Section):
    """A section that names a component and also holds that component's own keys.

    This class keeps those keys as plain values. `megarl.algorithms` lists which keys each component has and which
    values they take, and `megarl.config.components` validates the values against that.
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
        """The keys in this section that only the chosen component has, with the values of the recipe."""
        return dict(self.model_extra or {})


# Maximum number of characters of a list of allowed values that is repeated in every problem that has this list.
_LONG_LIST = 60


class ConfigErrors(ConfigError):
    """Several configuration errors raised as one, numbered in the message; `problems` lists them."""

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
                    allowed=f"as in problem {first}",
                    fix=problem.fix,
                )
            numbered.append(f"{number}. {problem}")
        super().__init__("\n".join([f"{len(problems)} problems in the configuration", *numbered]))


def as_config_error(error: UserError, where: str | None = None) -> ConfigError:
    """Return `error` as a ConfigError, so that it can be listed with others; `where` replaces its place."""
    return ConfigError(error.what, where=where or error.where, found=error.found, allowed=error.allowed, fix=error.fix)


def raise_problems(problems: Sequence[ConfigError]) -> None:
    """Raise the only problem, or all of them as one ConfigErrors; do nothing when there is none."""
    if problems:
        raise problems[0] if len(problems) == 1 else ConfigErrors(problems)
