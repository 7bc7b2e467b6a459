"""The recipe's mapping `robot.reward.embedding`: the embeddings by which scores compare robots' episodes."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from megarl.config.base import Section
from megarl.system.errors import ConfigError

#: Keys that an embedding reads; `name` belongs to all.
_READ = {
    "state": ("points", "end_weight"),
    "own": ("points", "width", "updates", "lr"),
    "vjepa2": ("path", "batch_size", "clip"),
}


class EmbeddingSettings(Section):
    """The mapping `robot.reward.embedding`."""

    name: Literal["state", "own", "vjepa2"] = Field(
        "state",
        description="state: the robot's states along the episode; own: an encoder of pictures and states that learns "
        "on the run's own episodes; vjepa2: a published encoder of videos",
    )
    points: int = Field(8, ge=1, description="places of an episode that are compared, evenly spread over its calls")
    end_weight: float = Field(
        1.0, ge=0, description="`state`: what the end counts once more, beside the mean over all points; 0: nothing"
    )
    width: int = Field(32, ge=2, description="`own`: numbers that the encoder makes of a point")
    updates: int = Field(4, ge=1, description="`own`: updates of the encoder in a training step")
    lr: float = Field(1e-3, gt=0, description="`own`: the encoder's learning rate (Adam)")

    path: str | None = Field(None, description="`vjepa2`: folder or hub name of transformers' VJEPA2Model")
    clip: Literal["steps", "calls"] = Field(
        "steps",
        description="`vjepa2`: frames of a clip. steps: of every environment step, as the simulator renders them, as "
        "SRPO's authors have it; calls: what the policy saw before each of its calls, which costs no more pictures",
    )
    batch_size: int = Field(4, ge=1, description="`vjepa2`: clips that are embedded at a time")

    @property
    def by_steps(self) -> bool:
        """Whether episodes are compared by frames of every environment step."""
        return self.name == "vjepa2" and self.clip == "steps"

    def check(self, where: str) -> None:
        """Refuse keys that only another embedding reads, and `vjepa2` without a path.

        Raises:
            ConfigError: a key is refused, or the path is missing; `where` is the mapping's place in the recipe.
        """
        read = _READ[self.name]
        for key in sorted(self.model_fields_set - {"name", *read}):
            raise ConfigError(
                f"the embedding {self.name!r} does not read this",
                where=f"{where}.{key}",
                found=getattr(self, key),
                allowed=", ".join(("name", *read)),
                fix=f"remove it, or set {where}.name to one that reads it: "
                + ", ".join(name for name, keys in _READ.items() if key in keys),
            )
        if self.name == "vjepa2" and self.path is None:
            raise ConfigError(
                "the encoder has no default",
                where=f"{where}.path",
                found=None,
                allowed="a folder or hub name of transformers' VJEPA2Model",
                fix=f"set {where}.path=facebook/vjepa2-vitg-fpc64-384, or where it was downloaded to",
            )
