"""The life of a prompt group from admission to its step, where `async.order` is not in_order.

    admit(v)   the group is in flight, with version v of the weights; `megarl.dag.staleness` limits how many
    finish     its samples are complete, and it is ready            reject: it is dropped, and another may be admitted
    form       the policy chooses ready groups as the samples of the next step

Prompts have numbers, counted over all epochs. Any replica may generate for any prompt.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

from megarl.dag.staleness import PolicyError, StalenessPolicy, StalenessSettings, choose, make_policy

if TYPE_CHECKING:
    from megarl.disaggregated.buffer.core import GroupInfo


class Finished(NamedTuple):
    """A group whose samples are complete.

    Attributes:
        info: describes its samples; `GroupInfo.ordinal` has no meaning yet.
        metrics: metrics of its samples, as JSON text; None: another group has them.
    """

    number: int
    info: GroupInfo
    metrics: str | None


@dataclass
class FlowGroup:
    """A prompt group whose samples are being generated, or are ready to be trained on.

    Attributes:
        version: version of the weights that generated its first tokens.
        info: describes its samples; None: the group is in flight.
        refs: references to its bytes by key of handover.
        metrics: metrics of its samples, as JSON text.
    """

    number: int
    version: int
    info: GroupInfo | None = None
    refs: dict[str, Any] = field(default_factory=dict)
    metrics: str | None = None


class Flow:
    """The groups of a run; a staleness policy decides how many are admitted and which form a step. No method waits.

    Attributes:
        step: the last step that was formed.
        next: number of the first prompt that was never admitted; None: the flow is not open.
        again: prompts before `next` that must be generated again.
    """

    def __init__(self, settings: StalenessSettings) -> None:
        self._settings = settings
        self.step = 0
        self.next: int | None = None
        self.again: list[int] = []
        self._begun = 0
        self._groups: dict[int, FlowGroup] = {}
        self._in_flight: dict[int, set[int]] = {}  # numbers of the groups in flight, by weight version
        self._finished: dict[int, set[int]] = {}

    @property
    def _policy(self) -> StalenessPolicy:
        return make_policy(self._settings)

    def open(self, step: int, number: int, begun: Mapping[int, int], again: Iterable[int]) -> list[int]:
        """Start after `step`, at the beginning of a run or from a checkpoint.

        Args:
            step: the last trained step.
            number: number of the first prompt that was never admitted.
            begun: weight version of every ready or in-flight group, by number.
            again: numbers of prompts before `number` that must be generated again.

        Returns:
            The numbers in `begun` that would be too old with these settings; they are generated again.

        Raises:
            ValueError: the flow is open.
        """
        if self.next is not None:
            raise ValueError("this flow of groups is already open, and a run opens it once")
        policy, left = self._policy, dict[int, int]()
        self.step, self.next, late = step, number, []
        for prompt, version in sorted(begun.items(), key=lambda item: (item[1], item[0])):
            if policy.in_time(step, {**left, version: left.get(version, 0) + 1}):
                left[version] = left.get(version, 0) + 1
                self._add(FlowGroup(prompt, version))
            else:
                late.append(prompt)
        self._begun = step * policy.groups + len(self._groups)
        self.again = sorted([*again, *late])
        return late

    def admit(self, version: int, most: int) -> list[int]:
        """Admit up to `most` groups with `version` of the weights, and return the numbers of their prompts.

        Fewer than `most` means that no more may begin before a newer version.

        Raises:
            ValueError: the flow is not open.
        """
        if self.next is None:
            raise ValueError("the flow of groups is not open yet")
        numbers = []
        for _ in range(min(most, self._policy.may_begin(version) - self._begun)):
            if self.again:
                number = self.again.pop(0)
            else:
                number, self.next = self.next, self.next + 1
            self._add(FlowGroup(number, version))
            numbers.append(number)
        self._begun += len(numbers)
        return numbers

    def finish(self, number: int, info: GroupInfo, refs: Mapping[str, Any], metrics: str | None) -> None:
        """Record the complete samples of a group.

        Raises:
            ValueError: the group is not in flight.
        """
        group = self._groups.get(number)
        if group is None:
            raise ValueError(f"prompt {number} was not admitted, or a step has already used its samples")
        if group.info is not None:
            raise ValueError(f"the samples of prompt {number} ({group.info.uid}) have already been handed over")
        group.info, group.refs, group.metrics = info, dict(refs), metrics
        _discard(self._in_flight, group)
        self._finished.setdefault(group.version, set()).add(number)

    def reject(self, number: int) -> None:
        """Drop an in-flight group: no step will be trained on it, and another group may be admitted in its place.

        Raises:
            ValueError: the group is not in flight.
        """
        group = self._groups.get(number)
        if group is None or group.info is not None:
            raise ValueError(f"the group of prompt {number} is not in flight")
        self._remove(group)
        self._begun -= 1

    def form(self) -> list[FlowGroup] | None:
        """Return the groups of the next step by rising number; None: the policy waits for more groups, or no step is
        left.

        Raises:
            PolicyError: the policy chooses groups that cannot form a step, or would wait for ever.
        """
        policy, step = self._policy, self.step + 1
        if step > policy.steps:
            return None
        chosen = choose(policy, step, self._in_flight, self._finished)
        if chosen is None:
            in_flight, finished = self.counts
            if finished >= policy.groups and policy.weights_may_go(self.step, self._begun, in_flight):
                raise PolicyError(
                    f"forms_step({step}) of the policy {policy.name} waits with {finished} finished groups, although "
                    f"no group is in flight and none may begin: the run would never end. Return {policy.groups} of the "
                    "finished groups"
                )
            return None
        self.step = step
        groups = [self._groups[number] for number in sorted(chosen)]
        for group in groups:
            self._remove(group)
        return groups

    def _add(self, group: FlowGroup) -> None:
        self._groups[group.number] = group
        self._in_flight.setdefault(group.version, set()).add(group.number)

    def _remove(self, group: FlowGroup) -> None:
        del self._groups[group.number]
        _discard(self._in_flight if group.info is None else self._finished, group)

    def drained(self, version: int) -> bool:
        """Return whether no group is in flight, and none may be admitted with `version` of the weights."""
        return self._policy.weights_may_go(version, self._begun, self.counts[0])

    @property
    def finished(self) -> list[FlowGroup]:
        """The finished groups that are in no step yet."""
        return [group for group in self._groups.values() if group.info is not None]

    @property
    def counts(self) -> tuple[int, int]:
        """The number of groups in flight, and the number of finished groups that are in no step yet."""
        finished = sum(map(len, self._finished.values()))
        return len(self._groups) - finished, finished


def _discard(groups: dict[int, set[int]], group: FlowGroup) -> None:
    groups[group.version].remove(group.number)
    if not groups[group.version]:
        del groups[group.version]
