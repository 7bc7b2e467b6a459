"""The default environment: one prompt, one response, scored by the recipe's reward function."""

from __future__ import annotations

from typing import ClassVar

from megarl.envs.protocol import Action, Environment, Step


class SingleTurn(Environment):
    """An environment that ends after the first turn. Its responses are generated all together, without the driver."""

    scores: ClassVar[bool] = False

    def step(self, action: Action) -> Step:
        """End the episode."""
        return Step(done=True)
