"""The default: one prompt, one response, scored by the recipe's reward function."""

from __future__ import annotations

from typing import ClassVar

from megarl.envs.protocol import Action, Environment, Step


class SingleTurn(Environment):
    """Ends after the first turn. A run with it does not use the driver: responses are generated all together."""

    scores: ClassVar[bool] = False

    def step(self, action: Action) -> Step:
        """The episode is over."""
        return Step(done=True)
