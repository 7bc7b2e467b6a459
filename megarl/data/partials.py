"""Partial trajectories of prompt groups in a checkpoint: JSON, and the images' patches in a file of their own."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

from safetensors.torch import load, save
from torch import Tensor

from megarl.data.trajectory import Trajectory


def partials_to_json(partials: Mapping[int, Sequence[Trajectory]]) -> dict[str, list[dict[str, Any]]]:
    """Return the unfinished trajectories of prompt groups, by the group's number, as JSON values without the pixels of
    their images."""
    return {str(number): [trajectory.to_json() for trajectory in group] for number, group in partials.items()}


def patches_of(groups: Iterable[Sequence[Trajectory]]) -> bytes | None:
    """Return a safetensors file with the patches of all images of the trajectories, each image once; None if there are
    no images."""
    patches: dict[int, Tensor] = {}  # patches by digest, because samples of a group share images
    for trajectory in chain.from_iterable(groups):
        for images in (lane.images for lane in trajectory.all_lanes):
            if images is not None:
                patches.update(zip(images.digests, images.parts(), strict=True))
    return save({str(key): patch.contiguous() for key, patch in patches.items()}) if patches else None


def partials_from_json(content: Mapping[str, Sequence[dict[str, Any]]], images: Path) -> dict[int, list[Trajectory]]:
    """Return the unfinished trajectories of prompt groups, by the group's number.

    Args:
        content: the result of `partials_to_json`.
        images: the file with the result of `patches_of`; it does not exist if there were no images.
    """
    patches = {int(key): patch for key, patch in load(images.read_bytes()).items()} if images.is_file() else {}
    return {
        int(number): [Trajectory.from_json(trajectory, patches) for trajectory in group]
        for number, group in content.items()
    }
