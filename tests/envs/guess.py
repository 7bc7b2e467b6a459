"""An environment of three turns, as a user writes it: guess a digit, told `+` (higher) or `-` (lower) in between."""

from __future__ import annotations

import random
from typing import Any

from pydantic import Field

from megarl.envs import Action, Environment, EnvSettings, Step


class GuessSettings(EnvSettings):
    """Keys of the section `env` for this environment."""

    highest: int = Field(9, ge=1, le=9, description="largest secret digit")
    turns: int = Field(3, ge=1, description="guesses")


class Guess(Environment):
    """The reward of a turn is how much closer its guess is; the sum is the closeness of the last guess, at most 1."""

    Settings = GuessSettings

    def reset(self, row: dict[str, Any], seed: int) -> str:
        """The secret depends on the seed, and so is the same for all samples of a prompt."""
        self.secret = random.Random(seed).randint(0, self.settings.highest)
        self.closeness = 0.0
        return f"{self.settings.highest}="

    async def step(self, action: Action) -> Step:
        """A hint, or the end."""
        digit = int(action.text[0]) if action.text[:1].isdigit() else -1
        closeness = 1 - abs(self.secret - digit) / 10
        reward, self.closeness = closeness - self.closeness, closeness
        if digit == self.secret or action.turn + 1 == self.settings.turns:
            return Step(reward=reward, done=True, info={"found": float(digit == self.secret)})
        return Step("+" if digit < self.secret else "-", reward)
