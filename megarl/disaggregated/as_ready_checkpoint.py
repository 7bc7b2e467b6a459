"""The part of a checkpoint that holds groups on which no step was trained (`async.order=as_ready`).

Each replica writes its groups; a run that resumes distributes them over its replicas by the numbers of their prompts:

    flow_0.safetensors    finished groups: their number, uid, sample_id, fields as node/field; one row per sample
    flow_0.json           weight versions of all groups by number; ids and metrics of finished groups; partial
                          trajectories of the others; prompts to be generated again; metrics of rejected groups
    flow_0_images.safetensors    patches of the images of partial trajectories, each image once; missing without images
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from megarl.data.batch import Batch
from megarl.data.groups import group_places
from megarl.data.partials import partials_from_json, partials_to_json, patches_of
from megarl.data.trajectory import Trajectory
from megarl.disaggregated.buffer.channel import FinishedGroups, merge_handovers, split_handovers, unused_groups
from megarl.disaggregated.buffer.core import GroupInfo
from megarl.system.metrics import Metrics

if TYPE_CHECKING:
    from megarl.dag.placement import Handover
    from megarl.runtime.rank_state import RankState
    from megarl.training.parallel import Layout

_NUMBER = "group_number"


def files_of_flow(
    c: RankState,
    version: int,
    in_flight: Mapping[int, int],
    partials: Mapping[int, Sequence[Trajectory]],
    carried: Metrics,
) -> dict[str, bytes]:
    """Return this rank's files for the checkpoint of step `version`, by name.

    Finished groups are read from the buffer. No group may have begun with the weights of `version`.

    Args:
        in_flight: weight versions of the groups that are not finished, by number.
        partials: partial trajectories of groups in flight, by number.
        carried: metrics of rejected groups, which count with the next finished group.
    """
    buffer, layout = c.buffer, c.layout
    if not layout.is_lead:
        return {}
    ready, versions = unused_groups(buffer, version, layout.dp_rank, layout.dp_size)
    again = buffer.flow_state()["again"] if layout.rank == 0 else []
    return flow_files(layout, ready, {**versions, **in_flight}, partials, again, carried)


def flow_files(
    layout: Layout,
    ready: Sequence[FinishedGroups],
    versions: Mapping[int, int],
    partials: Mapping[int, Sequence[Trajectory]],
    again: Sequence[int],
    carried: Metrics,
) -> dict[str, bytes]:
    """Return this replica's checkpoint files by name; empty on all ranks except the replica's first.

    Args:
        ready: finished groups.
        versions: version of the weights that generated the first tokens of each group, by number.
        partials: partial trajectories of groups in flight, by number.
        again: numbers of prompts to generate again that are not in flight; empty except on the team's first rank.
        carried: metrics of rejected groups, which count with the next finished group.
    """
    if not layout.is_lead:
        return {}
    content = {
        "versions": {str(number): version for number, version in versions.items()},
        "finished": [
            {"numbers": groups.numbers, "groups": groups.groups, "metrics": groups.metrics.to_json()}
            for groups in ready
        ],
        "drafts": partials_to_json(partials),
        "again": list(again),
        "carried": carried.to_json(),
    }
    files = {f"{_stem(layout.dp_rank)}.json": json.dumps(content).encode()}
    if ready:
        files[f"{_stem(layout.dp_rank)}.safetensors"] = Batch.concat(list(map(_batch, ready))).to_bytes()
    if (patches := patches_of(partials.values())) is not None:
        files[_images_file(layout.dp_rank)] = patches
    return files


def _images_file(part: int) -> str:
    return f"{_stem(part)}_images.safetensors"


def _batch(ready: FinishedGroups) -> Batch:
    """Return the samples of all groups as one batch, with all handed-over fields and each sample's group number."""
    batch = merge_handovers(ready.samples)
    number = torch.zeros(len(batch), dtype=torch.int64)
    for group_number, places in zip(ready.numbers, group_places(batch["uid"]), strict=True):
        number[places] = group_number
    batch.set(_NUMBER, number)
    return batch


@dataclass(frozen=True)
class BufferedGroups:
    """The groups that all replicas wrote into a checkpoint.

    Attributes:
        versions: version of the weights that generated the first tokens of each group, by number.
        finished: fields of the `GroupInfo`, and the metrics, of finished groups, by number.
        partials: partial trajectories of the other groups, by number.
        again: numbers of prompts that must be generated again and were not in flight.
        carried: metrics of rejected groups, which count with the next finished group.
    """

    versions: dict[int, int]
    finished: dict[int, tuple[list[Any], dict[str, Any]]]
    partials: dict[int, list[Trajectory]]
    again: list[int]
    carried: Metrics
    _batch: Batch | None

    def share_of(self, rank: int, size: int, without: Collection[int]) -> list[int]:
        """Return the numbers of the groups that replica `rank` of `size` continues, leaving out those in `without`."""
        return [number for number in sorted(self.versions) if number not in without][rank::size]

    def finished_of(self, numbers: Iterable[int], handovers: Sequence[Handover]) -> list[FinishedGroups]:
        """Return those groups of `numbers` that are finished, with the fields that `handovers` pass between teams."""
        groups = []
        for number in numbers:
            if number not in self.finished:
                continue
            assert self._batch is not None, "a finished group has samples"
            (uid, ordinal, ids, tokens), metrics = self.finished[number]
            rows = (self._batch[_NUMBER] == number).nonzero().flatten().tolist()
            info = GroupInfo(uid, ordinal, tuple(ids), tokens)
            samples = split_handovers(self._batch.select(rows), handovers)
            groups.append(FinishedGroups([number], [info], samples, Metrics.from_json(metrics)))
        return groups


def read_buffered_groups(folder: Path, parts: int) -> BufferedGroups:
    """Read the groups that `parts` replicas wrote into a checkpoint."""
    versions: dict[int, int] = {}
    finished: dict[int, tuple[list[Any], dict[str, Any]]] = {}
    partials: dict[int, list[Trajectory]] = {}
    again: list[int] = []
    carried = Metrics()
    batches = []
    for part in range(parts):
        content = json.loads((folder / f"{_stem(part)}.json").read_text())
        versions |= {int(number): version for number, version in content["versions"].items()}
        partials |= partials_from_json(content["drafts"], folder / _images_file(part))
        again += content["again"]
        carried.merge(Metrics.from_json(content["carried"]))
        for groups in content["finished"]:
            for place, (number, info) in enumerate(zip(groups["numbers"], groups["groups"], strict=True)):
                finished[number] = info, {} if place else groups["metrics"]
        if content["finished"]:
            batches.append(Batch.from_bytes((folder / f"{_stem(part)}.safetensors").read_bytes()))
    batch = Batch.concat(batches) if batches else None
    return BufferedGroups(versions, finished, partials, again, carried, batch)


def _stem(part: int) -> str:
    return f"flow_{part}"
