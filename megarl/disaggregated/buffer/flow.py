"""Groups of a run from the prompt to the step, where `async.order` is not in_order.

    admit(v)   a group begins with version v of the weights     as many as `megarl.staleness` lets begin
    finish     its samples are there; it waits                   reject: they are of no use, another one may begin
    form       groups that wait become the samples of the next step, which the policy chooses

Prompts go by numbers: those of all epochs laid end to end. Which replica generates for one does not matter.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

from megarl.staleness import PolicyError, StalenessPolicy, StalenessSettings, choose, make_policy

if TYPE_CHECKING:
    from megarl.disaggregated.buffer.core import GroupInfo


class Finished(NamedTuple):
    """A group whose samples are all there.

    Attributes:
        info: what it holds; its ordinal means nothing.
        metrics: of its samples, as text; None: they count with another group.
    """

    number: int
    info: GroupInfo
    metrics: str | None


@dataclass
class FlowGroup:
    """A group that has begun and that no step has been trained on.

    Attributes:
        version: of the weights that its first tokens were generated with.
        info: None: it is not finished.
        refs: to its bytes, by handover.
        metrics: of its samples, as text.
    """

    number: int
    version: int
    info: GroupInfo | None = None
    refs: dict[str, Any] = field(default_factory=dict)
    metrics: str | None = None


class Flow:
    """Keeps the groups of a run, and asks a policy which may begin and which make up a step. It never waits.

    Args:
        settings: of the policy; plain values, for they are in the journal.

    Attributes:
        step: the last one that has its samples.
        next: number of the first prompt that nobody has generated; None: it is not open.
        again: prompts before `next` that nobody generates yet.
    """

    def __init__(self, settings: StalenessSettings) -> None:
        self._settings = settings
        self.step = 0
        self.next: int | None = None
        self.again: list[int] = []
        self._begun = 0
        self._groups: dict[int, FlowGroup] = {}
        self._under_way: dict[int, set[int]] = {}  # numbers of groups by version
        self._finished: dict[int, set[int]] = {}

    @property
    def _policy(self) -> StalenessPolicy:
        return make_policy(self._settings)

    def open(self, step: int, number: int, begun: Mapping[int, int], again: Iterable[int]) -> list[int]:
        """Begin, or go on, after `step`.

        Args:
            step: the last one that is trained.
            number: of the first prompt that nobody has generated.
            begun: version of every group that is finished or under way, by number.
            again: numbers of prompts before `number` that have to be generated again.

        Returns:
            Those of `begun` that cannot be used in time with these settings: they are generated again.

        Raises:
            ValueError: it is open.
        """
        if self.next is not None:
            raise ValueError("the flow of samples is open")
        policy, left = self._policy, dict[int, int]()
        self.step, self.next, late = step, number, []
        for one, version in sorted(begun.items(), key=lambda item: (item[1], item[0])):
            if policy.in_time(step, {**left, version: left.get(version, 0) + 1}):
                left[version] = left.get(version, 0) + 1
                self._add(FlowGroup(one, version))
            else:
                late.append(one)
        self._begun = step * policy.groups + len(self._groups)
        self.again = sorted([*again, *late])
        return late

    def admit(self, version: int, most: int) -> list[int]:
        """Numbers of up to `most` prompts that may be generated from now on with `version` of the weights.

        Fewer than `most`: nothing more may begin before there is a newer version.

        Raises:
            ValueError: it is not open.
        """
        if self.next is None:
            raise ValueError("the flow of samples is not open")
        found = []
        for _ in range(min(most, self._policy.may_begin(version) - self._begun)):
            if self.again:
                number = self.again.pop(0)
            else:
                number, self.next = self.next, self.next + 1
            self._add(FlowGroup(number, version))
            found.append(number)
        self._begun += len(found)
        return found

    def finish(self, number: int, info: GroupInfo, refs: Mapping[str, Any], metrics: str | None) -> None:
        """Take in the samples of a group.

        Raises:
            ValueError: nobody has begun it, or it was finished before.
        """
        group = self._groups.get(number)
        if group is None:
            raise ValueError(f"prompt {number} has not been handed out, or its samples have been used")
        if group.info is not None:
            raise ValueError(f"the samples of prompt {number} ({group.info.uid}) have been given before")
        group.info, group.refs, group.metrics = info, dict(refs), metrics
        _discard(self._under_way, group)
        self._finished.setdefault(group.version, set()).add(number)

    def reject(self, number: int) -> None:
        """No step is to be trained on these samples: another group may begin in their place.

        Raises:
            ValueError: nobody has begun it, or it is finished.
        """
        group = self._groups.get(number)
        if group is None or group.info is not None:
            raise ValueError(f"prompt {number} is not being generated")
        self._remove(group)
        self._begun -= 1

    def form(self) -> list[FlowGroup] | None:
        """Choose the groups of the next step, by number; None: it has to wait.

        Raises:
            PolicyError: the policy chooses what no run can go by.
        """
        policy, step = self._policy, self.step + 1
        if step > policy.steps:
            return None
        chosen = choose(policy, step, self._under_way, self._finished)
        if chosen is None:
            under_way, finished = self.counts
            if finished >= policy.groups and policy.weights_may_go(self.step, self._begun, under_way):
                raise PolicyError(
                    f"forms_step({step}) of the policy {policy.name} waits with {finished} finished groups, where "
                    "nothing is under way and nothing more may begin: the run would stand still"
                )
            return None
        self.step = step
        groups = [self._groups[number] for number in sorted(chosen)]
        for group in groups:
            self._remove(group)
        return groups

    def _add(self, group: FlowGroup) -> None:
        self._groups[group.number] = group
        self._under_way.setdefault(group.version, set()).add(group.number)

    def _remove(self, group: FlowGroup) -> None:
        del self._groups[group.number]
        _discard(self._under_way if group.info is None else self._finished, group)

    def drained(self, version: int) -> bool:
        """Nothing is under way, and nothing may begin with `version` of the weights."""
        return self._policy.weights_may_go(version, self._begun, self.counts[0])

    @property
    def finished(self) -> list[FlowGroup]:
        """Groups that wait for a step."""
        return [group for group in self._groups.values() if group.info is not None]

    @property
    def counts(self) -> tuple[int, int]:
        """Groups that are under way, and that wait for a step."""
        finished = sum(map(len, self._finished.values()))
        return len(self._groups) - finished, finished


def _discard(groups: dict[int, set[int]], group: FlowGroup) -> None:
    groups[group.version].remove(group.number)
    if not groups[group.version]:
        del groups[group.version]
