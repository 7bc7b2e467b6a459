"""The team of the rollout when it is not the actor's: it draws, `async.max_staleness` steps ahead of training.

    rollout's team (k = 1)                              actor's team
    draw 2, weights 0        drawn/0/2 ------------>    train 1
    take weights 1           <------ weights/1 -----    push them: nothing is drawn with weights 0 any more
    validate them            validation/1 --------->    record of step 1
    what was drawn for 2     checkpoint/draw/1 ---->    checkpoint of step 1
    draw 3, weights 1        drawn/0/3 ------------>    train 2
    take weights 2           <------ weights/2 -----    push them

With k = 0 it draws step t + 1 after weights t have come, and nothing of it is in a checkpoint. The end of a run, T, has
weights T - k to T one after the other: they are only validated.

No wait closes a circle: weights t wait for what is drawn for step t + k, which waits for weights t - 1 and no others.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from megarl.dag.stage import Role
from megarl.metrics import Metrics
from megarl.phase import phase, set_step
from megarl.runtime.drawn import Drawn
from megarl.runtime.generation import publish
from megarl.runtime.rollout_team import tell_loader
from megarl.runtime.validate import due, evaluate_drawn

if TYPE_CHECKING:
    from megarl.config.run import RunConfig
    from megarl.dag.executor import Executor
    from megarl.runtime.checkpoint_part import CheckpointPart
    from megarl.runtime.controller import Controller
    from megarl.runtime.recorder import Recorder
    from megarl.store.crossing import TeamCrossing

DRAWN = "drawn"


def draws_apart(c: Controller) -> bool:
    """This team draws samples, and another one trains on them."""
    return c.team.holds(Role.ROLLOUT) and not c.team.leads


def may_save(config: RunConfig, step: int) -> bool:
    """Whether the actor's team may save `step`, as far as others can tell: it may be the best one."""
    trainer = config.trainer
    best = bool(trainer.save_every) and due(step, config.validation.every)
    return step == trainer.steps or due(step, trainer.save_every) or best


def await_drawn(c: Controller, version: int) -> None:
    """Wait until nothing is drawn any more with the weights that `version` replaces. Every rank of the actor's team.

    Without staleness it trains on these samples only after they are all drawn, and need not ask.
    """
    lag = c.config.async_.max_staleness
    if lag and version + lag <= c.config.trainer.steps:
        team = c.team.placement.of_role(Role.ROLLOUT)
        assert team is not None, "every run draws samples"
        with phase("await_drawn", waits_for=team.name):
            for replica in range(team.replicas):
                c.mail.read(f"{DRAWN}/{replica}/{version + lag}")


@dataclass
class RolloutSteps:
    """The steps of a rollout's team. All methods are collective over it.

    Attributes:
        c: this rank's controller.
        executor: walks this team's nodes.
        crossing: of the executor.
        recorder: of this rank.
        checkpoints: this team's part of them.
        held: what a checkpoint has for the first step; None: that is drawn, too.
    """

    c: Controller
    executor: Executor
    crossing: TeamCrossing
    recorder: Recorder
    checkpoints: CheckpointPart
    held: Drawn | None

    def run(self) -> None:
        """All steps that are left, and the weights after the last ones."""
        c, config = self.c, self.c.config
        first, steps, lag = c.context.step, config.trainer.steps, config.async_.max_staleness
        for step in range(first + 1, steps + 1):
            c.context.step = step
            set_step(step)
            self.recorder.start_step()
            with phase("step"):
                drawn = self._give_held() if self.held is not None and step == first + 1 else self._draw()
                self._tell()
                if step - lag > first:
                    self._follow(step - lag)
            self.recorder.end_step(step)
            if step - lag > first:
                self._save(step - lag, drawn if lag else None)
        for version in range(max(first, steps - lag) + 1, steps + 1):
            with phase("step"):
                self._follow(version)
            self._save(version, None)

    def _draw(self) -> Drawn | None:
        """One walk of this team's nodes; what it gave, where a checkpoint may have to keep that."""
        c = self.c
        assert c.loader is not None, "checks refuse a training run without data"
        with phase("load"):
            prompts = next(c.loader)
        self.executor.run(c.context, prompts, more=c.loader)
        if not c.config.async_.max_staleness:
            return None
        return Drawn(self.crossing.given, Metrics.from_json(c.context.metrics.to_json()))

    def _give_held(self) -> Drawn:
        """What the walk gave before the run was interrupted goes to the other teams in its place."""
        c, drawn = self.c, self.held
        assert drawn is not None, "asked before"
        self.held = None
        c.context.metrics.merge(drawn.metrics)
        with phase("give"):
            self.crossing.give_again(c.context.step, drawn.given)
        return drawn

    def _tell(self) -> None:
        """This replica has drawn this step, and that is where the loader stands."""
        c = self.c
        tell_loader(c)
        # Each replica by itself: where they are not equally long at it, no collective's deadline is to be kept.
        if c.config.async_.max_staleness and c.layout.is_lead:
            c.mail.post(f"{DRAWN}/{c.layout.dp_rank}/{c.context.step}", True)

    def _follow(self, version: int) -> None:
        c, config = self.c, self.c.config
        publish(c, version)
        if version == config.trainer.steps or due(version, config.validation.every):
            evaluate_drawn(c, self.recorder, version)

    def _save(self, version: int, drawn: Drawn | None) -> None:
        """This team's part of the checkpoint of step `version`, if there is one."""
        if may_save(self.c.config, version):
            files = None if drawn is None else partial(drawn.files, self.c.layout)
            self.checkpoints.after_step(version, last=version == self.c.config.trainer.steps, files=files)
        else:
            self.checkpoints.poll()


def find_drawn(c: Controller, source: Path) -> Drawn | None:
    """What the checkpoint has for the step after its own, this replica's share; None: nothing, or not for this team."""
    from megarl.runtime.drawn import read_drawn
    from megarl.training.checkpoint import read_state

    saved = read_state(source).get("drawn")
    if saved is None or not draws_apart(c):
        return None
    return read_drawn(source, saved["parts"], c.layout, c.team.placement.given_by(c.team.plan.name))
