"""How old samples may be when they are trained on: the contract between generation and training, in one place.

    version v   the weights after step v; 0: the initial weights
    step t      is trained on B groups (`data.batch_size`) with the weights t - 1, and makes the weights t
    k           `async.max_staleness`: a group of step t starts with the weights t - 1 - k or later

                            in_order                              as_ready, and policies of a user
    a group may begin       while fewer than (v + 1 + k) B groups have begun, v: the weights sampled with
    a step is               the next B prompts                    B finished groups, those that expire first
    weights v may go        when no group is in flight, and no more may begin with the weights before them
    weights v have to go    when the weights before them allow too few groups for
                            the step after the next one           the next step; `partial`: after every step

Loops, buffer, planning and simulation call a policy and contain no rules. A user's policy is a class in a file
(`async.order: my_policy.py:Policy`) derived from `AsReady` or `StalenessPolicy`. Policies are pure: they get the state
as arguments and store nothing, so every process creates its policy from the recipe.
"""

from __future__ import annotations

import inspect
from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from megarl.system.errors import ConfigError, MegarlError, UserError, count
from megarl.system.imports import import_callable, is_file_reference, location

if TYPE_CHECKING:
    from megarl.config.run import RunConfig

ORDER = "async.order"

#: Weight version -> numbers of the groups that began with it.
ByVersion = Mapping[int, Collection[int]]


class PolicyError(MegarlError):
    """A staleness policy returned a decision that a run cannot follow."""


class StalenessSettings(NamedTuple):
    """The values from which every process creates its staleness policy."""

    order: str  # `async.order`; if it names a file, with the absolute path
    max_staleness: int  # k, `async.max_staleness`
    groups: int  # groups per step, B
    steps: int  # steps of the run
    partial: bool = False  # whether new weights interrupt samples in flight, which continue with the new weights

    @classmethod
    def of(cls, config: RunConfig) -> StalenessSettings:
        """Return the settings of a recipe."""
        section, order = config.async_, config.async_.order
        if is_file_reference(order):
            file, _, name = order.rpartition(":")
            order = f"{Path(file).expanduser().resolve()}:{name}"
        return cls(order, section.max_staleness, config.data.batch_size, config.trainer.steps, section.partial)


@dataclass(frozen=True)
class StalenessPolicy(ABC):
    """Decides which groups begin, which make up a step, and when weights are replaced.

    `oldest`, `last_step`, `steps_ahead`, `in_time` and `capacity` define `async.max_staleness`: every policy must keep
    to them, and must not override them. The other methods are the policy's own decisions.
    """

    max_staleness: int  # k, `async.max_staleness`
    groups: int  # groups per step, B
    steps: int  # steps of the run; a group that no step needs does not begin
    partial: bool = False  # whether new weights interrupt samples in flight, which continue with the new weights

    # -- the meaning of k --------------------------------------------------------------------------------------------

    def oldest(self, step: int) -> int:
        """Return the oldest weight version with which a group of `step` may have begun."""
        return max(0, step - 1 - self.max_staleness)

    def last_step(self, version: int) -> int:
        """Return the last step that may train on a group that began with `version`."""
        return min(version + 1 + self.max_staleness, self.steps)

    def steps_ahead(self, step: int) -> int:
        """Return of how many later steps groups may begin before `step` has been trained."""
        return max(0, self.last_step(step - 1) - step)

    def in_time(self, step: int, left: Mapping[int, int]) -> bool:
        """Return whether the groups that are left after `step` fit into the steps that may still use them.

        Args:
            step: the step that has been formed.
            left: number of groups left, finished or not, by weight version.
        """
        total = 0
        for version in sorted(left):
            total += left[version]
            if left[version] and total > (self.last_step(version) - step) * self.groups:
                return False
        return True

    @property
    def capacity(self) -> int:
        """Largest number of groups that have begun and that no step has trained on."""
        return (1 + self.max_staleness) * self.groups

    # -- decisions of a policy ---------------------------------------------------------------------------------------

    def may_begin(self, version: int) -> int:
        """Return how many groups of the run, including trained ones, may have begun while samples use `version`.

        The number must not decrease with the version. It is at least (version + 1) B, since otherwise step version + 1
        could not be formed, and at most B per step until `last_step(version)`, since otherwise some groups would be too
        old for every step.
        """
        return self.last_step(version) * self.groups

    @abstractmethod
    def forms_step(self, step: int, under_way: ByVersion, finished: ByVersion) -> Sequence[int] | None:
        """Return the numbers of the B finished groups that `step` trains on; None: wait for more.

        Args:
            step: the next step.
            under_way: groups in flight.
            finished: finished groups that no step has trained on.
        """

    def samples_with(self, version: int, *, validates: bool = False) -> bool:
        """Return whether anything is sampled with `version`, so that these weights must be sent to the engines.

        Args:
            version: weight version, 1 or more.
            validates: whether this version generates held-out responses.
        """
        return version == self.steps or validates or self.may_begin(version) > self.may_begin(version - 1)

    def weights_may_go(self, version: int, begun: int, under_way: int) -> bool:
        """Return whether newer weights may replace `version`: no group is in flight, and no more may begin with it.

        Args:
            version: the version that generates now.
            begun: groups of the run that have begun, including trained ones.
            under_way: groups in flight.
        """
        return not under_way and begun >= self.may_begin(version)

    def weights_must_go(self, version: int, step: int) -> bool:
        """Return whether newer weights must replace `version` before `step` is trained; if so, training waits.

        Args:
            version: the version that generates now.
            step: the next step.
        """
        return self.may_begin(version) < step * self.groups

    # -- for planning and messages -----------------------------------------------------------------------------------

    @property
    def copies(self) -> int:
        """Maximum number of copies of the weights, one for each version that waits to be sent."""
        return 0

    @property
    def name(self) -> str:
        """Name of this staleness policy in messages."""
        return next((name for name, kind in ORDERS.items() if kind is type(self)), type(self).__qualname__)

    def describe(self) -> str:
        """Describe the policy in one line of the plan."""
        k = self.max_staleness
        rest = "new weights interrupt samples" if self.partial else "samples end with the weights they began with"
        limit = f"(1 + {k}) * {self.groups} = {self.capacity}"
        return f"{self.name}, at most {count(k, 'step')} stale; at most {limit} groups begun and not trained on; {rest}"


class InOrder(StalenessPolicy):
    """Step t is the next B prompts, generated with exactly the weights after step max(0, t - 1 - k), k = max_staleness.

    Every weight version is sent, one after the other. While a step is trained, the next one is generated.
    """

    def forms_step(self, step: int, under_way: ByVersion, finished: ByVersion) -> list[int] | None:
        """Return the numbers of the first `groups` prompts when all of them are finished; None before that."""
        done = set(_numbers(finished))
        chosen = sorted([*done, *_numbers(under_way)])[: self.groups]
        return chosen if len(chosen) == self.groups and done.issuperset(chosen) else None

    def weights_must_go(self, version: int, step: int) -> bool:
        """Return whether `version` is too old for the step after `step`, which is generated while `step` is trained."""
        return super().weights_must_go(version, step + 1)

    @property
    def copies(self) -> int:
        """Number of weight versions that may wait to be sent; 0 with max_staleness 1: each is sent after its step."""
        return self.max_staleness if self.max_staleness > 1 else 0

    def describe(self) -> str:
        """Describe the policy in one line of the plan."""
        k = self.max_staleness
        if k:
            return f"in_order, {count(k, 'step')} stale: step t is generated with the weights after step t - {1 + k}"
        return "in_order, not stale: a step is generated after the one before it is trained"


class AsReady(StalenessPolicy):
    """A step is B finished groups, in the order in which they finish. The newest weights are sent.

    Groups that began with the oldest weights come first, since they expire first. A step waits for a slow group only if
    the remaining groups would not fit into the steps that may use them. So no group becomes too old, and none is
    discarded.
    """

    def forms_step(self, step: int, under_way: ByVersion, finished: ByVersion) -> list[int] | None:
        """Return the numbers of a step's groups: the finished groups of the oldest versions, by number within each.
        Return None if there are too few, or if the groups left over would become too old."""
        oldest_first = [number for version in sorted(finished) for number in sorted(finished[version])]
        chosen = oldest_first[: self.groups]
        if len(chosen) < self.groups or not self.in_time(step, _left(chosen, under_way, finished)):
            return None
        return chosen

    def weights_must_go(self, version: int, step: int) -> bool:
        """Return whether weights must be sent after `step`: with `partial` always, else if `version` gets too old."""
        return self.partial or super().weights_must_go(version, step)


ORDERS: Mapping[str, type[StalenessPolicy]] = {"in_order": InOrder, "as_ready": AsReady}


def policy_of(config: RunConfig) -> StalenessPolicy:
    """Return the staleness policy of a recipe."""
    return make_policy(StalenessSettings.of(config))


@cache
def make_policy(settings: StalenessSettings) -> StalenessPolicy:
    """Return the staleness policy with these settings, one object per process."""
    order, values = settings.order, settings[1:]
    if order in ORDERS:
        return ORDERS[order](*values)
    try:
        kind = import_callable(order, where=ORDER)
    except UserError as error:
        raise ConfigError(error.what, where=ORDER, found=order, allowed=error.allowed, fix=error.fix) from error
    if not (isinstance(kind, type) and issubclass(kind, StalenessPolicy)):
        raise _refused(order, "this is not a staleness policy", "derive it from AsReady")
    if issubclass(kind, InOrder):
        raise _refused(order, "a staleness policy of your own cannot be derived from InOrder", "derive it from AsReady")
    if missing := sorted(getattr(kind, "__abstractmethods__", ())):
        raise _refused(order, f"this policy lacks {', '.join(missing)}", "define it, or derive the class from AsReady")
    try:
        policy = kind(*values)
        problem = _find_problem(policy)
    except PolicyError as error:
        problem = str(error)
    except Exception as error:
        problem = f"it {_raises(error, kind)}"
    if problem is not None:
        raise _refused(order, f"a run could not follow this policy: {problem}", "correct the class")
    return policy


def _refused(order: str, problem: str, fix: str) -> ConfigError:
    allowed = "in_order, as_ready, or a class derived from megarl.dag.staleness.StalenessPolicy, such as AsReady"
    return ConfigError(problem, where=ORDER, found=order, allowed=allowed, fix=fix)


def _raises(error: Exception, kind: type) -> str:
    line = location(error, inspect.getfile(kind))
    return f"raises {type(error).__name__}: {error}" + (f" ({line})" if line else "")


def choose(policy: StalenessPolicy, step: int, under_way: ByVersion, finished: ByVersion) -> list[int] | None:
    """Return the groups that the policy chooses for `step`; None if it waits.

    Raises:
        PolicyError: the policy does not choose B finished groups, the remaining groups would become too old, or it
            raises an error.
    """
    call = f"forms_step({step}) of the policy {policy.name}"
    try:
        chosen = policy.forms_step(step, under_way, finished)
    except Exception as error:
        raise PolicyError(f"{call} {_raises(error, type(policy))}") from error
    if chosen is None:
        return None
    numbers = set(chosen)
    if not len(chosen) == len(numbers) == policy.groups or not numbers.issubset(_numbers(finished)):
        raise PolicyError(
            f"{call} returns {sorted(chosen)[:8]}: {len(chosen)} groups; allowed: {policy.groups} different groups "
            "that are finished"
        )
    left = _left(chosen, under_way, finished)
    if not policy.in_time(step, left):
        raise PolicyError(
            f"{call} leaves groups that would be more than {count(policy.max_staleness, 'step')} stale; groups left by "
            f"version: {dict(sorted(left.items()))}. Choose the oldest groups first, or return None to wait for them"
        )
    return list(chosen)


def _find_problem(policy: StalenessPolicy) -> str | None:
    """Return why a run with this policy would stop or train on groups that are too old; None if it is usable.

    It simulates the first steps with groups that finish immediately: once with the newest weights, once with weights
    that are sent as late as possible.
    """
    size, steps = policy.groups, min(policy.steps, policy.max_staleness + 3)
    for version in range(steps):
        least = max(min(version + 1, policy.steps) * size, policy.may_begin(version - 1) if version else 0)
        most, limit = policy.last_step(version) * size, policy.may_begin(version)
        if not least <= limit <= most:
            return f"may_begin({version}) is {limit}; allowed: {least} to {most}"
    for newest in (True, False):
        version = begun = 0
        finished: dict[int, list[int]] = {}
        for step in range(1, steps + 1):
            if newest or policy.weights_must_go(version, step):
                version = step - 1
            finished.setdefault(version, []).extend(range(begun, policy.may_begin(version)))
            begun = policy.may_begin(version)
            chosen = choose(policy, step, {}, finished)
            if chosen is None:
                counts = _left((), {}, finished)
                return f"forms_step({step}) waits although no group is in flight and none may begin; finished: {counts}"
            finished = {at: [number for number in group if number not in chosen] for at, group in finished.items()}
    return None


def _numbers(groups: ByVersion) -> list[int]:
    return [number for numbers in groups.values() for number in numbers]


def _left(chosen: Collection[int], under_way: ByVersion, finished: ByVersion) -> dict[int, int]:
    """Return how many groups of each version are left when the `chosen` finished groups are taken out."""
    left = {version: len(numbers) for version, numbers in under_way.items()}
    for version, numbers in finished.items():
        left[version] = left.get(version, 0) + len(numbers) - len(set(chosen).intersection(numbers))
    return left
