"""When a run has to save so as not to lose steps to the limit of its job (`trainer.save_by_s`)."""

from __future__ import annotations

import os
import time
from collections.abc import Callable

from megarl.processes import JOB_BEGAN

_SPARE = 1.1  # steps and saves that are to come, against the longest ones so far


class SaveBy:
    """Tells when the next step is not certain to be saved before the limit; that of one rank counts for all.

    Args:
        limit_s: seconds after the start of the job; None: never.
        now: unix time.
    """

    def __init__(self, limit_s: float | None, now: Callable[[], float] = time.time) -> None:
        self._now = now
        self._end = None if limit_s is None else float(os.environ.get(JOB_BEGAN) or now()) + limit_s
        self._last = now()
        self._longest_step = 0.0

    def steps_begin(self) -> None:
        """The time since the start of the process is that of no step."""
        self._last = self._now()

    def is_near(self, save_s: float) -> bool:
        """Asked once a step, when that is trained: has it to be saved, as the next one may come too late?

        Args:
            save_s: the longest save so far; 0: none, which then counts as long as a step.
        """
        now = self._now()
        self._longest_step, self._last = max(self._longest_step, now - self._last), now
        needed = self._longest_step + (save_s or self._longest_step)
        return self._end is not None and now + _SPARE * needed > self._end
