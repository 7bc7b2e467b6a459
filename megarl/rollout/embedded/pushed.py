"""Generation with weights that another team trains and pushes here, version by version."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from megarl.rollout.embedded.engine import EmbeddedEngine
    from megarl.rollout.embedded.inbox import WeightInbox


class PushedWeights:
    """The weights that an embedded engine generates with: one version, from one `follow` to the next.

    Args:
        deadline_s: deadline in seconds of the wait for a version that was pushed.

    >>> # pushed.follow(4)                 # the trainer has pushed its weights after step 4
    >>> # with pushed.held(): engine.generate(...)
    """

    def __init__(self, engine: EmbeddedEngine, inbox: WeightInbox, deadline_s: float) -> None:
        self._engine, self._inbox, self._deadline_s = engine, inbox, deadline_s
        self._version = 0

    def follow(self, version: int) -> None:
        """Draw with `version` from here on, which is there, or comes within the deadline. Collective over the engine.

        Raises:
            WorkerError: it did not come.
        """
        self._version = version
        with self.held():
            self._engine.weight_version = version

    @contextlib.contextmanager
    def held(self) -> Iterator[None]:
        """Keep the parameters those of the followed version as long as the block runs. Collective.

        Raises:
            WorkerError: they are not.
        """
        with self._inbox.generating(self._deadline_s, version=self._version):
            yield

    def close(self) -> None:
        """Take no more weights."""
        self._inbox.close()
