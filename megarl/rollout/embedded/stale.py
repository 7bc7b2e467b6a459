"""Generation with weights of some steps ago, to simulate the off-policy steps of asynchronous training."""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from megarl.models.copies import ParameterCopies
from megarl.system.errors import ConfigError

if TYPE_CHECKING:
    from torch import Tensor

    from megarl.models.policy import PolicyModel
    from megarl.rollout.embedded.engine import EmbeddedEngine


class StaleWeights:
    """Lets an embedded engine generate with the parameters of `lag` weight versions ago.

    It keeps copies of the current and the last `lag` versions in host memory; the first steps of a run use the oldest
    copy. A copy is taken when generation begins, so every weight version must generate.

    >>> # with stale.installed(): engine.generate(...)     # completions carry the old version
    """

    def __init__(self, chunks: Sequence[PolicyModel], engine: EmbeddedEngine, lag: int) -> None:
        self._copies = ParameterCopies(chunks)
        self._engine = engine
        self._kept: deque[tuple[int, list[Tensor]]] = deque(maxlen=lag + 1)

    @contextlib.contextmanager
    def installed(self) -> Iterator[None]:
        """Generate with the parameters and version of an earlier step inside the block, and the current ones after it.

        Raises:
            ConfigError: the run was resumed; checkpoints do not contain older versions.
        """
        current = self._engine.weight_version
        if not self._kept and current > 0:
            raise ConfigError(
                "a run that generates with old weights cannot be resumed: checkpoints hold the newest weights only",
                where="rollout.stale_steps",
                found=f"resumed after step {current}",
                allowed="0 in a resumed run",
                fix="start in another run folder (or with trainer.resume=never), or set rollout.stale_steps=0",
            )
        if not self._kept or self._kept[-1][0] != current:
            self._kept.append((current, self._copies.take()))
        version, old = self._kept[0]
        if version == current:
            yield
            return
        self._install(version, old)
        try:
            yield
        finally:
            self._install(current, self._kept[-1][1])

    def _install(self, version: int, values: list[Tensor]) -> None:
        self._copies.put(values)
        self._engine.weight_version = version
