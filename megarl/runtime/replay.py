"""Trained groups that later steps train on again: `data.replay`.

    groups of a step --advantages--> [drawn from the store, by all replicas alike] --> update
          '--------------------------> stored: samples, log-probs, versions, advantages of the original group

Each replica stores the groups that it trained on. Which groups a step draws follows from the list of all of them, so it
does not depend on how many replicas there are.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from megarl.config.data import ReplayConfig
from megarl.data.batch import Batch
from megarl.data.groups import ORDINAL, group_numbers, group_places
from megarl.data.versions import VERSION_FIELDS
from megarl.data.weighted_draw import weighted_draw
from megarl.system.errors import count

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from megarl.runtime.context import StepContext


class StoredGroup(NamedTuple):
    """A stored group in the list that all replicas share; entries sort by age."""

    step: int  # step that trained on the fresh group
    number: int  # number of the group in that step
    version: int  # oldest weights that generated one of its tokens
    signal: float  # mean absolute advantage of its trained tokens


@dataclass
class ReplayStore:
    """This replica's stored groups, oldest first. `joined` is collective over the replicas."""

    settings: ReplayConfig
    groups: list[tuple[StoredGroup, Batch]] = field(default_factory=list)

    def joined(self, c: StepContext, fresh: Batch) -> Batch:
        """Return the step's samples with this replica's replayed ones after them, and store the fresh groups.

        Stored groups that are too old, have other fields, or exceed the capacity are dropped.
        """
        settings, layout = self.settings, c.layout
        places = group_places(fresh["uid"])
        numbers = group_numbers(fresh, places, layout.dp_rank, layout.dp_size)
        named = dict(zip((fresh["uid"][group[0]] for group in places), numbers, strict=True))
        fresh = fresh.with_values({ORDINAL: [named[uid] for uid in fresh["uid"]]})
        oldest = c.step - 1 - settings.max_age
        self._drop_unlike(c, fresh)
        self.groups = [group for group in self.groups if group[0].version >= oldest]
        self._store(c, fresh, places, numbers)
        shares = c.layout.dp_group.all_gather_json([list(entry) for entry, _ in self.groups])
        everywhere = sorted(StoredGroup(*values) for share in shares for values in share)
        drawn = self._drawn(c, [entry for entry in everywhere if entry.step < c.step])
        order = {entry: c.config.data.batch_size + place for place, entry in enumerate(drawn)}
        replayed = [
            batch.with_values(
                {ORDINAL: [order[entry]] * len(batch), "uid": [f"{uid}@{c.step}" for uid in batch["uid"]]}
            )
            for entry, batch in self.groups
            if entry in order
        ]
        surplus = {*everywhere[: -settings.capacity]}
        self.groups = [group for group in self.groups if group[0] not in surplus]
        self._record(c, drawn, replayed)
        return Batch.concat([fresh, *replayed])

    def to_bytes(self) -> bytes:
        """Return the stored groups for a checkpoint; there is at least one."""
        rows = [batch.with_values({"replay": [list(entry)] * len(batch)}) for entry, batch in self.groups]
        return Batch.concat(rows).to_bytes()

    def load(self, parts: Sequence[bytes], part: int, count: int) -> None:
        """Take share `part` of `count` of the groups that all replicas stored in `parts`."""
        groups = []
        for batch in map(Batch.from_bytes, parts):
            entries = [StoredGroup(*values) for values in batch["replay"]]
            rest = batch.drop(["replay"])
            for entry in sorted(set(entries)):
                groups.append((entry, rest.select([place for place, other in enumerate(entries) if other == entry])))
        self.groups = sorted(groups, key=lambda group: group[0])[part::count]

    def _drawn(self, c: StepContext, entries: Sequence[StoredGroup]) -> list[StoredGroup]:
        """Return the entries that the step trains on again, drawn without replacement by priority."""
        settings = self.settings
        wanted = settings.groups(c.config.data.batch_size)
        weights = {
            "uniform": [1.0] * len(entries),
            "recent": [1.0 / (c.step - entry.step) for entry in entries],
            "signal": [entry.signal for entry in entries],
        }[settings.priority]
        generator = np.random.Generator(np.random.PCG64(c.seeds.replay(c.step)))
        return sorted(entries[place] for place in weighted_draw(weights, wanted, generator))

    def _drop_unlike(self, c: StepContext, fresh: Batch) -> None:
        """Drop groups whose fields are not those of the fresh samples: a run with other settings stored them."""
        present = {*fresh.names()} - {ORDINAL}
        unlike = [batch for _, batch in self.groups if {*batch.names()} != present]
        if unlike and c.layout.is_lead:
            differ = ", ".join(sorted({*unlike[0].names()} ^ present))
            dropped = f"{count(len(unlike), 'stored group')} of a run with other settings dropped"
            print(f"replay: {dropped}; fields that only they or only new samples have: {differ}", flush=True)
        self.groups = [group for group in self.groups if {*group[1].names()} == present]

    def _store(self, c: StepContext, fresh: Batch, places: Sequence[Sequence[int]], numbers: Sequence[int]) -> None:
        """Store those new groups that give a gradient: their advantages are not all 0.

        Args:
            places: for each group, its rows in `fresh`.
            numbers: the number of each group's prompt.
        """
        stored = fresh.drop([ORDINAL]).to("cpu")
        versions = stored[VERSION_FIELDS[0]].unbind()
        for number, group in zip(numbers, places, strict=True):
            rows = stored.select(list(group))
            values = rows["advantages"].values[rows["response_mask"].values].double().abs()
            signal = float(values.mean()) if len(values) else 0.0
            if signal > 0:  # a group whose advantages are all 0 would give no gradient
                version = min(int(versions[place].min()) for place in group)
                self.groups.append((StoredGroup(c.step, number, version, signal), rows))

    def _record(self, c: StepContext, drawn: Sequence[StoredGroup], replayed: Sequence[Batch]) -> None:
        c.metrics.sum("replay/stored", len(self.groups) if c.layout.is_lead else 0)
        if c.layout.rank == 0:
            c.metrics.max("replay/groups", len(drawn))
            if drawn:
                c.metrics.mean("replay/age", sum(c.step - 1 - entry.version for entry in drawn), len(drawn))
                c.metrics.mean("replay/signal", sum(entry.signal for entry in drawn), len(drawn))
        for batch in replayed:
            c.metrics.mean("replay/score/mean", float(batch["score"].double().sum()), len(batch))
        c.metrics.sum("replay/samples", sum(map(len, replayed)))


def replay_file(c: StepContext) -> dict[str, bytes]:
    """Return this replica's stored groups as {file name: content}; empty except on its first rank."""
    if c.replay is None or not c.replay.groups or not c.layout.is_lead:
        return {}
    return {_name(c.layout.dp_rank): c.replay.to_bytes()}


def load_replay(c: StepContext, folder: Path, saved: Mapping[str, Any] | None) -> None:
    """Take this replica's share of the groups in the checkpoint `folder`; none if they have another temperature.

    Args:
        saved: result of `replay_entry` in the checkpoint; None: a run without replay wrote it.
    """
    if c.replay is None or saved is None:
        return
    if saved["temperature"] != c.temperature:
        if c.layout.rank == 0:
            temperatures = f"temperature {saved['temperature']:g}, not {c.temperature:g}"
            print(f"replay begins empty: the stored groups were generated with {temperatures}", flush=True)
        return
    files = [folder / _name(part) for part in range(saved["parts"])]
    c.replay.load([file.read_bytes() for file in files if file.exists()], c.layout.dp_rank, c.layout.dp_size)


def replay_entry(c: StepContext) -> dict[str, Any] | None:
    """Describe the stored groups for `state.json` of a checkpoint; None without replay."""
    return None if c.replay is None else {"parts": c.layout.dp_size, "temperature": c.temperature}


def _name(part: int) -> str:
    return f"replay_{part}.safetensors"
