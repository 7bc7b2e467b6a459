"""The state of the buffer: groups of samples of each step, who gets which, and where their bytes are.

    giver                     core                                              taker
    give(step, key, groups)   groups of the step -> parts of every team    <-     assignment(step, samples, part)
      one reference to bytes  handover key -> references by group          <-     fetch(step, key, uids)
      per group               all workers of all takers are done -> free   <-     done(step)

A step is known from its first samples until the last worker of the last taker is done with it; then only its number
is kept. Where groups do not come step by step (`async.order=as_ready`), they are put into a pool, of which buffer.flow
forms the samples of a step when a taker first asks for them; from then on they are like any others.

A team whose processes died begins again with the step after the last one that is over: all that it took since is
still here. What it gave since is forgotten, and comes again.

Nothing here waits: what is not there yet is answered with None, and `give` and `post` tell what has come. Bytes never
come here; a reference to them may be any object.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple, TypeAlias

from megarl.dag.placement import Handover, Placement
from megarl.dag.stage import Role
from megarl.disaggregated.buffer.flow import Finished, Flow, FlowGroup
from megarl.errors import MegarlError
from megarl.metrics import Metrics
from megarl.staleness import PolicyError, StalenessSettings

#: What can be waited for: ("handover", step, key), ("samples", step, node) or ("mail", name).
Topic: TypeAlias = tuple[Any, ...]

#: Mail of a series that is kept: more steps than any reader is late.
KEPT = 64
#: Series of mail: numbers and metrics of the groups that a step was formed of.
FORMED = "formed"


class StoreError(MegarlError):
    """Samples or mail between teams do not fit together, or did not come; the message names what, team and rank."""


class GroupInfo(NamedTuple):
    """One group of samples, as the store knows it.

    Attributes:
        ordinal: its place among the groups of the step.
        sample_ids: of its samples, in their order.
        tokens: of all its samples, prompts included.
    """

    uid: str
    ordinal: int
    sample_ids: tuple[str, ...]
    tokens: int


@dataclass
class _Sent:
    """The groups sent under one key in one step: by whom, the reference to each group's bytes, and which groups each
    taker has fetched."""

    givers: set[int] = field(default_factory=set)
    refs: dict[str, Any] = field(default_factory=dict)
    taken: dict[str, set[str]] = field(default_factory=dict)


@dataclass
class _Step:
    sent_by_key: dict[str, _Sent] = field(default_factory=dict)
    #: by the node that made the samples; then by uid.
    groups: dict[str, dict[str, GroupInfo]] = field(default_factory=dict)
    ordinals: dict[str, dict[int, str]] = field(default_factory=dict)
    #: by the same node and team: groups of each of its parts.
    parts: dict[tuple[str, str], list[list[GroupInfo]]] = field(default_factory=dict)
    done: set[tuple[str, int]] = field(default_factory=set)
    #: of a pool.
    formed: list[FlowGroup] = field(default_factory=list)


#: Classes of what a core holds, beside plain values.
STATE: tuple[type, ...] = (GroupInfo, _Sent, _Step, Flow, FlowGroup, StalenessSettings)


class Core:
    """The state of the store of one run.

    Args:
        placement: its teams, and what goes from one to another.
        groups_per_step: most groups that a step has.
        share: how the parts of a team share groups. dealt: group k to part k modulo their number, as inside one team.
            tokens: equally many of every mini-batch each, tokens as even as can be.
        flow: the samples of a step are formed of what is ready; None: its givers give them.

    Attributes:
        decisions: how often a question has settled something: who gets which groups is settled when it is first asked.
    """

    def __init__(
        self, placement: Placement, groups_per_step: int, share: Share, flow: StalenessSettings | None = None
    ) -> None:
        self._limit, self._share = groups_per_step, share
        self._handovers: dict[str, Handover] = {one.key: one for one in placement.handovers}
        self._parts = {team.name: team.replicas for team in placement.teams}
        self._cuts = {team.name: team.cuts for team in placement.teams}
        taking = {name for one in placement.handovers for name in one.takers}
        self._takers = {
            (team.name, rank) for team in placement.teams if team.name in taking for rank in range(team.devices)
        }
        self._flow = None if flow is None else Flow(flow)
        rollout = placement.of_role(Role.ROLLOUT)
        self._drawer = None if rollout is None else rollout.name
        self._flows = () if flow is None or rollout is None else tuple(placement.given_by(rollout.name))
        self._asked = 0  # the last step whose samples somebody has asked for
        self._steps: dict[int, _Step] = {}
        self.decisions = 0
        self._finished: int | None = None
        self._starts: dict[str, int] = {}  # of teams that began again: how often
        self._mail: dict[str, Any] = {}
        self._series: dict[str, list[int]] = {}  # numbers of the mail that is kept, in the order of its coming
        self._arrived: dict[str, set[tuple[str, int]]] = {}  # workers, by name of the mail that comes when all have

    # -- samples -----------------------------------------------------------------------------------------------------

    def give(
        self, team: str, rank: int, step: int, key: str, groups: Sequence[GroupInfo], refs: Sequence[Any]
    ) -> list[Topic]:
        """Take what one replica hands over, all its groups at once; returns what is complete by that.

        Raises:
            StoreError: it does not fit what the run's teams hand over, or what has been given before; nothing is kept.
        """
        handover = self._known(key)
        at = f"step {step}, {key!r}, given by team {team!r} rank {rank}"
        if handover.giver != team:
            raise StoreError(f"{at}: it is team {handover.giver!r} that gives this")
        state = self._steps.get(step) or _Step()
        sent = state.sent_by_key.get(key) or _Sent()
        if self._is_finished(step):
            raise StoreError(f"{at}: all takers are done with this step")
        known = state.groups.get(handover.samples, {})
        if rank in sent.givers:
            raise StoreError(f"{at}: this rank has given it before")
        if len(sent.givers) == self._parts[team]:
            raise StoreError(f"{at}: all {self._parts[team]} replicas have given before, ranks {sorted(sent.givers)}")
        ordinals = state.ordinals.get(handover.samples, {})
        self._check(at, groups, sent, known, ordinals)
        new = {group.uid: group for group in groups}
        numbers = {group.ordinal: group.uid for group in groups}
        if not len(groups) == len(new) == len(numbers) == len(refs):
            counts = f"{len(new)} names, {len(numbers)} numbers and {len(refs)} payloads"
            raise StoreError(f"{at}: {len(groups)} groups have {counts}")
        if len(known) + sum(uid not in known for uid in new) > self._limit:
            raise StoreError(f"{at}: more groups than the {self._limit} of a step (data.batch_size)")
        self._steps[step], state.sent_by_key[key] = state, sent
        state.groups.setdefault(handover.samples, {}).update(new)
        state.ordinals.setdefault(handover.samples, {}).update(numbers)
        sent.givers.add(rank)
        sent.refs.update(zip(new, refs, strict=True))
        if not self._is_complete(handover, sent):
            return []
        return [("handover", step, key), ("samples", step, handover.samples)]

    @staticmethod
    def _check(
        at: str, groups: Sequence[GroupInfo], sent: _Sent, known: dict[str, GroupInfo], ordinals: dict[int, str]
    ) -> None:
        """Groups come once under each key, and are the same under all keys; each has a number of its own."""
        for group in groups:
            if group.uid in sent.refs:
                raise StoreError(
                    f"{at}: group {group.uid!r} has been given before by one of ranks {sorted(sent.givers)}"
                )
            if known.get(group.uid, group) != group:
                raise StoreError(
                    f"{at}: group {group.uid!r} is another one than what was given of these samples before\n"
                    f"  found:   {group}\n  allowed: {known[group.uid]}"
                )
            other = ordinals.get(group.ordinal, group.uid)
            if other != group.uid:
                raise StoreError(f"{at}: groups {group.uid!r} and {other!r} are both number {group.ordinal}")

    def assignment(self, team: str, step: int, samples: str, part: int) -> list[GroupInfo] | None:
        """Return the groups of one part of a team, of the samples that node `samples` made; None: some are missing.

        Raises:
            StoreError: the team has no such part.
        """
        if not 0 <= part < self._parts[team]:
            raise StoreError(f"step {step}: team {team!r} has {self._parts[team]} parts, and asks for part {part}")
        self._form_until(step)
        state = self._steps.get(step)
        if state is None or not any(
            self._handovers[key].samples == samples and self._is_complete(self._handovers[key], sent)
            for key, sent in state.sent_by_key.items()
        ):
            return None
        if (samples, team) not in state.parts:
            self.decisions += 1
            state.parts[samples, team] = shared(
                state.groups[samples].values(), self._parts[team], self._share, self._cuts[team]
            )
        return state.parts[samples, team][part]

    def fetch(self, team: str, step: int, key: str, uids: Sequence[str]) -> list[Any] | None:
        """References to the bytes of these groups, in this order; None: not all replicas of the giver have given.

        With them a worker of `team` has taken the groups.

        A part without groups still has to learn what the fields are: without `uids` it is any one group.

        Raises:
            StoreError: a group is not there although all have been given.
        """
        handover = self._known(key)
        self._form_until(step)
        state = self._steps.get(step)
        sent = None if state is None else state.sent_by_key.get(key)
        if sent is None or not self._is_complete(handover, sent):
            return None
        if not sent.refs:
            raise StoreError(f"step {step}, {key!r}: team {handover.giver!r} has given no group at all")
        missing = [uid for uid in uids if uid not in sent.refs]
        if missing:
            raise StoreError(
                f"step {step}, {key!r}: group {missing[0]!r} is not one of the {len(sent.refs)} groups that team "
                f"{handover.giver!r} has given"
            )
        taken = sent.taken.setdefault(team, set())
        if not taken.issuperset(uids):
            self.decisions += 1
            taken.update(uids)
        return [sent.refs[uid] for uid in uids] or [next(iter(sent.refs.values()))]

    def done(self, team: str, rank: int, step: int) -> None:
        """This worker needs nothing more of `step`. What all takers are done with is forgotten."""
        if self._is_finished(step) or (team, rank) not in self._takers:
            return
        state = self._steps.get(step)
        if state is None:
            state = self._steps[step] = _Step()
        state.done.add((team, rank))
        if len(state.done) == len(self._takers):
            del self._steps[step]
            self._finished = step if self._finished is None else max(step, self._finished)

    def restart_team(self, team: str, number: int) -> int | None:
        """This team begins again, for the `number`-th time, and is to make what it made of steps that are not over.

        Nobody finds what it sent for these steps until it has sent that again; that others took it stays known.

        Returns:
            The last step that is over; None: there is none yet. The team begins after it.

        Raises:
            StoreError: it has begun more often.
        """
        known = self._starts.get(team, 0)
        if number < known:
            raise StoreError(f"team {team!r} has begun again {known} times, and this is restart {number}")
        if number > known:
            self.decisions += 1
            self._starts[team] = number
            for state in self._steps.values():
                state.done = {worker for worker in state.done if worker[0] != team}
                for key, sent in state.sent_by_key.items():
                    if self._handovers[key].giver == team:
                        sent.givers, sent.refs = set(), {}
        return self._finished

    def starts(self, team: str) -> int:
        """Return how often this team was restarted."""
        return self._starts.get(team, 0)

    def queues(self) -> dict[str, int]:
        """Groups that have been given and not been taken, by `NODE/TEAM`: what the node wrote, and who takes it.

        Of a step that its node gives in several handovers to a team, the one counts of which most are left. Where
        groups come as they get ready, also those that are `under_way`, and those that are `ready` and in no step yet.
        """
        found = {f"{one.node}/{taker}": 0 for one in self._handovers.values() for taker in one.takers}
        for state in self._steps.values():
            left: dict[str, int] = {}
            for key, sent in state.sent_by_key.items():
                one = self._handovers[key]
                for taker in one.takers:
                    name, count = f"{one.node}/{taker}", len(sent.refs.keys() - sent.taken.get(taker, set()))
                    left[name] = max(left.get(name, 0), count)
            for name, count in left.items():
                found[name] += count
        if self._flow is not None:
            found["under_way"], found["ready"] = self._flow.counts
        return found

    # -- samples that come as they get ready ---------------------------------------------------------------------------

    def open_flow(self, step: int, number: int, begun: Sequence[tuple[int, int]], again: Sequence[int]) -> list[int]:
        """See `Flow.open`; `begun`: pairs of number and version.

        Raises:
            StoreError: it is open.
        """
        flow = self._need_flow()
        self._asked = max(self._asked, step)
        try:
            return flow.open(step, number, dict(begun), again)
        except ValueError as error:
            raise StoreError(str(error)) from error

    def swap(
        self,
        team: str,
        rank: int,
        finished: Sequence[Finished],
        refs: Mapping[str, Sequence[Any]],
        useless: Sequence[int],
        version: int,
        most: int,
    ) -> tuple[list[int], list[Topic]]:
        """Take finished groups with all that is handed over of them, and let others begin; see `Flow`.

        Returns the numbers of the prompts that may be generated, and what is complete.

        Args:
            refs: by key of handover: one for each group.
            useless: prompts whose samples no step is to be trained on.
            version: of the weights that other groups may begin with.
            most: how many of them.

        Raises:
            StoreError: it does not fit what the run's teams hand over, or the prompts that have been handed out.
        """
        flow = self._need_flow()
        at = f"prompts {[*(one.number for one in finished), *useless][:4]} of team {team!r} rank {rank}"
        if finished and ({one.key for one in self._flows} != refs.keys() or team != self._drawer):
            raise StoreError(f"{at}: found {sorted(refs)}; the run hands over {[one.key for one in self._flows]}")
        if not all(len(finished) == len(some) for some in refs.values()):
            raise StoreError(f"{at}: {len(finished)} groups, and not as many payloads")
        try:
            for place, (number, info, metrics) in enumerate(finished):
                flow.finish(number, info, {key: some[place] for key, some in refs.items()}, metrics)
            for number in useless:
                flow.reject(number)
            numbers = flow.admit(version, most) if most else []
        except ValueError as error:
            raise StoreError(f"{at}: {error}") from error
        return numbers, self._form()

    def drained(self, version: int) -> bool:
        """See `Flow.drained`."""
        return self._need_flow().drained(version)

    def flow_state(self) -> dict[str, Any]:
        """Return where prompts stand: `next`, the number of the first one that nobody has generated (None: it is not
        open), and `again`, earlier ones that are to be generated again."""
        flow = self._need_flow()
        return {"next": flow.next, "again": list(flow.again)}

    def unused(self, step: int) -> list[FlowGroup]:
        """Finished groups that no step until `step` is of, as far as a later one is not over."""
        later = [group for number, state in self._steps.items() if number > step for group in state.formed]
        return [*later, *self._need_flow().finished]

    def _form_until(self, step: int) -> None:
        """Somebody asks for the samples of `step`; nobody who has asked before waits for what is formed by that."""
        if self._flow is not None and step > self._asked:
            self.decisions += 1
            self._asked = step
            self._form()

    def _form(self) -> list[Topic]:
        """Form the steps that have been asked for, as far as there are groups; returns what is complete by that."""
        flow, topics = self._need_flow(), list[Topic]()
        while flow.step < self._asked and (chosen := self._choose()) is not None:
            state = self._steps.setdefault(flow.step, _Step())
            state.formed = chosen
            infos = [group.info._replace(ordinal=k) for k, group in enumerate(chosen) if group.info is not None]
            for one in self._flows:
                state.groups[one.samples] = {info.uid: info for info in infos}
                state.ordinals[one.samples] = {info.ordinal: info.uid for info in infos}
                refs = {info.uid: group.refs[one.key] for info, group in zip(infos, chosen, strict=True)}
                state.sent_by_key[one.key] = _Sent(set(range(self._parts[one.giver])), refs)
                topics += [("handover", flow.step, one.key), ("samples", flow.step, one.samples)]
            metrics = Metrics()  # of all groups together: this is kept for many steps
            for group in chosen:
                if group.metrics is not None:
                    metrics.merge(Metrics.from_json(json.loads(group.metrics)))
            told = {"groups": [group.number for group in chosen], "metrics": [metrics.to_json()]}
            topics += self.post(f"{FORMED}/{flow.step}", json.dumps(told))
        return topics

    def _choose(self) -> list[FlowGroup] | None:
        try:
            return self._need_flow().form()
        except PolicyError as error:
            raise StoreError(f"async.order: {error}") from error

    def _need_flow(self) -> Flow:
        if self._flow is None:
            raise StoreError("groups come step by step in this run (async.order=in_order)")
        return self._flow

    # -- mail --------------------------------------------------------------------------------------------------------

    def post(self, name: str, value: Any, again: bool = False) -> list[Topic]:
        """Keep a value under a name; returns what has come by that.

        Names that differ in a number at their end, `weights/7`, are a series, of which the last few are kept. Where a
        team that began again posts something `again`, what it posted before stays.

        Raises:
            StoreError: the name is or was taken.
        """
        if name in self._mail or self._is_forgotten(name):
            if again:
                return []
            raise StoreError(f"mail {name!r} has been posted before")
        self._mail[name] = value
        series, number = _series(name)
        if number is not None:
            numbers = self._series.setdefault(series, [])
            numbers.append(number)
            if len(numbers) > KEPT:
                del self._mail[f"{series}/{numbers.pop(0)}"]
        return [("mail", name)]

    def arrive(self, team: str, rank: int, name: str) -> list[Topic]:
        """Note that a replica of `team` has come so far: when all have, there is mail under `name`. Idempotent."""
        if name in self._mail or self._is_forgotten(name):
            return []
        workers = self._arrived.setdefault(name, set())
        workers.add((team, rank))
        if len(workers) < self._parts[team]:
            return []
        del self._arrived[name]
        return self.post(name, json.dumps(True))

    def read(self, name: str) -> tuple[Any] | None:
        """Return the value under a name, or None.

        Raises:
            StoreError: it is of a series that has gone on since.
        """
        if self._is_forgotten(name):
            raise StoreError(f"mail {name!r} is gone: the last {KEPT} of its series are kept")
        return (self._mail[name],) if name in self._mail else None

    def _is_forgotten(self, name: str) -> bool:
        series, number = _series(name)
        numbers = self._series.get(series, [])
        return number is not None and len(numbers) == KEPT and number < numbers[0]

    # ----------------------------------------------------------------------------------------------------------------

    def _known(self, key: str) -> Handover:
        if key not in self._handovers:
            raise StoreError(f"nothing is handed over as {key!r}; known: {', '.join(self._handovers) or 'nothing'}")
        return self._handovers[key]

    def _is_complete(self, handover: Handover, sent: _Sent) -> bool:
        return len(sent.givers) == self._parts[handover.giver]

    def _is_finished(self, step: int) -> bool:
        return self._finished is not None and step <= self._finished


def _series(name: str) -> tuple[str, int | None]:
    """`weights/7` is number 7 of `weights`."""
    series, _, number = name.rpartition("/")
    return (series, int(number)) if series and number.isdecimal() else (name, None)


Share: TypeAlias = Literal["dealt", "tokens"]


def shared(groups: Iterable[GroupInfo], parts: int, share: Share, cuts: Sequence[int] = ()) -> list[list[GroupInfo]]:
    """Groups of each of `parts` parts, by rising ordinal; `cuts`: where mini-batches begin that are shared by tokens.

    >>> from megarl.disaggregated.buffer.core import GroupInfo
    >>> groups = [GroupInfo(uid, k, (uid,), tokens) for k, (uid, tokens) in enumerate(zip("abcd", [9, 1, 9, 1]))]
    >>> [[g.uid for g in part] for share in ("dealt", "tokens") for part in shared(groups, 2, share)]
    [['a', 'c'], ['b', 'd'], ['a', 'b'], ['c', 'd']]
    """
    ordered = sorted(groups, key=lambda group: group.ordinal)
    if share == "dealt":
        dealt: list[list[GroupInfo]] = [[] for _ in range(parts)]
        for group in ordered:
            dealt[group.ordinal % parts].append(group)
        return dealt
    from megarl.data.balance import share_groups

    sets = share_groups([group.tokens for group in ordered], parts, cuts)
    return [[ordered[place] for place in places] for places in sets]
