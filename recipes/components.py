"""All component registries by the section of a recipe that chooses from them."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from megarl.algorithms.advantages import ADVANTAGES
from megarl.algorithms.group_filter import FILTERS
from megarl.algorithms.kl import KL
from megarl.algorithms.losses import POLICY_LOSSES
from megarl.algorithms.registry import Registry, Settings
from megarl.algorithms.resampling import RESAMPLING
from megarl.envs import registry as of_envs
from megarl.rewards import REWARDS
from megarl.rewards import preflight as of_rewards
from megarl.system.errors import UserError

REGISTRIES: Mapping[str, Registry[Any]] = {
    "algorithm.advantage": ADVANTAGES,
    "algorithm.loss": POLICY_LOSSES,
    "algorithm.kl": KL,
    "algorithm.distillation": KL,
    "algorithm.filter": FILTERS,
    "algorithm.resampling": RESAMPLING,
    "reward": REWARDS,
}


class _Registered:
    """Finds registered components and environments; implements `megarl.config.components.Components`."""

    def names(self, path: str) -> Sequence[str]:
        return REGISTRIES[path].names()

    def settings_of(self, path: str, name: str) -> type[Settings] | None:
        try:
            return REGISTRIES[path].spec(name).settings
        except UserError:
            return None

    def own_keys(self, path: str, name: str) -> Collection[str] | None:
        try:
            return (of_envs if path == "env" else of_rewards).find_own_keys(name)
        except UserError:
            return None

    def readers(self, path: str, key: str) -> Mapping[str, type[Settings]]:
        return REGISTRIES[path].readers(key)


COMPONENTS = _Registered()
