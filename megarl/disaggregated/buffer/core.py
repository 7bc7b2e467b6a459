"""The state of the buffer: the groups of samples of each step, which replica gets which, and where their bytes are.

    giver                     core                                              taker
    give(step, key, groups)   groups of the step -> parts of every team    <-     assignment(step, samples, part)
      one reference to bytes  handover key -> references by group          <-     fetch(step, key, uids)
      per group               all workers of all takers are done -> free   <-     done(step)

A step is stored from its first samples until the last worker of its last taker is done with it; then only its number
is kept. With `async.order=as_ready` groups do not arrive step by step: buffer.flow collects finished groups, and forms
the samples of a step when a taker first requests them.

A team whose processes died continues with the step after the last finished one. All samples that it took since are
still in the buffer. The samples that it gave since are dropped, and the restarted team gives them again.

No method waits: a request whose data is missing returns None, and a call that changes the state returns the topics that
became complete (`Change`). Bytes never pass through this module; a reference to them may be any object.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple, TypeAlias

from megarl.dag.messages import StepFormed
from megarl.dag.placement import Handover, Placement
from megarl.dag.stage import Role
from megarl.dag.staleness import PolicyError, StalenessSettings
from megarl.disaggregated.buffer.flow import Finished, Flow, FlowGroup
from megarl.system.errors import MegarlError, count
from megarl.system.metrics import Metrics

#: Topics that workers wait for: ("handover", step, key), ("samples", step, node) or ("mail", name).
Topic: TypeAlias = tuple[Any, ...]


class Change(NamedTuple):
    """The result of a call that changes the buffer's state: the reply to the caller, and the topics that are complete
    now, so that calls which wait for them return."""

    answer: Any = None
    topics: Sequence[Topic] = ()


#: Number of messages that are kept per series; no reader is that many steps late.
KEPT = 64
#: The fix of an error after which the run can continue from a checkpoint.
RUN_AGAIN = "\n  fix:     run the command again with this run's --run-dir, which continues from the newest checkpoint"
_REPORT = f"{RUN_AGAIN}; if the error returns, report it with the files of the run folder"


class HandoverError(MegarlError):
    """Samples or messages between teams do not match, or did not arrive; the error names data, team and rank."""


class GroupInfo(NamedTuple):
    """The description of a group of samples, without their bytes.

    Attributes:
        ordinal: the number of the group among the groups of its step.
        sample_ids: ids of its samples, in order.
        tokens: number of tokens of all its samples, prompts included.
    """

    uid: str
    ordinal: int
    sample_ids: tuple[str, ...]
    tokens: int


@dataclass
class _Sent:
    """The groups that were sent for one handover in one step."""

    # One number per replica that sent its groups: the rank that called `give`. With as_ready no rank may call it for
    # these groups; the buffer itself fills this set, with the replicas' numbers.
    givers: set[int] = field(default_factory=set)
    refs: dict[str, Any] = field(default_factory=dict)  # reference to the bytes of each group, by uid
    fetched: dict[str, set[str]] = field(default_factory=dict)  # uids that each team has fetched


@dataclass
class _Step:
    sent_by_key: dict[str, _Sent] = field(default_factory=dict)
    #: groups by the node that generated the samples, then by uid
    groups: dict[str, dict[str, GroupInfo]] = field(default_factory=dict)
    ordinals: dict[str, dict[int, str]] = field(default_factory=dict)
    #: groups of each replica of a receiving team, by the node that generated the samples and the team
    parts: dict[tuple[str, str], list[list[GroupInfo]]] = field(default_factory=dict)
    done: set[tuple[str, int]] = field(default_factory=set)
    #: groups that were chosen for this step (async.order=as_ready)
    formed: list[FlowGroup] = field(default_factory=list)


class Core:
    """The state of the buffer of one run.

    Args:
        placement: the teams, and the fields that they hand over to each other.
        groups_per_step: largest number of groups of a step.
        share: how the replicas of a team share groups. dealt: group k goes to replica k modulo the number of replicas,
            as inside one team. tokens: each replica gets the same number of groups of every mini-batch, with tokens as
            even as possible.
        flow: settings for forming steps of finished groups; None: groups arrive step by step.
    """

    def __init__(
        self, placement: Placement, groups_per_step: int, share: Share, flow: StalenessSettings | None = None
    ) -> None:
        self._limit, self._share = groups_per_step, share
        self._handovers: dict[str, Handover] = {handover.key: handover for handover in placement.handovers}
        self._parts = {team.name: team.replicas for team in placement.teams}
        self._cuts = {team.name: team.cuts for team in placement.teams}
        taking = {name for handover in placement.handovers for name in handover.takers}
        self._takers = {
            (team.name, rank) for team in placement.teams if team.name in taking for rank in range(team.devices)
        }
        self._flow = None if flow is None else Flow(flow)
        rollout = placement.of_role(Role.ROLLOUT)
        self._generator = None if rollout is None else rollout.name  # the team that generates samples
        self._flows = () if flow is None or rollout is None else tuple(placement.given_by(rollout.name))
        self._asked = 0  # the last step whose samples were requested
        self._steps: dict[int, _Step] = {}
        self._finished: int | None = None
        self._starts: dict[str, int] = {}  # number of restarts of each team that was restarted
        self._mail: dict[str, str] = {}
        # numbers of the kept messages of each series (messages that differ only in a number), in order of arrival
        self._series: dict[str, list[int]] = {}
        # the first workers of the replicas that have called `arrive` for a message, by its name, until it is posted
        self._arrived: dict[str, set[tuple[str, int]]] = {}

    # -- samples -----------------------------------------------------------------------------------------------------

    def give(
        self, team: str, rank: int, step: int, key: str, groups: Sequence[GroupInfo], refs: Sequence[Any]
    ) -> Change:
        """Record the groups that one replica hands over in one call.

        Raises:
            HandoverError: this team does not hand over these groups, or has handed them over before. No group is
                recorded.
        """
        handover = self._known(key)
        at = f"handover {key!r} of step {step}, from team {team!r} rank {rank}"
        self._check_giver(handover, team, at)
        state = self._steps.get(step) or _Step()
        sent = state.sent_by_key.get(key) or _Sent()
        if self._is_finished(step):
            readers = ", ".join(handover.takers)
            raise HandoverError(
                f"{at}: these samples come too late, because all teams that read them ({readers}) have finished the "
                f"step{_REPORT}"
            )
        known = state.groups.get(handover.samples, {})
        if rank in sent.givers:
            raise HandoverError(f"{at}: this rank has already handed over its groups{_REPORT}")
        ranks = ", ".join(map(str, sorted(sent.givers)))
        if len(sent.givers) == self._parts[team]:
            raise HandoverError(
                f"{at}: the team has {count(self._parts[team], 'replica')}, and each of them has already handed over "
                f"its groups (ranks: {ranks}){_REPORT}"
            )
        ordinals = state.ordinals.get(handover.samples, {})
        for group in groups:
            if group.uid in sent.refs:
                raise HandoverError(
                    f"{at}: group {group.uid!r} was already handed over by one of the ranks {ranks}{_REPORT}"
                )
            if known.get(group.uid, group) != group:
                raise HandoverError(
                    f"{at}: group {group.uid!r} differs from the one that an earlier call handed over\n"
                    f"  found:   {group}\n  allowed: {known[group.uid]}{_REPORT}"
                )
            other = ordinals.get(group.ordinal, group.uid)
            if other != group.uid:
                both = f"groups {group.uid!r} and {other!r} both have the number {group.ordinal}"
                raise HandoverError(f"{at}: {both}{_REPORT}")
        new = {group.uid: group for group in groups}
        numbers = {group.ordinal: group.uid for group in groups}
        if not len(groups) == len(new) == len(numbers) == len(refs):
            counts = f"{len(new)} names, {len(numbers)} numbers and {len(refs)} payloads"
            raise HandoverError(f"{at}: {len(groups)} groups have {counts}; every group needs one of each{_REPORT}")
        if len(known) + sum(uid not in known for uid in new) > self._limit:
            raise HandoverError(f"{at}: a step has at most {self._limit} groups (data.batch_size){_REPORT}")
        self._steps[step], state.sent_by_key[key] = state, sent
        state.groups.setdefault(handover.samples, {}).update(new)
        state.ordinals.setdefault(handover.samples, {}).update(numbers)
        sent.givers.add(rank)
        sent.refs.update(zip(new, refs, strict=True))
        if not self._is_complete(handover, sent):
            return Change()
        return Change(topics=[("handover", step, key), ("samples", step, handover.samples)])

    def assignment(self, team: str, step: int, samples: str, part: int) -> list[GroupInfo] | None:
        """Return one replica's groups of the samples that node `samples` generated; None: some are missing.

        Raises:
            HandoverError: the team has no replica number `part`.
        """
        if not 0 <= part < self._parts[team]:
            raise HandoverError(
                f"step {step}: team {team!r} has {self._parts[team]} replicas, so it has no replica {part}{_REPORT}"
            )
        self._form_until(step)
        state = self._steps.get(step)
        if state is None or not any(
            self._handovers[key].samples == samples and self._is_complete(self._handovers[key], sent)
            for key, sent in state.sent_by_key.items()
        ):
            return None
        if (samples, team) not in state.parts:
            state.parts[samples, team] = shared(
                state.groups[samples].values(), self._parts[team], self._share, self._cuts[team]
            )
        return state.parts[samples, team][part]

    def fetch(self, team: str, step: int, key: str, uids: Sequence[str]) -> list[Any] | None:
        """Return references to the bytes of the groups `uids`, in order, and count the groups as fetched by `team`.

        Return None if some replicas have not handed over their groups yet. Without `uids` the result is one arbitrary
        group, from which a replica without groups reads the names and types of the fields.

        Raises:
            HandoverError: a group is missing although all replicas have handed over their groups.
        """
        handover = self._known(key)
        self._form_until(step)
        state = self._steps.get(step)
        sent = None if state is None else state.sent_by_key.get(key)
        if sent is None or not self._is_complete(handover, sent):
            return None
        if not sent.refs:
            raise HandoverError(
                f"handover {key!r} of step {step}: team {handover.giver!r} has handed over no groups{_REPORT}"
            )
        missing = [uid for uid in uids if uid not in sent.refs]
        if missing:
            raise HandoverError(
                f"handover {key!r} of step {step}: group {missing[0]!r} is not one of the {len(sent.refs)} groups that "
                f"team {handover.giver!r} has handed over{_REPORT}"
            )
        sent.fetched.setdefault(team, set()).update(uids)
        return [sent.refs[uid] for uid in uids] or [next(iter(sent.refs.values()))]

    def done(self, team: str, rank: int | None, step: int) -> Change:
        """Record that worker `rank` (None: every worker of the team) needs no more samples of `step`. Drop the step
        when all workers that read it are done."""
        workers = [taker for taker in self._takers if taker[0] == team and rank in (None, taker[1])]
        if self._is_finished(step) or not workers:
            return Change()
        state = self._steps.setdefault(step, _Step())
        state.done.update(workers)
        if len(state.done) == len(self._takers):
            del self._steps[step]
            self._finished = step if self._finished is None else max(step, self._finished)
        return Change()

    def restart_team(self, team: str, number: int) -> int | None:
        """Prepare for restart `number` of a team, which will repeat its work for all unfinished steps.

        Groups that it sent for these steps are hidden until it sends them again. It stays recorded which of them other
        teams have taken.

        Returns:
            The last finished step, after which the team continues; None: no step is finished.

        Raises:
            HandoverError: a later restart was announced before.
        """
        known = self._starts.get(team, 0)
        if number < known:
            raise HandoverError(
                f"team {team!r} has already been restarted {known} times; its restart {number} is outdated{_REPORT}"
            )
        if number > known:
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
        """Count the groups that a node has handed over and a team has not fetched yet, by `NODE/TEAM`.

        If a node hands over several times to a team in one step, the handover with the most groups left counts. With
        as_ready the result also has `under_way` (groups in flight) and `ready` (finished groups in no step yet).
        """
        waiting = {f"{given.node}/{taker}": 0 for given in self._handovers.values() for taker in given.takers}
        for state in self._steps.values():
            left: dict[str, int] = {}
            for key, sent in state.sent_by_key.items():
                handover = self._handovers[key]
                for taker in handover.takers:
                    name, count = f"{handover.node}/{taker}", len(sent.refs.keys() - sent.fetched.get(taker, set()))
                    left[name] = max(left.get(name, 0), count)
            for name, count in left.items():
                waiting[name] += count
        if self._flow is not None:
            waiting["under_way"], waiting["ready"] = self._flow.counts
        return waiting

    # -- groups that are handed over when they are finished ------------------------------------------------------

    def open_flow(self, step: int, number: int, begun: Sequence[tuple[int, int]], again: Sequence[int]) -> Change:
        """Open the flow of groups, and return the result of `Flow.open`.

        Args:
            begun: pairs of a group's number and its weight version.

        Raises:
            HandoverError: the flow is open.
        """
        flow = self._need_flow()
        self._asked = max(self._asked, step)
        try:
            return Change(flow.open(step, number, dict(begun), again))
        except ValueError as error:
            raise HandoverError(str(error)) from error

    def swap(
        self,
        team: str,
        rank: int,
        finished: Sequence[Finished],
        refs: Mapping[str, Sequence[Any]],
        rejected: Sequence[int],
        version: int,
        most: int,
    ) -> Change:
        """Record finished groups and admit new ones; the answer has the numbers of the prompts to generate.

        Args:
            refs: by key of handover, a reference to the bytes of each finished group.
            rejected: in-flight groups whose samples no step will be trained on; other groups may begin in their place.
            version: version of the weights with which the admitted groups begin.
            most: how many groups to admit; fewer are admitted if the others must wait for a newer version.

        Raises:
            HandoverError: this team does not hand over these groups, or they are not in flight.
        """
        flow = self._need_flow()
        at = f"prompts {[*(group.number for group in finished), *rejected][:4]} of team {team!r} rank {rank}"
        keys = [handover.key for handover in self._flows]
        if finished and ({*keys} != refs.keys() or team != self._generator):
            raise HandoverError(
                f"{at}: this call hands over {sorted(refs)}; expected: team {self._generator!r} hands over "
                f"{keys}{_REPORT}"
            )
        if not all(len(finished) == len(some) for some in refs.values()):
            raise HandoverError(
                f"{at}: every handover must have one payload for each of the {len(finished)} groups{_REPORT}"
            )
        try:
            for place, (number, info, metrics) in enumerate(finished):
                flow.finish(number, info, {key: some[place] for key, some in refs.items()}, metrics)
            for number in rejected:
                flow.reject(number)
            numbers = flow.admit(version, most) if most else []
        except ValueError as error:
            raise HandoverError(f"{at}: the call does not fit the state of the buffer: {error}{_REPORT}") from error
        return Change(numbers, self._form())

    def drained(self, version: int) -> bool:
        """Return whether no group is in flight, and none may be admitted with `version` of the weights."""
        return self._need_flow().drained(version)

    def flow_state(self) -> dict[str, Any]:
        """Return the position in the sequence of prompts.

        `next` is the number of the first prompt that was never admitted (None: the flow is not open); `again` lists
        earlier prompts that must be generated again.
        """
        flow = self._need_flow()
        return {"next": flow.next, "again": list(flow.again)}

    def unused(self, step: int) -> list[FlowGroup]:
        """Return the finished groups that belong to no step up to `step`: to a later step, or to no step yet."""
        later = [group for number, state in self._steps.items() if number > step for group in state.formed]
        return [*later, *self._need_flow().finished]

    def _form_until(self, step: int) -> None:
        """Note that the samples of `step` are requested, and choose the groups of the steps up to `step` for which
        enough groups are finished. Without async.order=as_ready there is nothing to choose.
        """
        if self._flow is not None and step > self._asked:
            self._asked = step
            self._form()

    def _form(self) -> list[Topic]:
        """Choose the groups of each requested step for which enough groups are finished.

        Returns:
            The topics that callers wait for and that have an answer now.
        """
        flow, topics = self._need_flow(), list[Topic]()
        while flow.step < self._asked:
            try:
                chosen = flow.form()
            except PolicyError as error:
                raise HandoverError(f"async.order: {error}") from error
            if chosen is None:
                break
            state = self._steps.setdefault(flow.step, _Step())
            state.formed = chosen
            infos = [group.info._replace(ordinal=k) for k, group in enumerate(chosen) if group.info is not None]
            for given in self._flows:
                state.groups[given.samples] = {info.uid: info for info in infos}
                state.ordinals[given.samples] = {info.ordinal: info.uid for info in infos}
                refs = {info.uid: group.refs[given.key] for info, group in zip(infos, chosen, strict=True)}
                state.sent_by_key[given.key] = _Sent(set(range(self._parts[given.giver])), refs)
                topics += [("handover", flow.step, given.key), ("samples", flow.step, given.samples)]
            metrics = Metrics()  # merged now, so that the message, which is kept for many steps, is small
            for group in chosen:
                if group.metrics is not None:
                    metrics.merge(Metrics.from_json(json.loads(group.metrics)))
            formed = StepFormed(flow.step, metrics.to_json())
            topics += self.post(formed.name, formed.encode()).topics
        return topics

    def _need_flow(self) -> Flow:
        if self._flow is None:
            raise HandoverError(
                f"this run hands over groups step by step (async.order=in_order), not one by one{_REPORT}"
            )
        return self._flow

    # -- mail --------------------------------------------------------------------------------------------------------

    def post(self, name: str, text: str, again: bool = False) -> Change:
        """Store a message under a new name.

        Names that differ in a number at their end, `weights/7`, are a series, of which the last `KEPT` are kept. If a
        restarted team posts a message `again`, the first one stays.

        Raises:
            HandoverError: a message has been posted under this name.
        """
        if name in self._mail or self._is_forgotten(name):
            if again:
                return Change()
            raise HandoverError(f"the message {name!r} has already been posted{_REPORT}")
        self._mail[name] = text
        series, number = _series(name)
        if number is not None:
            numbers = self._series.setdefault(series, [])
            numbers.append(number)
            if len(numbers) > KEPT:
                del self._mail[f"{series}/{numbers.pop(0)}"]
        return Change(topics=[("mail", name)])

    def arrive(self, team: str, rank: int, name: str, text: str) -> Change:
        """Record that a replica of `team` has arrived at a message; post the message when all replicas have arrived.

        Every replica passes the same `text`. Repeated calls do nothing.
        """
        if name in self._mail or self._is_forgotten(name):
            return Change()
        workers = self._arrived.setdefault(name, set())
        workers.add((team, rank))
        if len(workers) < self._parts[team]:
            return Change()
        del self._arrived[name]
        return self.post(name, text)

    def read(self, name: str) -> str | None:
        """Return the text of the message with this name; None: it has not been posted.

        Raises:
            HandoverError: the message was dropped because newer messages of its series arrived.
        """
        if self._is_forgotten(name):
            raise HandoverError(
                f"the message {name!r} has been dropped: only the last {KEPT} messages of a series are kept, and more "
                f"have arrived since{_REPORT}"
            )
        return self._mail.get(name)

    def is_posted(self, name: str) -> bool:
        """Return whether a message is posted under this name."""
        return self.read(name) is not None

    def _is_forgotten(self, name: str) -> bool:
        series, number = _series(name)
        numbers = self._series.get(series, [])
        return number is not None and len(numbers) == KEPT and number < numbers[0]

    # ----------------------------------------------------------------------------------------------------------------

    def _known(self, key: str) -> Handover:
        if key not in self._handovers:
            raise HandoverError(
                f"this run has no handover {key!r}; allowed: {', '.join(self._handovers) or 'none'}{_REPORT}"
            )
        return self._handovers[key]

    def _check_giver(self, handover: Handover, team: str, at: str) -> None:
        """Raise HandoverError if the team may not hand over groups of a step in one call; `at` begins the message."""
        if handover.giver != team:
            raise HandoverError(f"{at}: only team {handover.giver!r} may hand over these samples{_REPORT}")
        if handover in self._flows:
            raise HandoverError(
                f"{at}: this run hands over these groups one by one when they are finished (async.order is not "
                f"in_order), not step by step{_REPORT}"
            )

    def _is_complete(self, handover: Handover, sent: _Sent) -> bool:
        return len(sent.givers) == self._parts[handover.giver]

    def _is_finished(self, step: int) -> bool:
        return self._finished is not None and step <= self._finished


def _series(name: str) -> tuple[str, int | None]:
    """Split a name such as `weights/7` into series and number; the number is None for other names."""
    series, _, number = name.rpartition("/")
    return (series, int(number)) if series and number.isdecimal() else (name, None)


Share: TypeAlias = Literal["dealt", "tokens"]


def shared(groups: Iterable[GroupInfo], parts: int, share: Share, cuts: Sequence[int] = ()) -> list[list[GroupInfo]]:
    """Return the groups of each of `parts` replicas in ascending order; see `Core` for `share`.

    Args:
        cuts: numbers of the groups at which mini-batches begin, except the first; for `tokens`.

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
