"""An environment with images, as a user writes it: ask for the left or the right half of a picture, enlarged."""

from __future__ import annotations

from typing import Any

from pydantic import Field

from megarl.envs import Action, Environment, EnvSettings, Step


class LookSettings(EnvSettings):
    """Keys of the section `env` for this environment."""

    looks: int = Field(2, ge=0, description="halves that an episode may ask for")
    price: float = Field(0.1, ge=0, description="reward that a look costs")


class Look(Environment):
    """`-` shows the left half of the picture, `+` the right one; everything else is the answer."""

    Settings = LookSettings
    replayable = True

    def reset(self, row: dict[str, Any], seed: int) -> None:
        """The prompt of the data is the first observation; `images` are its images as PIL."""
        self.picture, self.answer = row["images"][0], row["answer"]

    def step(self, action: Action) -> Step:
        """A half, or the end."""
        said, half = action.text.strip(), self.picture.width // 2
        if said not in ("-", "+") or action.turn >= self.settings.looks:
            return Step(reward=float(said == self.answer), done=True)
        left = 0 if said == "-" else half
        view = self.picture.crop((left, 0, left + half, self.picture.height)).resize(self.picture.size)
        seen = [{"type": "image", "image": view}, {"type": "text", "text": "="}]
        return Step(seen, -self.settings.price, info={"looks": 1.0})
