"""The part of another team than the actor's in the checkpoints of a run.

A critic saves itself; a rollout its random states and the samples of later steps (in_order_checkpoint.py,
as_ready_checkpoint.py).

team of the actor (megarl.runtime.checkpoints)       this team
find(): all files, where the run goes on    ----->   load(): its own files of that checkpoint
after_step(): is a step saved?              ----->   after_step(): its engines (megarl.training.multi_team_commit)
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from megarl.dag.messages import CheckpointTag
from megarl.dag.stage import Role
from megarl.runtime.checkpoints import FOLDER, teams_of
from megarl.system.tracing import phase
from megarl.training import checkpoint
from megarl.training.multi_team_commit import begin_part
from megarl.training.saving import PendingSave

if TYPE_CHECKING:
    from megarl.runtime.rank_state import RankState
    from megarl.system.metrics import Metrics


class CheckpointPart:
    """A `CheckpointPolicy`: saves and restores what this team has of it."""

    def __init__(self, c: RankState) -> None:
        self._c, self._world = c, c.layout.world
        self._teams = teams_of(c)
        self._under_way = PendingSave()
        self.ends = self.over = False  # the launcher ends this team

    def load(self, source: Path) -> None:
        """Restore what this team has in a checkpoint of a step of RL: engines that learn, and random states.

        Raises:
            CheckpointError: its files are not intact as this team sees them, or of another model.
        """
        trained = self._c.trained
        if trained:
            with self._c.offload.phase("resume"):
                checkpoint.load(source, trained, checkpoint.verify(source, self._world, trained))
        elif self._teams is not None:
            checkpoint.load_random_states(source, self._c.layout)

    def poll(self) -> None:
        """After a step that no checkpoint may follow: has what is being written come to its end?

        Raises:
            CheckpointError: it could not be written; the checkpoint before it is whole.
        """
        self._under_way.poll()

    def settle(self) -> None:
        """See `CheckpointPolicy`."""
        self._under_way.settle()

    def may_save(self, step: int) -> bool:
        """Return False: the actor's team decides."""
        return False

    def ends_early(self, step: int, others: Callable[[], Iterable[Metrics]] = tuple) -> bool:
        """Return False: the actor's team decides, and the launcher ends the others."""
        return False

    def begin(self) -> None:
        """Only the actor's team has something to do then."""

    def rate_start(self, numbers: dict[str, float]) -> None:
        """Only the actor's team tells which checkpoint is the best."""

    def after_step(
        self,
        step: int,
        numbers: dict[str, float] | None = None,
        accuracy: float | None = None,
        *,
        last: bool,
        files: Callable[[], Mapping[str, bytes]] | None = None,
    ) -> None:
        """Begin to write this team's part of the checkpoint of `step`, if it has one and the actor's team saves it.

        The next steps run while it is written; after the last one it is complete.

        Args:
            numbers, accuracy: only the actor's team decides by them.
            last: no step follows.
            files: asked for the contents by name of what this rank adds, if the step is saved.

        Raises:
            CheckpointError: it could not be written; the checkpoint before it is whole.
        """
        if self._teams is None:
            return
        with phase("await_checkpoint", waits_for=self._c.team.of(Role.ACTOR)):
            tag = CheckpointTag.read(self._teams.mail, step).tag
        self._under_way.poll()
        if tag is not None:
            self._under_way.wait()
            began = time.monotonic()
            with phase("checkpoint"), self._c.offload.phase("checkpoint"):
                c, root, more = self._c, self._c.run_dir / FOLDER, {} if files is None else files()
                saving = begin_part(root, step, tag, c.trained, self._teams, c.layout, more)
            self._under_way.began(saving, began)
        if last:
            self._under_way.wait()
