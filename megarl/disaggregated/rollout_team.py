"""The loader and the validation of a separate rollout team, which the actor's team needs, too.

megarl/dag/messages.py shows the messages. The engine's links (megarl/rollout/<engine>/links.py) receive weights.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megarl.dag.messages import LoaderAtStart, LoaderPlace, StepIsLast, Validated
from megarl.dag.stage import Role
from megarl.dag.staleness import StalenessPolicy, policy_of
from megarl.data.loader import refuse_other_data
from megarl.runtime.recorder import VALIDATE, Recorder
from megarl.runtime.validate import evaluate, may_be_last, validate
from megarl.system.metrics import Metrics
from megarl.system.tracing import phase
from megarl.training.checkpoint import read_state

if TYPE_CHECKING:
    from megarl.dag.messages import Mail
    from megarl.runtime.context import StepContext
    from megarl.runtime.rank_state import RankState


# -- the loader, which the actor's team writes into checkpoints ------------------------------------------------------


class RemoteLoader:
    """The rollout team's loader, whose position is part of the actor team's checkpoints.

    Args:
        context: `state_dict` returns the loader's state for the current step of `context`.
        team: name of the rollout team.
        policy: staleness policy if `async.order` is in_order; None: only saved steps have a state.
    """

    def __init__(self, context: StepContext, mail: Mail, team: str, policy: StalenessPolicy | None = None) -> None:
        self._context, self._mail, self._team, self._step = context, mail, team, 0
        self._policy = policy
        self._state = LoaderAtStart.read(mail).state

    def state_dict(self) -> dict[str, Any]:
        """Wait for the loader's state for the checkpoint of the current step, and return it."""
        if self._context.step != self._step:
            self._step = self._context.step
            generated = self._step + (0 if self._policy is None else self._policy.steps_ahead(self._step))
            with phase("await_loader", waits_for=self._team):
                self._state = LoaderPlace.read(self._mail, generated).state
        return self._state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Set the state that `state_dict` returns until the next step; see `PromptLoader.load_state_dict`."""
        self.check_state(state)
        self._step, self._state = self._context.step, state

    def check_state(self, state: dict[str, Any]) -> None:
        """Raise a DataError unless a state belongs to this run's data; see `PromptLoader.check_state`."""
        refuse_other_data(self._state, state)


def share_loader(c: RankState) -> None:
    """Send the loader's state from a separate rollout team to the actor's team, which needs it to choose a checkpoint.

    Every team calls this function.
    """
    if c.team.generates_apart and c.layout.rank == 0:
        LoaderAtStart(_loader_state(c)).post(c.mail)
    elif c.team.leads and c.team.generates_elsewhere:
        with phase("await_loader", waits_for=c.team.of(Role.ROLLOUT)):
            policy = policy_of(c.config) if c.config.async_.in_order else None
            c.loader_elsewhere = RemoteLoader(c.context, c.mail, c.team.of(Role.ROLLOUT), policy)


def post_loader_place(c: RankState) -> None:
    """Post the loader's state after the current step, for a checkpoint. Only the rollout team calls this."""
    if c.layout.rank == 0:
        LoaderPlace(c.context.step, _loader_state(c)).post(c.mail)


def resume_loader(c: RankState, checkpoint: Path) -> None:
    """Restore the loader from `checkpoint` in a separate rollout team; do nothing in other teams."""
    if c.team.generates_apart:
        assert c.loader is not None, "the team that generates has the data"
        c.loader.load_state_dict(read_state(checkpoint)["loader"])


def _loader_state(c: RankState) -> dict[str, Any]:
    assert c.loader is not None, "checks refuse a training run without data"
    return c.loader.state_dict()


# -- held-out evaluation ----------------------------------------------------------------------------------------------


def evaluate_step(c: RankState, recorder: Recorder, step: int) -> float | None:
    """Validate in the team that generates; return the accuracy there and in the actor's team, None in other teams.

    Every team calls this function at a validation step.
    """
    if c.team.leads and not c.team.generates_elsewhere:
        return evaluate(c, recorder, step, films=True)
    if c.team.leads:
        with phase("await_validation", waits_for=c.team.of(Role.ROLLOUT)):
            validated = Validated.read_together(c.mail, step)
        recorder.samples(step, validated.rows)
        # The rollout team has reduced these metrics over its ranks, so only one rank of this team adds them.
        if c.layout.rank == 0:
            c.context.metrics.merge(Metrics.from_json(validated.metrics))
        return validated.accuracy
    if not c.team.holds(Role.ROLLOUT):
        return None
    begun = time.perf_counter()
    result = validate(c)
    assert result is not None, "the generating team has the held-out prompts"
    result.metrics.max(f"timing_s/{VALIDATE}", time.perf_counter() - begun)
    metrics = c.layout.dp_group.reduce_metrics(result.metrics)
    accuracy = metrics.result()["val/acc"]
    if c.layout.rank == 0:
        Validated(step, accuracy, metrics.to_json(), result.rows).post(c.mail)
    return accuracy


def post_last(c: RankState, step: int, early: bool) -> None:
    """Post for a separate rollout team whether `early_stop` ends the run at `step`. The actor's team calls this."""
    if c.layout.rank == 0 and c.team.generates_elsewhere and may_be_last(c.config, step):
        StepIsLast(step, early).post(c.mail)


def evaluate_last(c: RankState, recorder: Recorder, step: int) -> None:
    """Validate after `step` in a separate rollout team, if `trainer.early_stop` ends the run there.

    Call it after the team has sent its metrics of the step: the actor's team needs them to decide whether the run ends.
    """
    if not may_be_last(c.config, step):
        return
    with phase("await_last", waits_for=c.team.of(Role.ACTOR)):
        last = StepIsLast.read_together(c.mail, step).last
    if last:
        evaluate_step(c, recorder, step)
