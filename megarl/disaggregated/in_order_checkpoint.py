"""The part of a checkpoint with samples of steps that are not trained yet (`async.order=in_order`).

When step t is trained, the weights that generated step t + 1 are gone, so it could not be generated again. A checkpoint
holds the samples and metrics that the team handed over for later steps. Each replica writes its groups; in a run that
resumes, group k goes to replica k modulo the number of replicas:

    generated_0.safetensors    uid, sample_id, number and tokens of the group, fields as node/field; one row per sample
    generated_0.json           metrics of generating the step
    generated_0_2...           the same for step t + 2, if generation runs two steps ahead

Older versions named the files drawn_0 and so on; these are read, too.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from megarl.data.batch import Batch
from megarl.data.groups import group_places
from megarl.disaggregated.buffer.channel import SentSamples, merge_handovers, split_handovers
from megarl.disaggregated.buffer.core import GroupInfo
from megarl.system.metrics import Metrics

if TYPE_CHECKING:
    from megarl.dag.placement import Handover
    from megarl.training.parallel import Layout

_NUMBER, _TOKENS = "group_number", "group_tokens"
_PREFIX = "generated_"


@dataclass(frozen=True)
class BufferedStep:
    """The samples of a step that this rank's replica generated.

    Attributes:
        given: the samples that the replica's first rank handed over, by key of handover; empty on other ranks.
        metrics: this rank's metrics of generating the step.
    """

    given: Mapping[str, SentSamples]
    metrics: Metrics
    step: int

    def files(self, layout: Layout, saved: int) -> dict[str, bytes]:
        """Return this replica's files for the checkpoint of step `saved`, by name; empty except on its first rank."""
        if not layout.is_lead:
            return {}
        batch = merge_handovers({key: sent.samples for key, sent in self.given.items()})
        number, tokens = (torch.zeros(len(batch), dtype=torch.int64) for _ in range(2))
        groups = next(iter(self.given.values())).groups  # all handovers have the same groups
        for group, where in zip(groups, group_places(batch["uid"]), strict=True):
            number[where], tokens[where] = group.ordinal, group.tokens
        batch.set(_NUMBER, number)
        batch.set(_TOKENS, tokens)
        stem = _stem(layout.dp_rank, self.step - saved)
        return {f"{stem}.safetensors": batch.to_bytes(), f"{stem}.json": json.dumps(self.metrics.to_json()).encode()}


def files_ahead(layout: Layout, version: int, generated: Iterable[BufferedStep]) -> dict[str, bytes]:
    """Return the files with samples of later steps for the checkpoint of step `version`, by name."""
    files: dict[str, bytes] = {}
    for buffered in generated:
        files |= buffered.files(layout, version)
    return files


def read_buffered_step(
    folder: Path, saved: int, step: int, parts: int, layout: Layout, handovers: Sequence[Handover]
) -> BufferedStep:
    """Read this replica's share of the samples of `step`, which `parts` replicas wrote into a checkpoint.

    Args:
        folder: the checkpoint.
        saved: step of the checkpoint.
        handovers: the handovers of this replica's team.
    """
    stems, metrics = [_stem(part, step - saved) for part in range(parts)], Metrics()
    if not layout.is_lead:
        return BufferedStep({}, metrics, step)
    if not (folder / f"{stems[0]}.json").is_file():
        stems = [stem.replace(_PREFIX, "drawn_") for stem in stems]
    for part in range(layout.dp_rank, parts, layout.dp_size):
        metrics.merge(Metrics.from_json(json.loads((folder / f"{stems[part]}.json").read_text())))
    whole = Batch.concat([Batch.from_bytes((folder / f"{stem}.safetensors").read_bytes()) for stem in stems])
    numbers, tokens = whole[_NUMBER].tolist(), whole[_TOKENS].tolist()
    share = [group for group in group_places(whole["uid"]) if numbers[group[0]] % layout.dp_size == layout.dp_rank]
    share.sort(key=lambda group: numbers[group[0]])
    groups = []
    for group in share:
        first, ids = group[0], tuple(whole["sample_id"][place] for place in group)
        groups.append(GroupInfo(whole["uid"][first], numbers[first], ids, tokens[first]))
    samples = split_handovers(whole.select([place for group in share for place in group]), handovers)
    given = {handover.key: SentSamples(handover.node, groups, samples[handover.key]) for handover in handovers}
    return BufferedStep(given, metrics, step)


def _stem(part: int, ahead: int) -> str:
    """Return the name without suffix of replica `part`'s files, `ahead` steps after the checkpoint's step."""
    return f"{_PREFIX}{part}" if ahead == 1 else f"{_PREFIX}{part}_{ahead}"
