"""The result of checking a recipe: a list of named checks, each ok, warn, fail or skip."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Set
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from megarl.config.base import ConfigErrors
from megarl.dag.stage import Role
from megarl.system.errors import ConfigError, UserError

if TYPE_CHECKING:
    from megarl.config.run import RunConfig

#: The roles of the nodes of the task graph; None when there is no graph.
Roles = Set[Role] | None
Status = Literal["ok", "warn", "fail", "skip"]


@dataclass(frozen=True)
class Check:
    """One check. `key` is the dotted configuration key to change; `found`, `allowed`, `fix` as in UserError."""

    status: Status
    name: str
    message: str
    key: str | None = None
    found: object = None
    allowed: str | None = None
    fix: str | None = None

    def problem(self) -> ConfigError:
        """Return the check as an error."""
        return ConfigError(self.message, where=self.key, found=self.found, allowed=self.allowed, fix=self.fix)


def problems_of(checks: Iterable[Check]) -> list[ConfigError]:
    """Return the checks that failed, as errors."""
    return [check.problem() for check in checks if check.status == "fail"]


@dataclass(frozen=True)
class Checklist:
    """A list of checks in order, with the subject under which further checks are recorded."""

    items: list[Check] = field(default_factory=list)
    name: str = ""

    def of(self, name: str) -> Checklist:
        """Return a view of this list that records checks under the subject `name`."""
        return Checklist(self.items, name)

    def _add(self, status: Status, message: str, *more: Any) -> None:
        assert self.name, message
        self.items.append(Check(status, self.name, message, *more))

    def ok(self, message: str) -> None:
        """Record a passed check."""
        self._add("ok", message)

    def skip(self, why: str) -> None:
        """Record a check that could not run, and why."""
        self._add("skip", why)

    def check_deadline(self, key: str, found: float, what: str, config: RunConfig) -> None:
        """Check a rank's deadline for `what`, which must be below `cluster.timeout_s`, since the other ranks wait no
        longer.
        """
        cluster = config.cluster
        if cluster.nproc > 1 and found >= cluster.timeout_s:
            self.fail(
                key,
                f"the other processes give up after cluster.timeout_s = {cluster.timeout_s:g} s, before {what}",
                found=found,
                allowed=f"number below {cluster.timeout_s:g}",
                fix=f"set {key}={cluster.timeout_s / 2:g}, or cluster.timeout_s={2 * found:g}",
            )

    def fail(self, key: str, what: str, *, found: object, allowed: object = None, fix: str | None) -> None:
        """Record a problem that stops the run. `allowed` is a sentence or the legal values."""
        self._add("fail", what, key, found, _words(allowed), fix)

    def warn(self, key: str, what: str, *, found: object = None, fix: str | None = None) -> None:
        """Record a setting that is legal but probably not intended."""
        self._add("warn", what, key, found, None, fix)

    def warn_of(self, problem: ConfigError) -> None:
        """Record a problem that does not stop the run."""
        self._add("warn", problem.what, problem.where, problem.found, problem.allowed, problem.fix)

    def failed(self, key: str | None) -> bool:
        """Return whether a problem at `key` is recorded, under any subject."""
        return any(check.status == "fail" and check.key == key for check in self.items)

    def from_error(self, error: UserError | None) -> None:
        """Record an error as a failed check, or each error of a `ConfigErrors`; None: record nothing."""
        for problem in error.problems if isinstance(error, ConfigErrors) else [error] if error else []:
            self._add("fail", problem.what, problem.where, problem.found, problem.allowed, problem.fix)

    @contextlib.contextmanager
    def recorded(self) -> Iterator[None]:
        """Within the block record a UserError as a failed check; the error ends the block."""
        try:
            yield
        except UserError as error:
            self.from_error(error)

    def divides(self, key: str, number: int, divisor: int, noun: str, by: str, other: str | None = None) -> bool:
        """Check that `number` (of `noun`) is a multiple of `divisor` (set by `by`); name the nearest multiples.
        `other`: an alternative to changing `key`, such as `actor.parallel.tp to 2`.
        """
        if number % divisor == 0:
            self.ok(f"{noun} {number} is divisible by {divisor} ({by})")
            return True
        near = nearest_multiples(number, divisor)
        self.fail(
            key,
            f"{noun} {number} is not divisible by {divisor} ({by})",
            found=number,
            allowed=f"a multiple of {divisor}",
            fix=f"set {key} to {_words(near, ' or ')}" + (f", or {other}" if other else ""),
        )
        return False


def nearest_multiples(number: int, divisor: int) -> list[int]:
    """Return the positive multiples of `divisor` just below and above `number`."""
    lower = number // divisor * divisor
    return [value for value in (lower, lower + divisor) if value > 0]


def _words(values: object, joint: str = ", ") -> str | None:
    if values is None or isinstance(values, str):
        return values
    return joint.join(str(value) for value in values) if isinstance(values, Iterable) else str(values)
