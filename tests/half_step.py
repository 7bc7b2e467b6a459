"""Policies of a user: groups begin at most half a step ahead of training, whatever k allows; and one that hangs."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from megarl.dag.staleness import AsReady, ByVersion


class HalfStep(AsReady):
    """Younger samples than k asks for, and fewer of them in the buffer."""

    def may_begin(self, version: int) -> int:
        """Those of the steps until `version` + 1, and half a step more."""
        return min(super().may_begin(version), (version + 1) * self.groups + self.groups // 2)


#: As `async.order` names it.
HALF_STEP = f"{Path(__file__).resolve()}:HalfStep"


class WaitsAtStep(AsReady):
    """Waits for ever at one step that no check before the start looks at."""

    def forms_step(self, step: int, under_way: ByVersion, finished: ByVersion) -> Sequence[int] | None:
        """None at step 9."""
        return None if step == 9 else super().forms_step(step, under_way, finished)


#: As `async.order` names it.
WAITS_AT_STEP = f"{Path(__file__).resolve()}:WaitsAtStep"
