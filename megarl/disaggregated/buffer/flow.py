"""Which prompts are drawn, and which finished groups a step is trained on, where `async.order` is as_ready.

    admit(v)   a group begins with version v of the weights     while fewer than (v + 1 + k) B groups have begun
    finish     its samples are there; it waits           reject: they are of no use, another one may begin
    form       B groups that wait become the samples of the next step

B is `data.batch_size` and k `async.max_staleness`. A step that is trained on a group of version v is at most step
v + 1 + k, the group's last one; what has begun by then fits into the steps until then. So it is enough to take the
groups with the earliest last step first, and to wait for a slow one only where the groups that are left would not fit
into the steps that are left to them: nothing grows too old, and nothing is thrown away.

Prompts go by numbers: those of all epochs laid end to end. Which replica draws one does not matter.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from megarl.config.run import RunConfig
    from megarl.disaggregated.buffer.core import GroupInfo


class FlowSettings(NamedTuple):
    """Sizes of a flow.

    Attributes:
        groups: of a step, B.
        max_staleness: k.
        steps: of the run; nothing is begun that no step of it needs.
    """

    groups: int
    max_staleness: int
    steps: int

    @classmethod
    def of(cls, config: RunConfig) -> FlowSettings | None:
        """None: every step draws its own samples."""
        if config.async_.order != "as_ready":
            return None
        return cls(config.data.batch_size, config.async_.max_staleness, config.trainer.steps)


class Finished(NamedTuple):
    """A group whose samples are all there.

    Attributes:
        number: of its prompt.
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
        number: of its prompt.
        version: of the weights that its first tokens were drawn with.
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
    """The groups of a run, from the prompt to the step. It knows nothing of replicas, and never waits.

    Attributes:
        step: the last one that has its samples.
    """

    def __init__(self, settings: FlowSettings) -> None:
        self._settings = settings
        self.step = 0
        self._next: int | None = None
        self._again: list[int] = []
        self._begun = 0
        self._groups: dict[int, FlowGroup] = {}
        # By version, since every call asks for these: groups that are there, and those of them that are finished.
        self._there: dict[int, int] = {}
        self._ready: dict[int, int] = {}

    def open(self, step: int, number: int, begun: Mapping[int, int], again: Iterable[int]) -> list[int]:
        """Begin, or go on, after `step`.

        Args:
            step: the last one that is trained.
            number: of the first prompt that nobody has drawn.
            begun: version of every group that is finished or under way, by number.
            again: numbers of prompts before `number` that have to be drawn again.

        Returns:
            Those of `begun` that cannot be used in time with these settings: they are drawn again.

        Raises:
            ValueError: it is open.
        """
        if self._next is not None:
            raise ValueError("the flow of samples is open")
        size, lag, steps = self._settings
        self.step, self._next, late = step, number, []
        for one, version in sorted(begun.items(), key=lambda item: (item[1], item[0])):
            last = min(version + 1 + lag, steps)
            if len(self._groups) < (last - step) * size:
                self._add(FlowGroup(one, version))
            else:
                late.append(one)
        self._begun = step * size + len(self._groups)
        self._again = sorted([*again, *late])
        return late

    def admit(self, version: int, most: int) -> list[int]:
        """Numbers of up to `most` prompts that may be drawn from now on with `version` of the weights.

        Fewer than `most`: nothing more may begin before there is a newer version.

        Raises:
            ValueError: it is not open.
        """
        if self._next is None:
            raise ValueError("the flow of samples is not open")
        size, lag, steps = self._settings
        found = []
        for _ in range(min(most, min(version + 1 + lag, steps) * size - self._begun)):
            if self._again:
                number = self._again.pop(0)
            else:
                number, self._next = self._next, self._next + 1
            self._add(FlowGroup(number, version))
            found.append(number)
        self._begun += len(found)
        return found

    def finish(self, number: int, info: GroupInfo, refs: Mapping[str, Any], metrics: str | None) -> None:
        """The samples of a group are there.

        Raises:
            ValueError: nobody has begun it, or it was finished before.
        """
        group = self._groups.get(number)
        if group is None:
            raise ValueError(f"prompt {number} has not been handed out, or its samples have been used")
        if group.info is not None:
            raise ValueError(f"the samples of prompt {number} ({group.info.uid}) have been given before")
        group.info, group.refs, group.metrics = info, dict(refs), metrics
        self._ready[group.version] = self._ready.get(group.version, 0) + 1

    def reject(self, number: int) -> None:
        """No step is to be trained on these samples: another group may begin in their place.

        Raises:
            ValueError: nobody has begun it, or it is finished.
        """
        group = self._groups.get(number)
        if group is None or group.info is not None:
            raise ValueError(f"prompt {number} is not being drawn")
        self._remove(group)
        self._begun -= 1

    def form(self) -> list[FlowGroup] | None:
        """The groups of the next step, by number; None: it has to wait."""
        size, lag, steps = self._settings
        step = self.step + 1
        if step > steps or self.counts[1] < size:
            return None
        wanted = total = 0  # groups of the step, of versions so far; groups that later steps would be trained on
        for version in sorted(self._there):
            taken = min(self._ready.get(version, 0), size - wanted)
            wanted += taken
            total += self._there[version] - taken
            if total > (min(version + 1 + lag, steps) - step) * size:
                return None
        chosen = sorted(self.finished, key=lambda group: (group.version, group.number))[:size]
        self.step = step
        for group in chosen:
            self._remove(group)
        return sorted(chosen, key=lambda group: group.number)

    def _add(self, group: FlowGroup) -> None:
        self._groups[group.number] = group
        self._there[group.version] = self._there.get(group.version, 0) + 1

    def _remove(self, group: FlowGroup) -> None:
        del self._groups[group.number]
        for counts in [self._there, *([] if group.info is None else [self._ready])]:
            counts[group.version] -= 1
            if not counts[group.version]:
                del counts[group.version]

    def drained(self, version: int) -> bool:
        """Nothing is under way, and nothing may begin with `version` of the weights."""
        size, lag, steps = self._settings
        return not self.counts[0] and self._begun >= min(version + 1 + lag, steps) * size

    @property
    def next(self) -> int | None:
        """Number of the first prompt that nobody has drawn; None: it is not open."""
        return self._next

    @property
    def again(self) -> list[int]:
        """Prompts before `next` that nobody draws yet."""
        return list(self._again)

    @property
    def finished(self) -> list[FlowGroup]:
        """Groups that wait for a step."""
        return [group for group in self._groups.values() if group.info is not None]

    @property
    def counts(self) -> tuple[int, int]:
        """Groups that are under way, and that wait for a step."""
        finished = sum(self._ready.values())
        return len(self._groups) - finished, finished
