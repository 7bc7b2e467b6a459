"""The registry of engine families, by `rollout.engine`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from megarl.config.engines import KEY
from megarl.rollout.embedded.family import EmbeddedFamily
from megarl.rollout.sglang.family import SglangFamily
from megarl.system.imports import import_callable

if TYPE_CHECKING:
    from megarl.config.run import RunConfig
    from megarl.rollout.family import EngineFamily

FAMILIES: Mapping[str, EngineFamily] = {"embedded": EmbeddedFamily(), "sglang": SglangFamily()}


def family_of(config: RunConfig) -> EngineFamily:
    """Return the family of a recipe's engine: a built-in one, or a user's `file.py:Family`."""
    engine = config.rollout.engine
    if engine in FAMILIES:
        return FAMILIES[engine]
    family: EngineFamily = import_callable(engine, where=KEY)()
    return family
