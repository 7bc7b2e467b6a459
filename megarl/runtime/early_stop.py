"""Early stopping of a run before `trainer.steps` (`trainer.early_stop`)."""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from megarl.system.errors import ConfigError, close_matches

if TYPE_CHECKING:
    from megarl.config.run import EarlyStopConfig


class EarlyStop:
    """Decides by one metric when to end the run early. Every rank of a team must pass the same metrics.

    A finite value that is better than the best so far by more than `min_delta` is an improvement.

    Args:
        settings: the recipe's section; None: no early stopping.
    """

    def __init__(self, settings: EarlyStopConfig | None) -> None:
        self._settings = settings
        self._best: float | None = None
        self._best_step = 0
        self._without = 0  # number of measurements since the last improvement

    def measures(self, *, validated: bool) -> bool:
        """Return whether a step measures the metric; `validated`: held-out prompts are evaluated after the step."""
        return self._settings is not None and (validated or not self._settings.metric.startswith("val/"))

    def may_end(self, *, validated: bool) -> bool:
        """Return whether the run may end early after the next step; `validated`: held-out prompts are evaluated."""
        settings = self._settings
        if settings is None or not self.measures(validated=validated):
            return False
        tired = settings.patience is not None and self._without + 1 >= settings.patience
        return settings.target is not None or tired

    def record(self, step: int, numbers: Mapping[str, float]) -> None:
        """Record the value of `trainer.early_stop.metric` at `step`; a step whose `numbers` lack it does not count."""
        settings = self._settings
        if settings is None or settings.metric not in numbers:
            return
        value = numbers[settings.metric]
        sign = 1.0 if settings.mode == "max" else -1.0
        if math.isfinite(value) and (self._best is None or sign * (value - self._best) > settings.min_delta):
            self._best, self._best_step, self._without = value, step, 0
        else:
            self._without += 1

    def would_end(self, step: int, numbers: Mapping[str, float]) -> bool:
        """Return whether `record(step, numbers)` would end the run, without recording the numbers."""
        after = copy.copy(self)
        after.record(step, numbers)
        return after.reason() is not None

    def reason(self) -> str | None:
        """Return why `trainer.early_stop` ends the run now; None: the run continues."""
        settings, best = self._settings, self._best
        if settings is None:
            return None
        name = settings.metric
        if settings.target is not None and best is not None:
            reached = best >= settings.target if settings.mode == "max" else best <= settings.target
            if reached:
                return f"{name} was {best:g} at step {self._best_step}, and the target is {settings.target:g}"
        if settings.patience is None or self._without < settings.patience:
            return None
        course = "was never finite" if best is None else f"was {best:g} at best, at step {self._best_step}"
        more = f" by more than {settings.min_delta:g}" if settings.min_delta else ""
        return f"{name} {course}, and {self._without} measurements in a row did not improve it{more}"

    def refuse_unknown(self, numbers: Mapping[str, float]) -> None:
        """Raise ConfigError if no step so far has measured the metric; called after a step that should measure it."""
        settings = self._settings
        if settings is None or settings.metric in numbers or self._best is not None or self._without:
            return
        near = close_matches(settings.metric, numbers)
        raise ConfigError(
            "no step measures this metric, so the run would never end early",
            where="trainer.early_stop.metric",
            found=settings.metric,
            allowed=sorted(numbers),
            fix=f"did you mean {near[0]}?" if near else "name one of these",
        )

    def state_dict(self) -> dict[str, Any] | None:
        """Return the state for a checkpoint; None without early stopping."""
        if self._settings is None:
            return None
        watched = {"metric": self._settings.metric, "mode": self._settings.mode}
        return {**watched, "best": self._best, "best_step": self._best_step, "without": self._without}

    def load_state_dict(self, state: dict[str, Any] | None) -> None:
        """Restore a checkpoint's `state`; the state of another metric is ignored."""
        watched = None if self._settings is None else (self._settings.metric, self._settings.mode)
        if state is not None and (state["metric"], state["mode"]) == watched:
            self._best, self._best_step, self._without = state["best"], state["best_step"], state["without"]
