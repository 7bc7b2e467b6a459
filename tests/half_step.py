"""A policy of a user: groups begin at most half a step ahead of training, whatever k allows."""

from __future__ import annotations

from pathlib import Path

from megarl.staleness import AsReady


class HalfStep(AsReady):
    """Younger samples than k asks for, and fewer of them in the buffer."""

    def may_begin(self, version: int) -> int:
        """Those of the steps until `version` + 1, and half a step more."""
        return min(super().may_begin(version), (version + 1) * self.groups + self.groups // 2)


#: As `async.order` names it.
HALF_STEP = f"{Path(__file__).resolve()}:HalfStep"
