"""The part that one team writes into the run's checkpoints; the actor's team decides when to save (checkpoints.py).

A team that trains a critic or further models saves them; a rollout's team its random states and the samples of later
steps (in_order_checkpoint.py and as_ready_checkpoint.py of megarl/disaggregated). megarl/training/multi_team_commit.py
shows how teams write together.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megarl.artifacts.run_folder import LAUNCH_FOLDER, SAVE_REQUEST
from megarl.dag.messages import CheckpointTag
from megarl.dag.stage import Role
from megarl.system.errors import UserError
from megarl.system.tracing import phase
from megarl.training import checkpoint
from megarl.training.multi_team_commit import Teams, begin_part
from megarl.training.saving import PendingSave
from megarl.training.shards import CheckpointError, FormatError

if TYPE_CHECKING:
    from megarl.dag.placement import TeamPlan
    from megarl.runtime.rank_state import RankState
    from megarl.system.comm import WorkerGroup
    from megarl.system.metrics import Metrics


FOLDER = "checkpoints"


def save_requests(run_dir: Path) -> list[Path]:
    """Return the files whose existence requests a checkpoint: one for batch jobs, one that Ctrl-C creates."""
    return [run_dir / LAUNCH_FOLDER / SAVE_REQUEST, run_dir / SAVE_REQUEST]


def newest_intact(root: Path, world: WorkerGroup) -> tuple[tuple[Path, dict[str, Any]] | None, list[str]]:
    """Return the newest checkpoint in `root` whose files are all intact, and the faults of newer ones. Collective.

    A checkpoint is returned as its folder and the contents of meta.json, or None if none is intact. Rank 0 prints the
    faults.

    Raises:
        FormatError: that checkpoint or a newer one has the format of another version of megarl.
    """
    faults: list[str] = []
    # Only rank 0 lists the folders: on a shared file system two ranks may see different ones.
    for step in reversed(world.broadcast_json(checkpoint.named_steps(root))):
        folder = root / f"step_{step}"
        try:
            return (folder, checkpoint.verify(folder, world)), faults
        except FormatError:
            raise
        except CheckpointError as error:
            faults.append(f"step_{step}: {error.found}")
            if world.rank == 0:
                print(f"WARNING: {folder} is not used, it is damaged or incomplete: {error.found}", flush=True)
    return None, faults


def _writes(team: TeamPlan) -> bool:
    """Return whether a team other than the actor's has state that checkpoints hold."""
    return any(role in (Role.CRITIC, Role.ROLLOUT) or role.is_further for role in team.roles)


def teams_of(c: RankState) -> Teams | None:
    """Return the teams that write a checkpoint together with this one; None: no other team writes with it."""
    team = c.team
    if team.buffer is None:
        return None
    beside = tuple(plan.name for plan in team.others if _writes(plan)) if team.leads else ()
    if not beside and (team.leads or not _writes(team.plan)):
        return None
    return Teams(team.plan.name, team.plan.first, c.mail, c.config.cluster.timeout_s, beside)


class CheckpointPart:
    """Saves and restores a team's part of the checkpoints. All methods but `finish_save` are collective over the team.

    Attributes:
        must_stop: whether the job must stop after the step that was just saved; False except in the actor's team.
    """

    def __init__(self, c: RankState) -> None:
        self._c, self._world = c, c.layout.world
        self._teams = teams_of(c)
        self._in_flight = PendingSave()
        self.must_stop = False  # always False here: the launcher stops teams other than the actor's

    def load(self, source: Path) -> None:
        """Restore this team's trained engines and random states from an RL checkpoint.

        Raises:
            CheckpointError: files are damaged or missing, or belong to another model.
        """
        trained = self._c.trained
        if trained:
            with self._c.offload.phase("resume"):
                checkpoint.load(source, trained, checkpoint.verify(source, self._world, trained))
        elif self._teams is not None:
            checkpoint.load_random_states(source, self._c.layout)

    def poll(self) -> None:
        """Raise an error if the checkpoint in flight has failed; called after a step that does not write a checkpoint.

        Raises:
            CheckpointError: the checkpoint could not be written; the previous checkpoint is intact.
        """
        self._in_flight.poll()

    def finish_save(self) -> None:
        """Finish writing the checkpoint in flight before an error of this rank ends the run. Not collective."""
        self._in_flight.finish_save()

    def write_part(self, step: int, *, last: bool, files: Callable[[], Mapping[str, bytes]] = dict) -> None:
        """Start to write this team's part of the checkpoint of `step`, if the actor's team saves that step.

        The checkpoint is written in the background during the next steps. With `last` the method waits for it.

        Args:
            last: whether this is the run's last step.
            files: returns further files of this rank, content by name; called only if the step is saved.

        Raises:
            CheckpointError: the checkpoint could not be written; the previous checkpoint is intact.
        """
        if self._teams is None:
            return
        with phase("await_checkpoint", waits_for=self._c.team.of(Role.ACTOR)):
            tag = CheckpointTag.read(self._teams.mail, step).tag
        self._in_flight.poll()
        if tag is not None:
            self._in_flight.wait()
            began = time.monotonic()
            with phase("checkpoint"), self._c.offload.phase("checkpoint"):
                c, root, more = self._c, self._c.run_dir / FOLDER, files()
                saving = begin_part(root, step, tag, c.trained, self._teams, c.layout, more)
            self._in_flight.began(saving, began)
        if last:
            self._in_flight.wait()

    # -- what the actor's team decides ---------------------------------------------------------------------------------

    @property
    def stopped_early(self) -> bool:
        """Return whether no further step is needed; only the actor's team decides this."""
        return False

    def begin(self) -> None:
        """Prepare the run folder for this start of the run, once every check has passed."""

    def rate_step_0(self, numbers: dict[str, float]) -> None:
        """Use the held-out metrics from before the first RL step to rate the checkpoint of step 0."""

    def may_save(self, step: int) -> bool:
        """Return whether `step` may be saved; this is decided when the step has ended."""
        return False

    def ends_early(self, step: int, others: Callable[[], Iterable[Metrics]] = tuple) -> bool:
        """Return whether a training metric ends the run after `step`."""
        return False

    def after_step(self, step: int, numbers: dict[str, float], accuracy: float | None, *, last: bool) -> None:
        """Start to write the checkpoint of `step` if it is saved; `last`: no step follows."""
        self.write_part(step, last=last)


@contextlib.contextmanager
def finishing_save(checkpoints: CheckpointPart) -> Iterator[None]:
    """Finish writing the checkpoint in flight before a `UserError` ends the run, so that the run can resume from it."""
    try:
        yield
    except UserError:
        checkpoints.finish_save()
        raise
