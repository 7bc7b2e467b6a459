"""Checkpoints within a cold start, so that an interrupted one resumes.

They lie in RUN_DIR/cold_start, apart from the run's own checkpoints, and are removed when RL begins; the result of the
cold start is `step_0` of the run's checkpoints.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megarl.artifacts.lock import refuse_if_taken
from megarl.artifacts.run_folder import COLD_START
from megarl.runtime.checkpoint_part import newest_intact, save_requests
from megarl.runtime.files_read import FilesRead, changed_lines, files_read
from megarl.runtime.resume_compatibility import refuse_other_batches
from megarl.runtime.validate import due
from megarl.system.tracing import phase
from megarl.training import checkpoint

if TYPE_CHECKING:
    from megarl.data.loader import PromptLoader
    from megarl.runtime.rank_state import RankState


class ColdStartCheckpoints:
    """Saves a cold start on request of the user or batch job or by `trainer.resume_every`, and restores it.

    All methods are collective over the actor's team.

    Attributes:
        step: the step to resume after; None: the cold start begins.
        accuracy: held-out accuracy at that step; None: not measured at that step.
    """

    must_stop = stopped_early = False  # trainer.early_stop and trainer.save_by_s do not end a cold start

    def __init__(self, c: RankState, examples: PromptLoader) -> None:
        self._c, self._examples, self._world = c, examples, c.layout.world
        self._root = c.run_dir / COLD_START
        self._requests = save_requests(c.run_dir)
        # folder of the chosen checkpoint, and contents of its meta.json
        self._chosen: tuple[Path, dict[str, Any]] | None = None
        self._read: FilesRead = {}
        self.step: int | None = None
        self.accuracy: float | None = None

    def find(self) -> None:
        """Choose the newest intact checkpoint, and check that this run can continue it.

        Raises:
            ConfigError, DataError: this configuration or data cannot continue it.
            FormatError: another version of megarl wrote the checkpoint.
        """
        config = self._c.config.model_dump(mode="json")
        self._read = self._world.broadcast_json(files_read(config) if self._world.rank == 0 else None)
        if self._c.config.trainer.resume != "auto":
            return
        self._chosen, _ = newest_intact(self._root, self._world)
        if self._chosen is not None:
            self._check(*self._chosen)
            self.step = self._chosen[1]["step"]

    def _check(self, folder: Path, meta: dict[str, Any]) -> None:
        config = self._c.config.model_dump(mode="json")
        checkpoint.check_model(folder, meta, self._c.trained, self._world)
        state = checkpoint.read_state(folder)
        self._examples.check_state(state["loader"])
        refuse_other_batches(meta["step"], state["loader"], meta["config"], config, "sft")
        lines = changed_lines(meta, state, config, self._read, "sft", begun=False)
        if self._world.rank == 0:
            steps = self._c.config.sft.steps
            outlook = f"resuming after step {meta['step']} of {steps} of the cold start, from {folder}"
            print(*lines, outlook, sep="\n", flush=True)

    def load(self) -> None:
        """Restore the checkpoint that `find` has chosen; if there is none, remove the files of an earlier start."""
        if self._chosen is None:
            self.clear()
            return
        source, meta = self._chosen
        with phase("resume"), self._c.offload.phase("resume"):
            _, state = checkpoint.load(source, self._c.trained, meta)
        self._examples.load_state_dict(state["loader"])
        self.accuracy = state["accuracy"]

    def ends_early(self, step: int) -> bool:
        """Return False, because `trainer.early_stop` does not apply to cold starts."""
        return False

    def after_step(self, step: int, numbers: dict[str, float], accuracy: float | None, *, last: bool) -> None:
        """Save `step` if a checkpoint is requested or due; `accuracy` is on held-out prompts, None if not measured."""
        settings = self._c.config.trainer
        requested = self._world.broadcast_json(any(map(Path.exists, self._requests)) if self._world.rank == 0 else None)
        if not requested and not due(step, settings.resume_every):
            return
        extra = {"loader": self._examples.state_dict(), "accuracy": accuracy, "read": self._read}
        with phase("checkpoint"), self._c.offload.phase("checkpoint"):
            config = self._c.config.model_dump(mode="json")
            checkpoint.save(self._root, step, self._c.trained, extra, config=config, keep_last=1)
        if requested and self._world.rank == 0:
            for request in self._requests:
                request.unlink(missing_ok=True)

    def clear(self) -> None:
        """Remove RUN_DIR/cold_start, because the cold start is complete or begins again."""
        refuse_if_taken(self._c.run_dir)
        if self._world.rank == 0:
            shutil.rmtree(self._root, ignore_errors=True)
        self._world.barrier()
