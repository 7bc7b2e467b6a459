"""The groups of a batch: samples that answer the same prompt.

Samples with one `uid` are a group, of any number of samples. A group lies whole on one replica, from its generation to
the update; its samples may stand anywhere in the batch. Whatever counts prompts counts groups, in the order of their
first samples:

    uid          a b a c b b
    groups       a: 0 2 | b: 1 4 5 | c: 3
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from megarl.data.batch import Batch

T = TypeVar("T")

#: Column: number of a sample's group among those of the step. Where it is missing, group k of replica r of d is number
#: k * d + r, as the loader shares prompts round-robin.
ORDINAL = "ordinal"


def group_numbers(samples: Batch, groups: Sequence[Sequence[int]], replica: int, replicas: int) -> list[int]:
    """Return, for each of a replica's `groups` (from `group_places`), its number among all groups of the step."""
    if ORDINAL in samples:
        numbers = samples[ORDINAL]
        return [int(numbers[places[0]]) for places in groups]
    return [k * replicas + replica for k in range(len(groups))]


def group_places(uid: Sequence[Hashable]) -> list[list[int]]:
    """Return the positions of the samples of each group, groups in the order of their first samples.

    >>> group_places(["a", "b", "a", "c", "b", "b"])
    [[0, 2], [1, 4, 5], [3]]
    """
    places: dict[Hashable, list[int]] = {}
    for place, name in enumerate(uid):
        places.setdefault(name, []).append(place)
    return list(places.values())


def by_group(uid: Sequence[Hashable], values: Sequence[T]) -> list[list[T]]:
    """Return the values of samples, group by group.

    >>> by_group(["a", "b", "a"], [1, 2, 3])
    [[1, 3], [2]]
    """
    return [[values[place] for place in places] for places in group_places(uid)]


def tokens_of(batch: Batch, *, share: bool = False) -> Sequence[int]:
    """Return the number of prompt and response tokens of every sample; with `share`, the tokens of equal prompts in a
    group count for the first of their samples only."""
    from megarl.data.batch import Jagged

    parts = [batch[name] for name in ("prompt_ids", "response_ids") if name in batch]
    lengths = [part.lengths.tolist() for part in parts if isinstance(part, Jagged)]
    if share and len(lengths) == len(parts) == 2:
        prompts = [row.numpy().tobytes() for row in parts[0].to("cpu").unbind()]
        for places in group_places([*zip(batch["uid"], prompts, strict=True)]):
            for place in places[1:]:
                lengths[0][place] = 0
    return [sum(pair) for pair in zip(*lengths, strict=True)] if lengths else [0] * len(batch)
