"""Where a run begins: from a checkpoint, after a cold start, or with the model of the recipe."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from megarl.dag.stage import Role
from megarl.runtime.reference import drop_refused_start, keep_reference, keep_start, unchanged_model

if TYPE_CHECKING:
    from megarl.runtime.controller import Controller


@dataclass(frozen=True)
class RunStart:
    """Where a run begins.

    Attributes:
        resumed_at: step of the checkpoint that it resumes from; None: from none.
        source: that checkpoint, RUN_DIR/checkpoints/step_N.
        reference: where the weights of the reference are; None: there is no reference.
        reference_key: of the recipe, that names them; empty: the run keeps them.
        critic: where those of a critic are that begins in another team; None: at `critic.path`, or in a checkpoint.
    """

    resumed_at: int | None
    source: str | None
    reference: str | None
    critic: str | None
    reference_key: str = ""

    @property
    def begun(self) -> bool:
        """It resumes from a step of RL: the actor of step 0 is where RL starts."""
        return bool(self.resumed_at)

    @property
    def shown_from(self) -> int | None:
        """The step that the record continues after; step 0 is measured again. None: there is no record yet."""
        return -1 if self.resumed_at == 0 else self.resumed_at


def keep_run_start(c: Controller, resumed_at: int | None, source: Path | None) -> RunStart:
    """Keep what RL starts from for the models that begin with it. Collective over the actor's team.

    Args:
        c: this rank's controller, whose actor is where RL starts, unless the run resumes later.
        resumed_at: step of the checkpoint that it resumes from.
        source: that checkpoint.

    Raises:
        ConfigError: as `keep_reference`.
    """
    drop_refused_start(c)  # of a process that was killed
    c.layout.world.barrier()
    placement, begun = c.team.placement, bool(resumed_at)
    reference, key, critic = None, "", None
    if placement.of_role(Role.REFERENCE) is not None:
        reference, key = keep_reference(c, resumed_from=source, begun=begun)
    home = placement.of_role(Role.CRITIC)
    if home is not None and home != c.team.plan and c.config.critic.path is None and not begun:
        critic = (unchanged_model(c.config) if source is None else None) or keep_start(c)
    return RunStart(resumed_at, None if source is None else str(source), reference, critic, key)
