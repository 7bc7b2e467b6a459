"""What a run saves and how it comes back: actor, critic, loader, KL controller, best value."""

from __future__ import annotations

import hashlib
import math
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megarl.errors import ConfigError
from megarl.phase import phase

if TYPE_CHECKING:
    from megarl.runtime.controller import Controller

FOLDER = "checkpoints"


class Checkpoints:
    """Saves and restores a controller. All methods are collective.

    `best` is the best value of `trainer.best_metric` so far; larger is better.
    """

    def __init__(self, c: Controller) -> None:
        self._c, self.best = c, -math.inf
        self._root = c.run_dir / FOLDER
        self._source: Path | None = None

    def find(self) -> int | None:
        """Step of the checkpoint to resume from, by `trainer.resume`; None: start from the beginning."""
        from megarl.training.checkpoint import latest, read_meta

        resume = self._c.config.trainer.resume
        if resume == "auto":
            self._source = latest(self._root)
        elif resume != "never":
            self._source = Path(resume)
            if not self._source.is_dir():
                raise ConfigError(
                    "no such checkpoint folder",
                    where="trainer.resume",
                    found=resume,
                    allowed="auto, never, or RUN_DIR/checkpoints/step_N",
                )
        return None if self._source is None else read_meta(self._source)["step"]

    @property
    def found(self) -> bool:
        """True when `find` found a checkpoint."""
        return self._source is not None

    def load(self) -> None:
        """Restore what `find` found."""
        from megarl.training.checkpoint import load

        assert self._source is not None, "find() comes first"
        c = self._c
        assert c.loader is not None, "only training runs resume"
        c.step, state = load(self._source, c.trained)
        c.rollout.weight_version = c.step
        c.loader.load_state_dict(state["loader"])
        c.kl_controller.load_state_dict(state["kl"])
        self.best = -math.inf if state["best"] is None else state["best"]

    def save(self, step: int, numbers: dict[str, float]) -> None:
        """Write a checkpoint after `step`; `numbers` are the step's metrics, equal on all ranks."""
        from megarl.training.checkpoint import save

        c, settings = self._c, self._c.config.trainer
        assert c.loader is not None, "only training runs save"
        value = numbers.get(settings.best_metric or "", -math.inf)
        is_best = value > self.best
        self.best = max(self.best, value)
        extra: dict[str, Any] = {
            "loader": c.loader.state_dict(),
            "kl": c.kl_controller.state_dict(),
            "best": None if math.isinf(self.best) else self.best,
        }
        with phase("checkpoint"):
            save(
                self._root,
                step,
                c.trained,
                extra,
                config_hash=hashlib.sha256(c.config.model_dump_json().encode()).hexdigest(),
                keep_last=settings.keep_last,
                best=is_best,
            )
