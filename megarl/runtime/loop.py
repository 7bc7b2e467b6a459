"""The training loop around a task graph. Every rank runs it by itself; the steps of a rollout in a team of its own are
in megarl.disaggregated.in_order_loop:

resume or cold start (the team of the actor; the others are told)
publish the weights to where samples are drawn, validate
for each step:   load prompts -> walk the graph -> publish -> [validate] -> [checkpoint] -> log
export, report
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from megarl.config.correction import describe_correction
from megarl.config.run import RunConfig
from megarl.dag.draw import as_svg
from megarl.dag.executor import Executor
from megarl.dag.node import Role
from megarl.disaggregated.as_ready_loop import FlowSteps, find_flow, flows
from megarl.disaggregated.checkpoint_part import CheckpointPart
from megarl.disaggregated.in_order_loop import RolloutSteps, draws_apart, find_drawn
from megarl.disaggregated.rollout_team import resume_loader, share_loader
from megarl.disaggregated.start import RunStart, all_ready, announce_start, follow_start
from megarl.disaggregated.team import OwnTeam
from megarl.disaggregated.weight_updates import AsReadyUpdates, InOrderUpdates
from megarl.processes import write_atomically
from megarl.runtime import sft
from megarl.runtime.checkpoints import FOLDER, Checkpoints, SavedRun
from megarl.runtime.critic import make_critic
from megarl.runtime.episode_scores import EpisodeScores
from megarl.runtime.exchange import TokenExchange
from megarl.runtime.export import export, show_export
from megarl.runtime.frozen import record_frozen
from megarl.runtime.generation import open_rollout, publish
from megarl.runtime.recorder import Recorder
from megarl.runtime.reference import drop_refused_start, make_reference
from megarl.runtime.setup import build_controller
from megarl.runtime.stages.reward import PENDING
from megarl.runtime.teacher import make_teacher
from megarl.runtime.validate import evaluate_drawn, validates
from megarl.tracing import phase, set_step

if TYPE_CHECKING:
    from megarl.dag.graph import TaskGraph
    from megarl.disaggregated.buffer.channel import TeamCrossing
    from megarl.runtime.controller import Controller
    from megarl.runtime.roles import ModelRole
    from megarl.tracking.tracker import Part


def train(config: RunConfig, run_dir: Path, graph: TaskGraph) -> None:
    """Train with a recipe's task graph until `trainer.steps`, from the newest checkpoint when there is one."""
    c = build_controller(config, run_dir, OwnTeam.of_graph(config, graph))
    c.context.resting = config.critic.warmup_steps if Role.CRITIC in graph.roles else 0
    if c.team.leads and c.layout.rank == 0:
        print("rollout correction:", *describe_correction(config), sep="\n  ", flush=True)
    if config.robot is not None and c.team.holds(Role.ROLLOUT):
        c.context.scores = EpisodeScores.of(config, c.layout)
    try:
        share_loader(c)
        checkpoints: Checkpoints | CheckpointPart
        if c.team.leads:
            checkpoints = Checkpoints(c, graph.roles)
            start = _find_start(c, graph, checkpoints)
        else:
            checkpoints = CheckpointPart(c)
            start = follow_start(c)
        _make_models(c, start)
        open_rollout(c)
        source = None if start.source is None else Path(start.source)
        if source is not None:
            _resume(c, checkpoints, source, begun=start.begun)
        all_ready(c)
        _begin(c, graph, checkpoints)
        part: Part = "second" if config.sft.steps else "whole"
        # Opened last: a start that is refused leaves the run's record as it was. Step 0 is measured again.
        shown_from = -1 if start.resumed_at == 0 else start.resumed_at
        with Recorder(c, "train", config.trainer.steps, shown_from, part) as recorder:
            publish(c, c.context.step)
            if not start.begun and not c.team.finished:
                _before_first_step(c, recorder, checkpoints)
            if draws_apart(c):
                assert isinstance(checkpoints, CheckpointPart), "the actor's team leads"
                if flows(c):
                    _flow(c, graph, recorder, checkpoints, source)
                else:
                    _steps_apart(c, graph, recorder, checkpoints, source)
            else:
                recorder.crossing = crossing = _crossing(c, graph)
                executor = _executor(c, graph, crossing)
                _steps(c, executor, recorder, checkpoints, crossing)
            if checkpoints.ends:
                recorder.status = "stopped"
            else:
                export(c, run_dir / FOLDER)
        if c.team.leads and not checkpoints.ends:
            show_export(c)
    finally:
        drop_refused_start(c)
        c.close()


def _find_start(c: Controller, graph: TaskGraph, checkpoints: Checkpoints) -> RunStart:
    """Bring the actor to where RL begins, by a cold start or from the checkpoint that one left; and tell where that is.

    That checkpoint is written before anything else can fail. What is made after it (reference, critic) is made from the
    actor, so a run that resumes there makes it again, and is the same run.
    """
    config = c.config
    resumed_at = checkpoints.find("trainer.steps", config.trainer.steps)
    if resumed_at is None and config.sft.steps:
        examples = sft.load_examples(c)
        _begin(c, graph, checkpoints)
        sft.cold_start(c, examples)
    if not c.team.holds(Role.ROLLOUT):
        c.end_drawing()
    c.actor.reset_optimizer(config.actor.optim, config.updates(config.actor, c.context.resting))
    if resumed_at is None and config.sft.steps:
        checkpoints.save_start()
    elif checkpoints.source is not None and resumed_at == 0:
        with phase("resume"):
            checkpoints.load(checkpoints.source)
    return announce_start(c, resumed_at, checkpoints.source)


def _make_models(c: Controller, start: RunStart) -> None:
    """This team's models that follow from where RL starts."""
    makers: dict[Role, Callable[[], ModelRole]] = {
        Role.REFERENCE: lambda: make_reference(c, start),
        Role.TEACHER: lambda: make_teacher(c, start),
        Role.CRITIC: lambda: make_critic(c, start.critic),
    }
    for role, make in makers.items():
        if c.team.holds(role):
            c.held[role.value] = make()
    if c.context.scores is not None and (encoder := c.context.scores.encoder) is not None:
        record_frozen(c, "encoder", *encoder, start.source)


def _crossing(c: Controller, graph: TaskGraph) -> TeamCrossing | None:
    """What goes between this rank's team and others; None: there are no others."""
    team = c.team
    if team.store is None:
        return None
    from megarl.disaggregated.buffer.channel import TeamCrossing

    keeps = draws_apart(c) and c.config.async_.max_staleness > 0  # for checkpoints
    place, dealt = (c.layout.dp_rank, c.layout.is_lead), c.config.placement.share == "dealt"
    stays = team.plan.may_restart
    return TeamCrossing(graph, team.placement, team.store, *place, keeps=keeps, dealt=dealt, stays=stays)


def _executor(c: Controller, graph: TaskGraph, crossing: TeamCrossing | None) -> Executor:
    """Walks this team's nodes, step by step."""
    nodes = c.team.plan.nodes
    exchange = TokenExchange(graph, nodes) if c.context.cuts is not None else None
    return Executor(graph, c.roles, nodes, crossing, exchange)


def _flow(
    c: Controller,
    graph: TaskGraph,
    recorder: Recorder,
    checkpoints: CheckpointPart,
    source: Path | None,
) -> None:
    """What a rollout's team does whose samples go to training as they get ready."""
    from megarl.disaggregated.buffer.channel import PoolCrossing

    team = c.team
    assert team.store is not None, "there are other teams"
    recorder.crossing = crossing = PoolCrossing(team.placement, team.store, c.layout.is_lead)
    nodes = team.plan.nodes[1:]
    waiting = next((place for place, id in enumerate(nodes) if PENDING in graph[id].declared.consumes), len(nodes))
    executor, scored = (Executor(graph, c.roles, some, crossing) for some in (nodes[:waiting], nodes[waiting:]))
    held = None if source is None else find_flow(source)
    FlowSteps(c, executor, scored, crossing, recorder, checkpoints, held).run()


def _steps_apart(
    c: Controller,
    graph: TaskGraph,
    recorder: Recorder,
    checkpoints: CheckpointPart,
    source: Path | None,
) -> None:
    """The steps of a rollout's team of its own, in order."""
    recorder.crossing = crossing = _crossing(c, graph)
    assert crossing is not None, "there are other teams"
    executor = _executor(c, graph, crossing)
    held = [] if source is None else find_drawn(c, source, c.context.step)
    RolloutSteps(c, executor, crossing, recorder, checkpoints, held).run()


def _begin(c: Controller, graph: TaskGraph, checkpoints: SavedRun) -> None:
    """Before a record is opened, and after all that may refuse the start: the run folder is that of this start now."""
    checkpoints.begin()
    if c.team.leads and c.layout.rank == 0:
        write_atomically(c.run_dir / "graph.svg", as_svg(graph, c.team.placement))  # shown in the report


def _resume(c: Controller, checkpoints: SavedRun, source: Path, *, begun: bool) -> None:
    """What this team has of the checkpoint that the run goes on from; the actor of a cold start has been loaded."""
    with phase("resume"):
        if begun:
            checkpoints.load(source)
        resume_loader(c, source)


def _before_first_step(c: Controller, recorder: Recorder, checkpoints: SavedRun) -> None:
    """Held-out numbers of the model that RL starts from."""
    if not (c.config.validation.before_train and c.config.data.val_files):
        return
    set_step(0)
    recorder.start_step()
    with phase("step"):
        evaluate_drawn(c, recorder, 0)
    checkpoints.rate_start(recorder.end_step(0))


def _steps(
    c: Controller, executor: Executor, recorder: Recorder, checkpoints: SavedRun, crossing: TeamCrossing | None
) -> None:
    config = c.config
    weights: AsReadyUpdates | InOrderUpdates | None = None  # other teams than the actor's have none to give
    if c.team.leads and flows(c):
        weights = AsReadyUpdates(c)
        recorder.drawn = weights.metrics
    elif c.team.leads:
        weights = InOrderUpdates(c)
    for step in range(c.context.step + 1, config.trainer.steps + 1):
        c.context.step = step
        set_step(step)
        last = step == config.trainer.steps
        accuracy = None
        recorder.start_step()
        with phase("step"):
            prompts = None
            if c.loader is not None:
                with phase("load"):
                    prompts = next(c.loader)
            if weights is not None:
                weights.before_step(step)
            executor.run(c.context, prompts, more=c.loader)
            if weights is not None:
                weights.after_step(step, saves=checkpoints.may_save(step))
            if validates(config, step):
                accuracy = evaluate_drawn(c, recorder, step)
        numbers = recorder.end_step(step)
        if crossing is not None:
            crossing.done(step)
        checkpoints.after_step(step, numbers, accuracy, last=last)
        if checkpoints.ends:
            break
