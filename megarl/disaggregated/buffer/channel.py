"""Data exchange around the nodes of a team: fetch fields of other teams before a node, hand over its fields after it.

Samples travel group by group, so that takers do not depend on the giver's layout; groups for the same replicas share
blocks of bytes. A batch of samples belongs to the node that generated it (`Inputs.samples`). If another team runs this
node, the buffer assigns groups to this replica; all further fields are fetched for these groups only, and joined to
their samples.
"""

from __future__ import annotations

import json
import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import TYPE_CHECKING, Any

from megarl.dag.node import Node
from megarl.data.batch import Batch
from megarl.data.groups import ORDINAL, group_places, tokens_of
from megarl.disaggregated.buffer.core import GroupInfo, HandoverError
from megarl.disaggregated.buffer.flow import Finished
from megarl.system.metrics import Metrics
from megarl.system.tracing import phase

if TYPE_CHECKING:
    from megarl.dag.graph import TaskGraph
    from megarl.dag.placement import Handover, Placement
    from megarl.data.wire import Span
    from megarl.disaggregated.buffer.client import BufferClient


#: Fields sent with every handover, which identify the samples.
NAMES = ("uid", "sample_id")


@dataclass(frozen=True)
class SentSamples:
    """The groups that a rank sent for one handover of a step, and their samples, which have only the fields it sent."""

    node: str
    groups: list[GroupInfo]
    samples: Batch


class TeamChannel:
    """The channel of a rank in a team that works step by step; implements `megarl.dag.executor.Channel`.

    It records in `context.metrics` the GB (10^9 bytes) that this rank handed over (`store/given_gb`) and read
    (`store/read_gb`). Ranks do not communicate with each other for this.

    Args:
        replica: number of this worker's replica.
        is_lead: whether this worker hands over the samples of its replica.
        keeps: whether to keep the samples that were handed over in `given`.
        dealt: whether `placement.share` assigns groups to replicas by their numbers.
        stays: keep the samples of a step in the buffer until `done` is called, not just until the last node has run,
            because the team repeats the step if its process dies before.

    Attributes:
        given: samples handed over in the last step, by handover key; empty unless the channel `keeps` them.
        tokens: number of tokens of all samples that its replica has worked on, prompts included.
    """

    def __init__(
        self,
        graph: TaskGraph,
        placement: Placement,
        client: BufferClient,
        replica: int,
        is_lead: bool,
        *,
        keeps: bool = False,
        dealt: bool = False,
        stays: bool = False,
    ) -> None:
        self._graph, self._placement, self._client = graph, placement, client
        self._replica, self._is_lead, self._keeps, self._dealt = replica, is_lead, keeps, dealt
        self._stays = stays
        self._team = placement[client.team]
        self._taken: set[str] = set()
        self._samples: str | None = None  # node that generated the samples of the batch; None: the batch has prompts
        self._groups: list[GroupInfo] | None = None  # groups of the batch; None: not determined yet
        self.given: dict[str, SentSamples] = {}
        self.tokens = 0

    def take(self, context: Any, node: Node, batch: Batch | None) -> Batch | None:
        """Wait for the fields that `node` uses from other teams, and return `batch` with them.

        A field that its writer did not write in this step is missing.

        Raises:
            HandoverError: a field does not arrive, or its samples are not those of the batch.
        """
        if node.id == self._team.nodes[0]:
            self._taken, self._samples, self._groups, self.given = set(), None, None, {}
        inputs = self._graph.inputs(node.id)
        for handover in self._placement.taken(self._team.name):
            if handover.key in self._taken or handover.node not in {inputs.sources.get(f) for f in handover.fields}:
                continue
            with phase("take"):
                if handover.samples != self._samples:
                    batch, self._samples = None, handover.samples
                    with phase("wait", waits_for=self._placement.of_node(handover.samples).name):
                        self._groups = self._client.assignment(context.step, handover.samples, self._replica)
                batch = self._receive(context, handover, batch)
            self._taken.add(handover.key)
        assert inputs.samples == self._samples, "every team gets the groups that its nodes use"
        return batch

    def give(self, context: Any, node: Node, batch: Batch) -> None:
        """Hand over the fields of `node` that other teams use.

        After the team's last node the step is marked done, unless `stays` is set.

        Raises:
            HandoverError: a column cannot be sent, or the buffer refuses it.
        """
        if node.declared.resamples:
            self._samples, self._groups = node.id, None
        if self._is_lead:
            for handover in self._placement.given(node.id):
                with phase("give"):
                    self._send(context, handover, batch)
        if node.id == self._team.nodes[-1]:
            self.tokens += sum(group.tokens for group in self._held(batch))
            if not self._stays:
                self._client.done(context.step)

    def done(self, step: int) -> None:
        """Let the buffer drop the samples of `step`, if the channel `stays` (otherwise it has dropped them already).
        Call this when other teams have received everything of the step."""
        if self._stays:
            self._client.done(step)

    def give_again(self, step: int, given: Mapping[str, SentSamples]) -> None:
        """Hand over samples of `step` that were generated before a restart. Only for teams that take nothing.

        Raises:
            HandoverError: the buffer refuses the samples.
        """
        takers = {handover.key: handover.takers for handover in self._placement.given_by(self._team.name)}
        for key, sent in given.items():
            together = self._together(takers[key], sent.groups)
            payloads = sent.samples.to_blocks(group_places(sent.samples["uid"]), together)
            self._client.give(step, key, sent.groups, payloads)
        self._client.done(step)

    # ----------------------------------------------------------------------------------------------------------------

    def _receive(self, context: Any, handover: Handover, batch: Batch | None) -> Batch:
        """Return `batch` with the fields of `handover`, or a new batch if there is none yet."""
        groups = self._held(batch)
        with phase("wait", waits_for=handover.giver):
            payloads = self._client.fetch(context.step, handover.key, [group.uid for group in groups])
        context.metrics.sum("store/read_gb", sum(map(len, {payload.block for payload in payloads})) / 1e9)
        try:
            received = Batch.from_blocks(payloads)
        except ValueError as error:
            raise self._wrong(context, handover, str(error)) from error
        # A replica without groups fetches a group of another replica, only for the names and dtypes of its fields.
        if not groups:
            received = received.select([])
        ids = list(chain.from_iterable(group.sample_ids for group in groups))
        if received["sample_id"] != ids:
            pairs = zip(received["sample_id"], ids, strict=False)
            place = next((place for place, (sample_id, expected) in enumerate(pairs) if sample_id != expected), None)
            place = min(len(received), len(ids)) if place is None else place
            problem = (
                f"this replica needs {len(ids)} samples, but received {len(received)} others, different from number "
                f"{place} on: found {received['sample_id'][place : place + 1]}, expected {ids[place : place + 1]}"
            )
            raise self._wrong(context, handover, problem)
        if batch is None:
            received.set(ORDINAL, [group.ordinal for group in groups for _ in group.sample_ids])
            return received
        places = list(chain.from_iterable(group_places(batch["uid"])))
        if places != list(range(len(batch))):  # the samples of a group may be anywhere in a batch
            received = received.select(sorted(range(len(places)), key=places.__getitem__))
        for name in received.names():
            batch.set(name, received[name])
        return batch

    def _send(self, context: Any, handover: Handover, batch: Batch) -> None:
        groups = self._held(batch)
        sent = outgoing(handover, batch)
        places = group_places(batch["uid"])
        try:
            payloads = sent.to_blocks(places, self._together(handover.takers, groups))
            size = self._client.give(context.step, handover.key, groups, payloads)
        except ValueError as error:  # a column has values that cannot be sent
            raise self._wrong(context, handover, str(error)) from error
        context.metrics.sum("store/given_gb", size / 1e9)
        if self._keeps:
            self.given[handover.key] = SentSamples(handover.node, groups, sent)

    def _together(self, takers: Sequence[str], groups: Sequence[GroupInfo]) -> list[int]:
        """Return a label per group, equal for groups that go to the same replica of every receiving team `takers`.

        Groups of one label may be sent as one block. Empty if each group needs its own block, because it is not known
        yet which replica gets it.
        """
        parts = math.lcm(*(self._placement[name].replicas for name in takers))
        return [group.ordinal % parts for group in groups] if self._dealt or parts == 1 else []

    def _held(self, batch: Batch | None) -> list[GroupInfo]:
        """Return the groups of the batch, from the buffer or from the samples that this team generated."""
        if self._groups is None:
            assert batch is not None, "without a batch the groups come from the buffer"
            self._groups = groups_of(batch, self._replica, self._team.replicas)
        return self._groups

    def _wrong(self, context: Any, handover: Handover, problem: str) -> HandoverError:
        return HandoverError(
            f"step {context.step}, {handover.key!r} ({', '.join(handover.fields)}), team {self._team.name!r} "
            f"replica {self._replica}: {problem}"
        )


def outgoing(handover: Handover, batch: Batch) -> Batch:
    """Return the part of a batch that `handover` sends: its fields and the ids of the samples, on the CPU."""
    keep = {*handover.fields, *NAMES}
    return batch.drop([name for name in batch.names() if name not in keep]).to("cpu")


def groups_of(batch: Batch, replica: int = 0, replicas: int = 1) -> list[GroupInfo]:
    """Return the groups of a batch with the numbers that its column ORDINAL holds.

    Without this column, group i of replica r gets number i * `replicas` + r, as prompts are dealt to replicas in turn.
    """
    tokens, ids = tokens_of(batch), batch["sample_id"]
    return [
        GroupInfo(
            batch["uid"][places[0]],
            batch[ORDINAL][places[0]] if ORDINAL in batch else number * replicas + replica,
            tuple(ids[place] for place in places),
            sum(tokens[place] for place in places),
        )
        for number, places in enumerate(group_places(batch["uid"]))
    ]


@dataclass(frozen=True)
class FinishedGroups:
    """Some finished groups of an as_ready run.

    Attributes:
        numbers: numbers of their prompts.
        samples: the fields to send for all their samples, in order, by handover key.
        metrics: metrics of these samples, which count with the first group.
    """

    numbers: list[int]
    groups: list[GroupInfo]
    samples: dict[str, Batch]
    metrics: Metrics

    def select(self, numbers: Sequence[int]) -> FinishedGroups:
        """Return only the groups with these prompt numbers. The metrics count with the first group of `self`, so they
        are empty without it."""
        places = [self.numbers.index(number) for number in numbers]

        samples = {}
        for key, batch in self.samples.items():
            rows = group_places(batch["uid"])
            samples[key] = batch.select(list(chain.from_iterable(rows[place] for place in places)))
        metrics = self.metrics if self.numbers[0] in numbers else Metrics()
        return FinishedGroups(list(numbers), [self.groups[place] for place in places], samples, metrics)


class GroupChannel:
    """The channel of a rank in a rollout team with `async.order=as_ready`; implements `megarl.dag.executor.Channel`.

    It records in `context.metrics` the GB (10^9 bytes) that this rank handed over (`store/given_gb`). Ranks do not
    communicate with each other for this.

    Args:
        is_lead: whether this worker hands over the samples of its replica.

    Attributes:
        aside: fields that other teams will read, of the samples that the nodes are working on, by handover key.
        tokens: number of tokens of all collected samples, prompts included.
    """

    def __init__(self, placement: Placement, client: BufferClient, is_lead: bool) -> None:
        self._placement, self._client, self._is_lead = placement, client, is_lead
        self.aside: dict[str, Batch] = {}
        self.tokens = 0

    def take(self, context: Any, node: Node, batch: Batch | None) -> Batch | None:
        """Return `batch`, since other teams send nothing to a rollout team."""
        return batch

    def give(self, context: Any, node: Node, batch: Batch) -> None:
        """Keep the fields of `node` that other teams use."""
        if self._is_lead:
            for handover in self._placement.given(node.id):
                self.aside[handover.key] = outgoing(handover, batch)

    def collect(self, numbers: Sequence[int], batch: Batch, metrics: Metrics) -> FinishedGroups | None:
        """Return the groups of `batch`, one per prompt in `numbers`, with the fields set aside for other teams.

        Ranks other than the replica's lead return None.
        """
        if not self._is_lead:
            return None
        groups = groups_of(batch)
        self.tokens += sum(group.tokens for group in groups)
        aside, self.aside = self.aside, {}
        return FinishedGroups(list(numbers), groups, aside, metrics)

    def swap(
        self, context: Any, ready: Sequence[FinishedGroups], rejected: Sequence[int], version: int, most: int
    ) -> list[int]:
        """Hand over finished groups, and return the numbers of prompts to generate; see `BufferClient.swap`.

        Raises:
            HandoverError: a column cannot be sent, or the buffer refuses it.
        """
        finished: list[Finished] = []
        blocks: defaultdict[str, list[Span]] = defaultdict(list)
        for groups in ready:
            metrics = [json.dumps(groups.metrics.to_json()), *[None] * (len(groups.numbers) - 1)]
            finished += map(Finished, groups.numbers, groups.groups, metrics)
            for key, batch in groups.samples.items():
                try:
                    blocks[key] += batch.to_blocks(group_places(batch["uid"]))
                except ValueError as error:  # a column has values that cannot be sent
                    raise HandoverError(f"samples of prompts {groups.numbers[:4]} cannot be sent: {error}") from error
        numbers, size = self._client.swap(finished, blocks, rejected, version, most)
        context.metrics.sum("store/given_gb", size / 1e9)
        return numbers


def unused_groups(
    client: BufferClient, step: int, part: int, parts: int
) -> tuple[list[FinishedGroups], dict[int, int]]:
    """Return the finished groups that no step up to `step` uses, and their weight versions by prompt number; of
    `parts` shares of these groups only number `part`."""
    finished, versions = [], {}
    for group in sorted(client.unused(step, part, parts), key=lambda group: group.number):
        assert group.info is not None, "the group is finished"
        samples = {key: Batch.from_blocks([span]) for key, span in group.refs.items()}
        metrics = Metrics() if group.metrics is None else Metrics.from_json(json.loads(group.metrics))
        finished.append(FinishedGroups([group.number], [group.info], samples, metrics))
        versions[group.number] = group.version
    return finished, versions


def merge_handovers(given: Mapping[str, Batch]) -> Batch:
    """Return one batch with the ids of the samples and all fields that were handed over.

    Args:
        given: the batch of each handover, by its key; at least one, all with the same samples in the same order.
    """
    batch: Batch | None = None
    for key, samples in given.items():
        node, _, _ = key.partition(">")  # the key has the form of `Handover.key`
        if batch is None:
            batch = Batch(columns={name: samples[name] for name in NAMES}, size=len(samples))
        for name in samples.names():
            if name not in NAMES:
                batch.set(_place(node, name), samples[name])
    assert batch is not None, "other teams use every generated sample"
    return batch


def split_handovers(batch: Batch, handovers: Sequence[Handover]) -> dict[str, Batch]:
    """Split a batch of `merge_handovers` into the batches of the handovers, by key."""
    ids = batch.drop([name for name in batch.names() if name not in NAMES])
    given = {handover.key: ids.copy() for handover in handovers}
    for handover in handovers:
        for name in handover.fields:
            if (place := _place(handover.node, name)) in batch:  # an optional field may not have been written
                given[handover.key].set(name, batch[place])
    return given


def _place(node: str, name: str) -> str:
    return f"{node}/{name}"
