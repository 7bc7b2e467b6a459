"""The settings of a recipe that cannot do with images, asked before a run and again when the model is loaded."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from megarl.config.model import ParallelConfig
from megarl.errors import ConfigError

if TYPE_CHECKING:
    from megarl.config.run import RunConfig


def image_problems(config: RunConfig, layouts: Iterable[ParallelConfig]) -> list[ConfigError]:
    """Return what keeps a vision-language model from this recipe; `layouts`: of its teams."""
    found = []
    if any(layout.cp > 1 for layout in layouts):
        found.append(
            ConfigError(
                "images are not split over context-parallel ranks",
                where="actor.parallel.cp",
                found="above 1",
                allowed="1",
                fix="use tp or pp for long sequences",
            )
        )
    return found
