"""What a run saves and how it comes back: actor, critic, loader, left-over samples, KL controller, best value."""

from __future__ import annotations

import hashlib
import math
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megarl.errors import ConfigError
from megarl.phase import phase

if TYPE_CHECKING:
    from megarl.data.batch import Batch
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
        c.surplus = read_surplus(c, self._source, state["surplus_parts"])
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
            "surplus_parts": 0 if c.surplus is None else c.layout.dp_size,
            "best": None if math.isinf(self.best) else self.best,
        }
        with phase("checkpoint"):
            save(
                self._root,
                step,
                c.trained,
                extra,
                files=surplus_file(c),
                config_hash=hashlib.sha256(c.config.model_dump_json().encode()).hexdigest(),
                keep_last=settings.keep_last,
                best=is_best,
            )


def surplus_file(c: Controller) -> dict[str, bytes]:
    """Name and content of this replica's share of the surplus; only its first rank writes it."""
    if c.surplus is None or not c.layout.is_lead:
        return {}
    return {_surplus_name(c.layout.dp_rank): c.surplus.to_bytes()}


def read_surplus(c: Controller, folder: Path, parts: int) -> Batch | None:
    """This rank's share of a surplus that `parts` replicas wrote; group k belongs to replica k modulo their number.

    Raises:
        ConfigError: the groups have another size than this run's.
    """
    from megarl.data.batch import Batch

    if not parts:
        return None
    shares = [Batch.from_bytes((folder / _surplus_name(part)).read_bytes()) for part in range(parts)]
    n = c.config.rollout.sampling.n
    first = shares[0]["uid"]
    if first.count(first[0]) != n:
        raise ConfigError(
            "the checkpoint holds samples for the next step, in groups of another size",
            where="rollout.sampling.n",
            found=n,
            allowed=str(first.count(first[0])),
            fix="resume with that size, or start anew with trainer.resume: never",
        )
    starts = [sum(len(share) for share in shares[:part]) for part in range(parts)]
    groups = sum(len(share) for share in shares) // n
    mine = [starts[k % parts] + k // parts * n for k in range(c.layout.dp_rank, groups, c.layout.dp_size)]
    return Batch.concat(shares).select([start + i for start in mine for i in range(n)])


def _surplus_name(part: int) -> str:
    return f"surplus_{part}.safetensors"
