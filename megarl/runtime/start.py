"""The start of a run: cold start or resume, and the models built from the weights that RL starts from."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from megarl.algorithms.needs import whole_vocabulary
from megarl.config.correction import describe_correction
from megarl.config.run import RunConfig
from megarl.dag.draw import as_svg
from megarl.dag.messages import RunStart
from megarl.dag.node import Role
from megarl.data.curriculum import CurriculumLoader
from megarl.runtime import sft
from megarl.runtime.checkpoint_part import CheckpointPart
from megarl.runtime.checkpoints import Checkpoints
from megarl.runtime.cold_start import ColdStartCheckpoints
from megarl.runtime.exchange import TokenExchange
from megarl.runtime.frozen_models import keep_run_start, record_base, record_frozen
from megarl.runtime.rank_state import RankState, TeamContext
from megarl.runtime.replay import ReplayStore
from megarl.runtime.role_models import (
    make_critic,
    make_further,
    make_reference,
    make_reward_model,
    make_teacher,
    read_other_head,
)
from megarl.runtime.setup import build_rank_state
from megarl.system.offload_schedule import ACTOR
from megarl.system.processes import write_atomically
from megarl.system.tracing import phase

if TYPE_CHECKING:
    from megarl.dag.graph import TaskGraph
    from megarl.data.batch import Batch
    from megarl.runtime.roles import ModelRole


def token_exchange(c: RankState, graph: TaskGraph) -> Callable[..., Batch] | None:
    """Return the function that balances samples over the team's replicas by tokens; None: no balancing."""
    return TokenExchange(graph, c.team.plan.nodes).share if c.context.cuts is not None else None


def build_team(config: RunConfig, run_dir: Path, graph: TaskGraph, team: TeamContext) -> RankState:
    """Build the state of a rank of any team of a training run. Collective over the team."""
    c = build_rank_state(config, run_dir, team)
    c.context.resting = config.critic.warmup_steps if Role.CRITIC in graph.roles else 0
    if team.leads and not graph.has_responses and c.layout.rank == 0:
        print("rollout correction:", *describe_correction(config), sep="\n  ", flush=True)
    if team.leads and config.data.replay is not None:
        c.context.replay = ReplayStore(config.data.replay)
    if team.holds(Role.ROLLOUT):
        c.context.scores = config.task.open_scores(config, c.layout)
        c.context.curriculum = c.loader if isinstance(c.loader, CurriculumLoader) else None
    return c


def find_start(c: RankState, graph: TaskGraph, checkpoints: Checkpoints) -> RunStart:
    """Run the cold start or choose the checkpoint to resume from, and return where RL starts, with which weights.

    Of the checkpoints only step 0 is loaded here; a later one is loaded when all models are built.

    The result of a cold start is saved before reference and critic are built from it, so a run that resumes from this
    checkpoint builds them in the same way. An interrupted cold start continues from its own checkpoint.
    """
    config = c.config
    resumed_at = checkpoints.find("trainer.steps", config.trainer.steps)
    record_base(c, ACTOR, checkpoints.source)
    if resumed_at is None and config.sft.steps:
        examples = sft.load_examples(c)
        unfinished = ColdStartCheckpoints(c, examples)
        unfinished.find()
        prepare_run_folder(c, graph, checkpoints)
        sft.cold_start(c, examples, unfinished)
        examples.close()
    if not c.team.holds(Role.ROLLOUT):
        c.end_generation()
    c.actor.reset_optimizer(config.actor.optim, config.updates(config.actor, c.context.resting))
    if resumed_at is None and config.sft.steps:
        checkpoints.save_start()
        unfinished.clear()
    elif checkpoints.source is not None and resumed_at == 0:
        with phase("resume"):
            checkpoints.load(checkpoints.source)
    return keep_run_start(c, resumed_at, checkpoints.source)


def set_schedule_lengths(c: RankState) -> None:
    """Set the length of learning rate schedules that span the whole run: updates already made plus updates to come.

    The recipe may have changed the number of updates per step since the checkpoint, so the total cannot be computed
    from the number of steps.
    """
    for name, engine in c.trained.items():
        role = c.config.training_of(name)
        resting = 0 if name == Role.CRITIC.value else c.context.resting
        engine.total_steps = engine.step + c.config.updates_after(c.context.step, role, resting)


def make_models(c: RankState, start: RunStart) -> None:
    """Build this team's models that depend on where RL starts: reference, teacher, reward model, critic and further
    models."""
    makers: dict[Role, Callable[[], ModelRole]] = {
        Role.REFERENCE: lambda: make_reference(c, start),
        Role.TEACHER: lambda: make_teacher(c, start),
        Role.REWARD_MODEL: lambda: make_reward_model(c, start.source),
        Role.CRITIC: lambda: make_critic(c, start.initial, start.source),
    }
    for role, make in makers.items():
        if c.team.holds(role):
            c.held[role.value] = make()
    for role in c.team.plan.roles:
        if role.is_further:
            c.held[role.value] = make_further(c, role.value, start)
    if c.team.holds(Role.ACTOR) and (field := whole_vocabulary(c.config.algorithm)) is not None:
        c.actor.engine.teacher_weight, c.actor.engine.teacher_cap = read_other_head(c, start, field)
    if c.context.scores is not None and (encoder := c.context.scores.encoder) is not None:
        record_frozen(c, "encoder", *encoder, start.source)


def prepare_run_folder(c: RankState, graph: TaskGraph, checkpoints: CheckpointPart) -> None:
    """Prepare the run folder (`Checkpoints.begin`) and write graph.svg; call after all checks of the start."""
    checkpoints.begin()
    if c.team.leads and c.layout.rank == 0:
        write_atomically(c.run_dir / "graph.svg", as_svg(graph, c.team.placement))  # shown in the report
