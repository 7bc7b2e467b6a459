"""Warnings from a step's metrics: the run learns nothing, or training is about to diverge."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from statistics import median

# warn after this many steps in a row with equal scores of all samples, with all advantages 0, or with nearly all
# episodes ended by a limit
SAME_STEPS = 3
_MOST_CUT = 0.9  # a larger share of episodes that a limit ends raises an alarm
_WINDOW, _ENOUGH = 20, 5  # a norm or loss is compared with the median of 5 to 20 earlier steps
# A gradient norm of this many medians raises an alarm: a hard batch makes it several times larger, a diverging policy
# thousands of times.
_NORM_FACTOR = 100.0
_LOSS_FACTOR, _LOSS_FLOOR = 3.0, 1.0  # nats per token; a loss below the floor raises no alarm, however much it grew
_FIX = "lower the learning rate, or resume from an earlier checkpoint with a lower one"


class Alarms:
    """Checks each step's metrics for signs of trouble. A warning is repeated only after its condition was false."""

    def __init__(self) -> None:
        self._past: dict[str, deque[float]] = {}
        self._given: set[str] = set()
        self._same_scores = self._no_advantage = self._cut = 0

    def check(self, step: int, numbers: Mapping[str, float]) -> list[str]:
        """Return the new warnings of step `step`, one line each.

        Args:
            numbers: metrics reduced over all ranks; the check of a missing metric is skipped.
        """
        warnings = {
            "rewards": self._rewards(numbers),
            "episodes": self._episodes(numbers),
            **{
                f"norm {role}": self._growth(f"{role}/grad_norm", numbers, _NORM_FACTOR) for role in ("actor", "critic")
            },
            "loss": self._growth("sft/loss", numbers, _LOSS_FACTOR, _LOSS_FLOOR),
        }
        new = [text for name, text in warnings.items() if text is not None and name not in self._given]
        self._given = {name for name, text in warnings.items() if text is not None}
        return [f"step {step}: {text}" for text in new]

    def _rewards(self, numbers: Mapping[str, float]) -> str | None:
        low, high = (numbers.get(f"critic/score/{end}") for end in ("min", "max"))
        if low is None:
            return None  # no sample was generated in this step
        self._same_scores = self._same_scores + 1 if low == high else 0
        flat = numbers.get("critic/advantages/min") == numbers.get("critic/advantages/max") == 0
        self._no_advantage = self._no_advantage + 1 if flat else 0
        if self._same_scores >= SAME_STEPS:
            return (
                f"every response of the last {SAME_STEPS} steps or more scored {low:g}, so there is nothing to learn "
                "from; look at samples.jsonl, the reward function and the difficulty of the prompts"
            )
        if self._no_advantage >= SAME_STEPS:
            return (
                f"for {SAME_STEPS} steps or more all responses to a prompt scored alike, so every advantage is 0; "
                "raise rollout.sampling.n or the temperature, or choose prompts that are solved sometimes"
            )
        return None

    def _episodes(self, numbers: Mapping[str, float]) -> str | None:
        cut, turns = numbers.get("env/cut"), numbers.get("env/turns/mean")
        if cut is None or turns is None:
            return None  # no episode was played in this step
        self._cut = self._cut + 1 if cut > _MOST_CUT else 0
        if self._cut < SAME_STEPS:
            return None
        return (
            f"for {SAME_STEPS} steps or more a limit ended nearly all episodes ({cut:.0%}; mean turns {turns:.3g}); "
            "a turn cut by rollout.sampling.max_new_tokens is an episode's last: raise it or rollout.limits, or name "
            "tokens that end a turn in rollout.sampling.stop_token_ids"
        )

    def _growth(self, name: str, numbers: Mapping[str, float], factor: float, floor: float = 0.0) -> str | None:
        """Return a warning if a metric is above `floor` and `factor` times its median over earlier steps."""
        before, now = self._compare(name, numbers)
        if now is None or before is None or now <= max(factor * before, floor):
            return None
        rate = numbers.get(name.replace("/grad_norm", "/lr")) if name.endswith("/grad_norm") else None
        at = "" if rate is None else f" at a learning rate of {rate:g}"
        return f"{name} is {now:.3g}{at}, the median of the steps before is {before:.3g}; {_FIX}"

    def _compare(self, name: str, numbers: Mapping[str, float]) -> tuple[float | None, float | None]:
        """Return the median of metric `name` over earlier steps (None: fewer than 5) and its value now (None: 0 or
        missing).

        A value far above the median does not enter later medians.
        """
        now = numbers.get(name)
        if not now:
            return None, None
        past = self._past.setdefault(name, deque(maxlen=_WINDOW))
        before = median(past) if len(past) >= _ENOUGH else None
        if before is None or now <= _LOSS_FACTOR * before:
            past.append(now)
        return before, now
