"""Generation with the weights of some steps ago, which is what asynchronous training has to live with."""

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
    """The parameters of `lag` versions ago, on which an embedded engine can decode.

    Copies of the parameters are kept in host memory, one for each of the last `lag` versions; the first versions of a
    run are generated with the oldest there is. Copies are taken when generation begins, so every version that trains
    must generate.

    >>> # with stale.installed(): engine.generate(...)     # completions carry the old version
    """

    def __init__(self, chunks: Sequence[PolicyModel], engine: EmbeddedEngine, lag: int) -> None:
        self._copies = ParameterCopies(chunks)
        self._engine = engine
        self._kept: deque[tuple[int, list[Tensor]]] = deque(maxlen=lag + 1)

    @contextlib.contextmanager
    def installed(self) -> Iterator[None]:
        """Make the engine's parameters and version the old ones inside the block, and the current ones again after it.

        Raises:
            ConfigError: the run was resumed: what older versions were is not in a checkpoint.
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
