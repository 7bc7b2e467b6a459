"""The recipe's mapping `robot.reward.embedding`: embeddings by which `progress` scores compare robots' episodes."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from megarl.config.base import Section
from megarl.system.errors import ConfigError

#: The keys that each embedding reads; all embeddings also read `name`.
_READ = {
    "state": ("points", "end_weight"),
    "own": ("points", "width", "updates", "lr"),
    "vjepa2": ("path", "batch_size", "clip"),
}


class EmbeddingSettings(Section):
    """The mapping `robot.reward.embedding`."""

    name: Literal["state", "own", "vjepa2"] = Field(
        "state",
        description="state: the robot's states along the episode; own: an encoder of images and states that is "
        "trained during the run on its episodes; vjepa2: a published video encoder",
    )
    points: int = Field(
        8, ge=1, description="number of points of an episode that are compared, spread evenly over its policy calls"
    )
    end_weight: float = Field(
        1.0, ge=0, description="`state`: extra weight of the last point, beside the mean over all points; 0: none"
    )
    width: int = Field(32, ge=2, description="`own`: size of the embedding of one point")
    updates: int = Field(4, ge=1, description="`own`: updates of the encoder per training step")
    lr: float = Field(1e-3, gt=0, description="`own`: the encoder's learning rate (Adam)")

    path: str | None = Field(None, description="`vjepa2`: folder or hub name of a VJEPA2Model of transformers")
    clip: Literal["steps", "calls"] = Field(
        "steps",
        description="`vjepa2`: frames of a clip. steps: the simulator renders every environment step, as in SRPO's "
        "paper; calls: the images that the policy saw before each of its calls, which need no extra rendering",
    )
    batch_size: int = Field(4, ge=1, description="`vjepa2`: clips per forward pass")

    @property
    def by_steps(self) -> bool:
        """Whether embeddings need a frame of every environment step."""
        return self.name == "vjepa2" and self.clip == "steps"

    def check(self, where: str) -> None:
        """Refuse keys that only another embedding reads, and `vjepa2` without a path.

        Raises:
            ConfigError: a key is refused, or the path is missing; `where` is the mapping's place in the recipe.
        """
        read = _READ[self.name]
        for key in sorted(self.model_fields_set - {"name", *read}):
            raise ConfigError(
                f"the embedding {self.name!r} does not read this key",
                where=f"{where}.{key}",
                found=getattr(self, key),
                allowed=", ".join(("name", *read)),
                fix=f"remove it, or set {where}.name to one that reads it:"
                + ", ".join(name for name, keys in _READ.items() if key in keys),
            )
        if self.name == "vjepa2" and self.path is None:
            raise ConfigError(
                "the embedding vjepa2 needs a path",
                where=f"{where}.path",
                found=None,
                allowed="a folder or hub name of transformers' VJEPA2Model",
                fix=f"set {where}.path=facebook/vjepa2-vitg-fpc64-384, or to the folder of a downloaded copy",
            )
