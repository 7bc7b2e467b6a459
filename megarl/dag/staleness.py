"""The age that samples may have when they are trained on: the contract between generation and training, in one place.

    version v   the weights after step v; 0: those that the run begins with
    step t      is trained on B groups (`data.batch_size`) with the weights t - 1, and makes the weights t
    k           `async.max_staleness`: a group of step t began with the weights t - 1 - k or later

                            in_order                              as_ready, and policies of a user
    a group may begin       while fewer than (v + 1 + k) B groups have begun, v: the weights sampled with
    a step is               the next B prompts                    B finished groups, those that expire first
    weights v may go        when nothing is under way, and nothing more may begin with the weights before them
    weights v have to go    when those before them begin too few groups for
                            the step after the next one           the next step; `partial`: after every step

Loops, buffer, planning and simulation ask a policy, and none of them has a rule of its own. A policy of a user is a
class in a file (`async.order: my_policy.py:Policy`), derived from `AsReady` or `StalenessPolicy`. Policies are pure:
they are told what there is, answer, and keep nothing, so that every process makes one of its own from the recipe.
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

#: Numbers of groups by the version of the weights that they began with.
ByVersion = Mapping[int, Collection[int]]


class PolicyError(MegarlError):
    """A policy gave an answer that no run can go by."""


class StalenessSettings(NamedTuple):
    """A policy as plain values, which every process makes it from.

    Attributes:
        order: `async.order`; a file by its absolute path.
        max_staleness: k.
        groups: of a step, B.
        steps: of the run.
        partial: new weights interrupt samples, which go on with them.
    """

    order: str
    max_staleness: int
    groups: int
    steps: int
    partial: bool = False

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

    `oldest`, `last_step`, `steps_ahead`, `in_time` and `capacity` are what `async.max_staleness` promises: every policy
    is held to them, and they are not to be overridden. The rest is the policy's own.

    Attributes:
        max_staleness: k.
        groups: of a step, B.
        steps: of the run; nothing begins that no step of it needs.
        partial: new weights interrupt samples, which go on with them.
    """

    max_staleness: int
    groups: int
    steps: int
    partial: bool = False

    # -- what k means ------------------------------------------------------------------------------------------------

    def oldest(self, step: int) -> int:
        """Return the oldest version of the weights that a group of `step` may have begun with."""
        return max(0, step - 1 - self.max_staleness)

    def last_step(self, version: int) -> int:
        """Return the last step that may be trained on a group which began with `version`."""
        return min(version + 1 + self.max_staleness, self.steps)

    def steps_ahead(self, step: int) -> int:
        """Count the steps after `step` whose groups may have begun before the weights after `step` are there."""
        return max(0, self.last_step(step - 1) - step)

    def in_time(self, step: int, left: Mapping[int, int]) -> bool:
        """Tell whether groups that are left after `step` fit into the steps until the last one that may use them.

        Args:
            step: that has been formed.
            left: how many groups there are, by version, finished or not.
        """
        total = 0
        for version in sorted(left):
            total += left[version]
            if left[version] and total > (self.last_step(version) - step) * self.groups:
                return False
        return True

    @property
    def capacity(self) -> int:
        """Groups that have begun and that no step has been trained on, at most."""
        return (1 + self.max_staleness) * self.groups

    # -- what a policy decides ---------------------------------------------------------------------------------------

    def may_begin(self, version: int) -> int:
        """Count the groups of the run, trained ones included, that may have begun while samples come from `version`.

        Never less for a later version. At least (version + 1) B, or step version + 1 could not be formed; and at most
        B for each step until `last_step(version)`, or some would be too old for all of them.
        """
        return self.last_step(version) * self.groups

    @abstractmethod
    def forms_step(self, step: int, under_way: ByVersion, finished: ByVersion) -> Sequence[int] | None:
        """Return the numbers of the B finished groups that `step` is trained on; None: it waits for others.

        Args:
            step: the next one.
            under_way: groups that have begun and are not finished.
            finished: groups that are, and that no step has been trained on.
        """

    def samples_with(self, version: int, *, validates: bool = False) -> bool:
        """Tell whether anything is sampled with `version`, so that these weights have to go to the engines.

        Args:
            version: 1 or more.
            validates: held-out responses are.
        """
        return version == self.steps or validates or self.may_begin(version) > self.may_begin(version - 1)

    def weights_may_go(self, version: int, begun: int, under_way: int) -> bool:
        """Tell whether newer weights may replace `version`: nothing is sampled with it, and nothing will be.

        Args:
            version: that is sampled with.
            begun: groups of the run that have begun, those trained on included.
            under_way: of these, groups that are not finished.
        """
        return not under_way and begun >= self.may_begin(version)

    def weights_must_go(self, version: int, step: int) -> bool:
        """Tell whether newer weights have to replace `version` before `step` is trained, and are waited for.

        Args:
            version: that is sampled with.
            step: the next one.
        """
        return self.may_begin(version) < step * self.groups

    # -- what others need to know of it ------------------------------------------------------------------------------

    @property
    def copies(self) -> int:
        """The number of versions of the weights that may wait at the same time until they may go."""
        return 0

    @property
    def name(self) -> str:
        """The name in messages."""
        return next((name for name, kind in ORDERS.items() if kind is type(self)), type(self).__qualname__)

    def describe(self) -> str:
        """Describe the policy as a line of the plan."""
        k = self.max_staleness
        rest = "new weights interrupt samples" if self.partial else "samples end with the weights they began with"
        limit = f"(1 + {k}) * {self.groups} = {self.capacity}"
        return f"{self.name}, at most {count(k, 'step')} stale; at most {limit} groups begun and not trained on; {rest}"


class InOrder(StalenessPolicy):
    """Step t is the next B prompts, with exactly the weights after step max(0, t - 1 - k).

    Every version goes, one after the other. While a step is trained, the one after it is sampled.
    """

    def forms_step(self, step: int, under_way: ByVersion, finished: ByVersion) -> list[int] | None:
        """Return the first B prompts, when all of them are finished."""
        done = set(_numbers(finished))
        chosen = sorted([*done, *_numbers(under_way)])[: self.groups]
        return chosen if len(chosen) == self.groups and done.issuperset(chosen) else None

    def weights_must_go(self, version: int, step: int) -> bool:
        """Tell whether weights must go: the step after `step` is sampled while `step` is trained."""
        return super().weights_must_go(version, step + 1)

    @property
    def copies(self) -> int:
        """The number of versions that may wait: with k = 1 weights have to go after every step, so that none wait."""
        return self.max_staleness if self.max_staleness > 1 else 0

    def describe(self) -> str:
        """Describe the policy as a line of the plan."""
        k = self.max_staleness
        if k:
            return f"in_order, {count(k, 'step')} stale: step t is generated with the weights after step t - {1 + k}"
        return "in_order, not stale: a step is generated after the one before it is trained"


class AsReady(StalenessPolicy):
    """A step is B groups that are finished, in whatever order they get so. The newest weights go.

    Those that began with the oldest weights come first, for they expire first. A step waits for a slow group only where
    the groups that are left would not fit into the steps that may use them: so nothing grows too old, and nothing is
    thrown away.
    """

    def forms_step(self, step: int, under_way: ByVersion, finished: ByVersion) -> list[int] | None:
        """Return the finished groups of the oldest versions, the first prompt first among equals."""
        left = {version: len(some) for version, some in under_way.items()}
        wanted = self.groups
        for version in sorted(finished):
            there = len(finished[version])
            taken = min(there, wanted)
            wanted -= taken
            left[version] = left.get(version, 0) + there - taken
        if wanted or not self.in_time(step, left):
            return None
        return [number for version in sorted(finished) for number in sorted(finished[version])][: self.groups]

    def weights_must_go(self, version: int, step: int) -> bool:
        """Tell whether weights must go: partial samples take new weights after every step."""
        return self.partial or super().weights_must_go(version, step)


ORDERS: Mapping[str, type[StalenessPolicy]] = {"in_order": InOrder, "as_ready": AsReady}


def policy_of(config: RunConfig) -> StalenessPolicy:
    """Return the policy of a recipe.

    Raises:
        ConfigError: a user's class cannot be imported, or no run could go by it.
    """
    return make_policy(StalenessSettings.of(config))


@cache
def make_policy(settings: StalenessSettings) -> StalenessPolicy:
    """Make the policy with these settings; one object per process.

    Raises:
        ConfigError: a user's class cannot be imported, or no run could go by it.
    """
    order, values = settings.order, settings[1:]
    if order in ORDERS:
        return ORDERS[order](*values)
    try:
        kind = import_callable(order, where=ORDER)
    except UserError as error:
        raise ConfigError(error.what, where=ORDER, found=order, allowed=error.allowed, fix=error.fix) from error
    if not (isinstance(kind, type) and issubclass(kind, StalenessPolicy)) or issubclass(kind, InOrder):
        raise _refused(order, "this is not a policy that chooses among groups that are ready", "derive it from AsReady")
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
        raise _refused(order, f"no run could go by this policy: {problem}", "correct the class")
    return policy


def _refused(order: str, what: str, fix: str) -> ConfigError:
    allowed = "in_order, as_ready, or a class derived from megarl.dag.staleness.StalenessPolicy, as AsReady is"
    return ConfigError(what, where=ORDER, found=order, allowed=allowed, fix=fix)


def _raises(error: Exception, kind: type) -> str:
    line = location(error, inspect.getfile(kind))
    return f"raises {type(error).__name__}: {error}" + (f" ({line})" if line else "")


def choose(policy: StalenessPolicy, step: int, under_way: ByVersion, finished: ByVersion) -> list[int] | None:
    """Ask the policy for the groups of `step`; None: it waits.

    Raises:
        PolicyError: it names what are not B finished groups, or those that are left would grow too old; or it raises.
    """
    said = f"forms_step({step}) of the policy {policy.name}"
    try:
        chosen = policy.forms_step(step, under_way, finished)
    except Exception as error:
        raise PolicyError(f"{said} {_raises(error, type(policy))}") from error
    if chosen is None:
        return None
    taken = set(chosen)
    if not len(chosen) == len(taken) == policy.groups or not taken.issubset(_numbers(finished)):
        raise PolicyError(
            f"{said} names {sorted(chosen)[:8]}: {len(chosen)} groups; allowed: {policy.groups} different groups that "
            "are finished"
        )
    left = {version: len(some) for version, some in under_way.items()}
    for version, some in finished.items():
        left[version] = left.get(version, 0) + len(some) - len(taken.intersection(some))
    if not policy.in_time(step, left):
        raise PolicyError(
            f"{said} leaves groups that would be more than {count(policy.max_staleness, 'step')} stale; left by "
            f"version: {dict(sorted(left.items()))}"
        )
    return list(chosen)


def _find_problem(policy: StalenessPolicy) -> str | None:
    """Return why a run with this policy would stand still, or train on groups that are too old; None: it is usable.

    Forms the first steps as if every group finished at once: with the newest weights, and with weights that go only
    when they have to.
    """
    size, steps = policy.groups, min(policy.steps, policy.max_staleness + 3)
    for version in range(steps):
        least = max(min(version + 1, policy.steps) * size, policy.may_begin(version - 1) if version else 0)
        most, found = policy.last_step(version) * size, policy.may_begin(version)
        if not least <= found <= most:
            return f"may_begin({version}) is {found}; allowed: {least} to {most}"
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
                there = {version: len(some) for version, some in finished.items()}
                return f"forms_step({step}) waits where nothing is under way and nothing may begin; finished: {there}"
            finished = {one: [number for number in some if number not in chosen] for one, some in finished.items()}
    return None


def _numbers(groups: ByVersion) -> list[int]:
    return [number for some in groups.values() for number in some]
