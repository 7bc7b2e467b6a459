"""The part of a team in the checkpoints of a run. The actor's team decides what is saved (checkpoints.py).

A critic saves itself; a rollout its random states and the samples of later steps (in_order_checkpoint.py and
as_ready_checkpoint.py of megarl/disaggregated). megarl/training/multi_team_commit.py shows how teams write together.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from megarl.dag.messages import CheckpointTag
from megarl.dag.stage import Role
from megarl.system.errors import UserError
from megarl.system.tracing import phase
from megarl.training import checkpoint
from megarl.training.multi_team_commit import Teams, begin_part
from megarl.training.saving import PendingSave

if TYPE_CHECKING:
    from megarl.runtime.rank_state import RankState
    from megarl.system.metrics import Metrics


FOLDER = "checkpoints"


def teams_of(c: RankState) -> Teams | None:
    """Return the teams that write checkpoints, as one of them sees them; None: there are no others."""
    team = c.team
    if team.buffer is None:
        return None
    parts = {Role.CRITIC, Role.ROLLOUT}
    beside = tuple(plan.name for plan in team.others if parts & {*plan.roles}) if team.leads else ()
    if not beside and (team.leads or not parts & {*team.plan.roles}):
        return None
    return Teams(team.plan.name, team.plan.first, c.mail, c.config.cluster.timeout_s, beside)


class CheckpointPart:
    """Saves and restores a team's part of checkpoints. All methods but `settle` are collective over the team.

    Attributes:
        ends: the step that was saved last is the last one of this job; always False but in the actor's team.
    """

    def __init__(self, c: RankState) -> None:
        self._c, self._world = c, c.layout.world
        self._teams = teams_of(c)
        self._under_way = PendingSave()
        self.ends = False  # the launcher ends other teams than the actor's

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
        """Check the checkpoint that is being written, after a step without one.

        Raises:
            CheckpointError: it could not be written; the checkpoint before it is whole.
        """
        self._under_way.poll()

    def settle(self) -> None:
        """Finish the checkpoint that is being written, before an error of this rank ends the run. Not collective."""
        self._under_way.settle()

    def write_part(self, step: int, *, last: bool, files: Callable[[], Mapping[str, bytes]] = dict) -> None:
        """Begin to write this team's part of the checkpoint of `step`, if it has one and the actor's team saves it.

        The next steps run while it is written; after the last one it is complete.

        Args:
            last: no step follows.
            files: returns the contents by name of what this rank adds; called if the step is saved.

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
                c, root, more = self._c, self._c.run_dir / FOLDER, files()
                saving = begin_part(root, step, tag, c.trained, self._teams, c.layout, more)
            self._under_way.began(saving, began)
        if last:
            self._under_way.wait()

    # -- what the actor's team decides ---------------------------------------------------------------------------------

    @property
    def over(self) -> bool:
        """Whether no further step is needed; only the actor's team decides that."""
        return False

    def begin(self) -> None:
        """Accept the start: nothing may refuse it any more."""

    def rate_start(self, numbers: dict[str, float]) -> None:
        """Rate what RL starts from by held-out numbers, before its first step."""

    def may_save(self, step: int) -> bool:
        """Return whether `step` may be saved."""
        return False

    def ends_early(self, step: int, others: Callable[[], Iterable[Metrics]] = tuple) -> bool:
        """Return whether `step` is the last one by a metric of training."""
        return False

    def after_step(self, step: int, numbers: dict[str, float], accuracy: float | None, *, last: bool) -> None:
        """Begin to write the checkpoint of `step`, if there is one; `last`: no step follows."""
        self.write_part(step, last=last)


@contextlib.contextmanager
def settling(checkpoints: CheckpointPart) -> Iterator[None]:
    """Complete the checkpoint that is being written before an error of the user's input ends the run.

    Such a run is started again by hand, and goes on from the step that was over.
    """
    try:
        yield
    except UserError:
        checkpoints.settle()
        raise
