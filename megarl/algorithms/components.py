"""All components by the section of a recipe that chooses them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from megarl.algorithms.advantages import ADVANTAGES
from megarl.algorithms.losses import POLICY_LOSSES
from megarl.algorithms.registry import Registry, Settings
from megarl.errors import UserError

REGISTRIES: Mapping[str, Registry[Any]] = {"algorithm.advantage": ADVANTAGES, "algorithm.loss": POLICY_LOSSES}


class _Registered:
    """`megarl.config.components.Components` of the registries."""

    def names(self, path: str) -> Sequence[str]:
        return REGISTRIES[path].names()

    def settings_of(self, path: str, name: str) -> type[Settings] | None:
        try:
            return REGISTRIES[path].spec(name).settings
        except UserError:
            return None

    def readers(self, path: str, key: str) -> Mapping[str, type[Settings]]:
        return REGISTRIES[path].readers(key)


COMPONENTS = _Registered()
