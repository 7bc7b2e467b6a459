"""Join what several nodes made of the same samples."""

from __future__ import annotations

import torch

from megarl.data.batch import Batch, Jagged


def merge(outputs: dict[str, Batch]) -> Batch:
    """Union of the fields of the producers' batches, whose samples must be the same and in the same order.

    A field that several producers hand on is fine as long as it is the same, bit for bit.

    Args:
        outputs: batch by id of the node that made it; at least one.

    Raises:
        ValueError: other samples, or two values under one name; the message names both producers.
    """
    producers = list(outputs)
    union = outputs[producers[0]].copy()
    origin = dict.fromkeys(union.names(), producers[0])
    for producer in producers[1:]:
        batch = outputs[producer]
        if batch is outputs[producers[0]]:
            continue
        _check_samples(producers[0], outputs[producers[0]], producer, batch)
        for name in batch.names():
            if name not in union:
                union.set(name, batch[name])
                origin[name] = producer
            elif not _same(union[name], batch[name]):
                raise ValueError(
                    f"nodes {origin[name]!r} and {producer!r} hand on different values of {name!r}; let one of them "
                    "depend on the other, or give the fields different names"
                )
    return union


def _check_samples(first: str, mine: Batch, second: str, other: Batch) -> None:
    counts = f"{len(mine)} and {len(other)}"
    if len(mine) != len(other):
        raise ValueError(f"nodes {first!r} and {second!r} hand on different samples ({counts} of them)")
    if "sample_id" in mine and "sample_id" in other and mine["sample_id"] != other["sample_id"]:
        place = next(i for i, (a, b) in enumerate(zip(mine["sample_id"], other["sample_id"], strict=True)) if a != b)
        raise ValueError(
            f"nodes {first!r} and {second!r} hand on different samples: number {place} is "
            f"{mine['sample_id'][place]!r} and {other['sample_id'][place]!r}"
        )


def _same(a: torch.Tensor | Jagged | list, b: torch.Tensor | Jagged | list) -> bool:
    if isinstance(a, Jagged) and isinstance(b, Jagged):
        return _same_tensor(a.offsets, b.offsets) and _same_tensor(a.values, b.values)
    if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor):
        return _same_tensor(a, b)
    # repr: NaN inside a column is unequal to itself unless it is the same object.
    return a is b or (type(a) is type(b) and (a == b or repr(a) == repr(b)))


def _same_tensor(a: torch.Tensor, b: torch.Tensor) -> bool:
    if a.shape != b.shape or a.dtype != b.dtype or a.device != b.device:
        return False
    if a.data_ptr() == b.data_ptr() and a.stride() == b.stride():
        return True
    if torch.equal(a, b):
        return True
    return a.is_floating_point() and bool(((a == b) | (a.isnan() & b.isnan())).all())
