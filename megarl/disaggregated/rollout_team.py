"""The rollout role in a team of its own: weights, the loader's place and held-out evaluation (megarl/dag/messages.py).

The actor's team pushes weights to an embedded engine first, and posts `WeightsPushed` then: who reads the message finds
the weights in the inbox.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megarl.dag.messages import EngineAddresses, LoaderAtStart, LoaderPlace, StepIsLast, Validated, WeightsPushed
from megarl.dag.stage import Role
from megarl.dag.staleness import StalenessPolicy, policy_of
from megarl.data.loader import refuse_other_data
from megarl.rollout.embedded.engine import EmbeddedEngine
from megarl.rollout.embedded.inbox import PushedWeights, WeightInbox
from megarl.rollout.embedded.receiver import EngineReceivers
from megarl.runtime.recorder import VALIDATE, Recorder
from megarl.runtime.validate import evaluate, may_be_last, validate
from megarl.sync.updater import SyncReport, WeightSync
from megarl.system.device import has_cuda
from megarl.system.errors import ConfigError, ServerError, WorkerError
from megarl.system.metrics import Metrics
from megarl.system.processes import LOOPBACK
from megarl.system.rendezvous import run_key
from megarl.system.tracing import phase
from megarl.training.checkpoint import read_state

if TYPE_CHECKING:
    from megarl.config.run import RunConfig
    from megarl.dag.messages import Mail
    from megarl.runtime.context import StepContext
    from megarl.runtime.rank_state import RankState

_KEY = "weights of engines"


# -- weights: the engine's end ----------------------------------------------------------------------------------------


def open_engine(c: RankState) -> PushedWeights:
    """Take weights for this team's engine from the actor's team, and tell it where. Collective over the rollout's team.

    Each replica is a receiver of its own; replicas that share experts are one.

    Raises:
        ConfigError: replicas that share experts are on several machines.
    """
    config, layout, engine = c.config, c.layout, c.rollout.engine
    assert isinstance(engine, EmbeddedEngine), "servers take weights by themselves"
    group = layout.world if config.parallel_of("rollout").ep > 1 else layout.mp_group
    inbox = WeightInbox(engine.chunks, run_key(c.run_dir, _KEY), group, address_of_worker(config))
    found: list[list[Any]] = layout.world.all_gather_json([group.ranks[0], *inbox.address])
    engines = [[address for first, *address in found if first == lead] for lead in sorted({lead for lead, *_ in found})]
    apart = next((ranks for ranks in engines if len({host for host, _ in ranks}) > 1), None)
    if apart is not None:
        raise ConfigError(
            "the ranks of a replica, and replicas that share experts, have to be on one machine to take weights",
            where="placement.teams",
            found=", ".join(sorted({host for host, _ in apart})),
            fix="set rollout.parallel so that a replica fits on one machine, with ep=1",
        )
    if layout.rank == 0:
        EngineAddresses(engines).post(c.mail)
    return PushedWeights(engine, inbox, config.sync.timeout_s)


def address_of_worker(config: RunConfig) -> str:
    """Address at which the other teams' workers reach this one."""
    if config.cluster.nnodes == 1:
        return LOOPBACK[0]
    import ray

    return str(ray.util.get_node_ip_address())


def follow_weights(pushed: PushedWeights, version: int, mail: Mail, trainer: str) -> None:
    """Generate with `version`, which the team `trainer` pushes, from here on. Collective over the rollout's team."""
    with phase("await_weights", waits_for=trainer):
        WeightsPushed.read(mail, version)
        pushed.follow(version)


# -- weights: the trainer's end ---------------------------------------------------------------------------------------


def connect_engines(c: RankState) -> WeightSync:
    """Connect to the engines of the rollout's team, to send them weights. Collective over the actor's team.

    Raises:
        WorkerError: on every rank alike: an engine does not answer.
    """
    key = run_key(c.run_dir, _KEY)
    with phase("connect_engines"):
        engines = [[(str(host), int(port)) for host, port in ranks] for ranks in EngineAddresses.read(c.mail).engines]
        alone = "a worker of another team sees its own GPU only, so it cannot map the trainer's memory"
        receivers, why = None, None
        try:
            receivers = EngineReceivers.connect(
                engines, key, c.hf_config, c.config.sync.timeout_s, cannot_map=alone if has_cuda() else ""
            )
        except ServerError as error:
            why = str(error)
        whys = [text for text in c.layout.world.all_gather_json(why) if text is not None]
        if receivers is None or whys:
            raise WorkerError(whys[0])
        return WeightSync(c.actor.chunks, receivers, c.config.sync, c.run_dir, c.layout.world, c.config.model.freeze)


def push_weights(c: RankState, version: int) -> SyncReport:
    """Push the actor's weights to the engines, and tell the rollout's team. Collective over the actor's team.

    Raises:
        WorkerError: an engine did not take them: the rollout's team can generate nothing, and with it the run ends.
    """
    report = c.sync.push(version)
    if report.failed:
        raise WorkerError(
            f"the team of the rollout did not take version {version} of the weights:\n"
            + "\n".join(why for _, why in sorted(report.failed.items()))
        )
    if c.layout.rank == 0:
        WeightsPushed(version).post(c.mail)
    return report


# -- the loader, as the team sees it that keeps checkpoints -----------------------------------------------------------


class RemoteLoader:
    """The loader of the rollout's team: where it stands is part of the checkpoints of the actor's team.

    Args:
        context: of this rank; its step says which state is asked for.
        policy: by which it runs ahead, in order; None: it tells where it stands at a step that may be saved.
    """

    def __init__(self, context: StepContext, mail: Mail, team: str, policy: StalenessPolicy | None = None) -> None:
        self._context, self._mail, self._team, self._step = context, mail, team, 0
        self._policy = policy
        self._state = LoaderAtStart.read(mail).state

    def state_dict(self) -> dict[str, Any]:
        """As `PromptLoader.state_dict`, after the last step that is generated when this one is trained; waits for
        it."""
        if self._context.step != self._step:
            self._step = self._context.step
            generated = self._step + (0 if self._policy is None else self._policy.steps_ahead(self._step))
            with phase("await_loader", waits_for=self._team):
                self._state = LoaderPlace.read(self._mail, generated).state
        return self._state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """As `PromptLoader.load_state_dict`, for the step that the context has: the rollout's team begins there."""
        self.check_state(state)
        self._step, self._state = self._context.step, state

    def check_state(self, state: dict[str, Any]) -> None:
        """As `PromptLoader.check_state`."""
        refuse_other_data(self._state, state)


def share_loader(c: RankState) -> None:
    """Before a checkpoint is looked for: the actor's team learns what the rollout's loader generates from.

    Every team calls; where one holds both roles there is nothing to tell.
    """
    if c.team.generates_apart and c.layout.rank == 0:
        LoaderAtStart(_state_of(c)).post(c.mail)
    elif c.team.leads and c.team.generates_elsewhere:
        with phase("await_loader", waits_for=c.team.of(Role.ROLLOUT)):
            policy = policy_of(c.config) if c.config.async_.in_order else None
            c.loader_elsewhere = RemoteLoader(c.context, c.mail, c.team.of(Role.ROLLOUT), policy)


def tell_loader(c: RankState) -> None:
    """After the walk of a step: where the rollout's loader stands, for a checkpoint. Its team calls."""
    if c.layout.rank == 0:
        LoaderPlace(c.context.step, _state_of(c)).post(c.mail)


def resume_loader(c: RankState, checkpoint: Path) -> None:
    """Go on where the loader stood at `checkpoint`, in a rollout's team of its own; in others nothing is to be done."""
    if c.team.generates_apart:
        assert c.loader is not None, "the team that generates has the data"
        c.loader.load_state_dict(read_state(checkpoint)["loader"])


def _state_of(c: RankState) -> dict[str, Any]:
    assert c.loader is not None, "checks refuse a training run without data"
    return c.loader.state_dict()


# -- held-out evaluation ----------------------------------------------------------------------------------------------


def evaluate_teams(c: RankState, recorder: Recorder, step: int) -> float | None:
    """Evaluate in the team that generates, and tell the actor's team; return the accuracy in these two.

    Every team calls at a validation step.
    """
    if c.team.leads and not c.team.generates_elsewhere:
        return evaluate(c, recorder, step, films=True)
    if c.team.leads:
        with phase("await_validation", waits_for=c.team.of(Role.ROLLOUT)):
            validated = Validated.read(c.mail, step)
        recorder.samples(step, validated.rows)
        if c.layout.rank == 0:  # reduced over all ranks
            c.context.metrics.merge(Metrics.from_json(validated.metrics))
        return validated.accuracy
    if not c.team.holds(Role.ROLLOUT):
        return None
    begun = time.perf_counter()
    result = validate(c)
    assert result is not None, "the team that generates has the held-out prompts"
    result.metrics.max(f"timing_s/{VALIDATE}", time.perf_counter() - begun)
    metrics = c.layout.dp_group.reduce_metrics(result.metrics)
    accuracy = metrics.result()["val/acc"]
    if c.layout.rank == 0:
        Validated(step, accuracy, metrics.to_json(), result.rows).post(c.mail)
    return accuracy


def tell_last(c: RankState, step: int, early: bool) -> None:
    """After the walk of `step`: the rollout's team learns whether `step` is the last one. The actor's team calls."""
    if c.layout.rank == 0 and c.team.generates_elsewhere and may_be_last(c.config, step):
        StepIsLast(step, early).post(c.mail)


def evaluate_last(c: RankState, recorder: Recorder, step: int) -> None:
    """Evaluate after `step` in a rollout's team of its own, where a metric of training makes it the last step.

    Comes after this team's record of the step, which the actor's team decides by.
    """
    if not may_be_last(c.config, step):
        return
    with phase("await_last", waits_for=c.team.of(Role.ACTOR)):
        last = StepIsLast.read(c.mail, step).last
    if last:
        evaluate_teams(c, recorder, step)
