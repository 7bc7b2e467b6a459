"""The training loop around a task graph. Every rank of every team runs it.

    actor's team                                    other teams, if there are any
    resume, or cold start                           the same start (`RunStart`)
    make models, open the engine                    make models, open the engine
    wait until all teams are ready publish the weights to where samples are generated, validate
    for each step:                                  for each step:
      load prompts -> walk the graph -> publish       walk the team's nodes
      -> [validate] -> [checkpoint] -> log            -> [part of the checkpoint] -> send metrics
    export, report

A run with one team walks the whole graph and sends no messages. A separate rollout team runs another loop
(in_order_loop.py, as_ready_loop.py). megarl/dag/messages.py shows the messages between teams, and who waits for whom. A
team that is restarted because one of its processes died (`TeamContext.restarts`) reads the same `RunStart` and
continues after the last finished step; no other team waits until it is ready.
"""

from __future__ import annotations

import os
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from megarl.config.run import RunConfig
from megarl.dag.executor import Executor, NoChannel
from megarl.dag.messages import RunStart, TeamReady
from megarl.dag.placement import begins_again, place
from megarl.dag.stage import Role
from megarl.disaggregated.as_ready_loop import AsReadyLoop, find_buffered_groups
from megarl.disaggregated.buffer.channel import GroupChannel, TeamChannel
from megarl.disaggregated.buffer.client import BufferClient
from megarl.disaggregated.in_order_loop import InOrderLoop, find_buffered_steps
from megarl.disaggregated.rollout_team import evaluate_step, post_last, resume_loader, share_loader
from megarl.disaggregated.weight_updates import AsReadyUpdates, InOrderUpdates, WeightUpdates, generates_with
from megarl.runtime.checkpoint_part import FOLDER, CheckpointPart, finishing_save
from megarl.runtime.checkpoints import Checkpoints
from megarl.runtime.export import export, show_export
from megarl.runtime.frozen_models import drop_refused_start
from megarl.runtime.generation import open_rollout, publish
from megarl.runtime.rank_state import RankState, TeamContext
from megarl.runtime.recorder import Recorder
from megarl.runtime.samples import refuse_failed_step
from megarl.runtime.stages.reward import PENDING
from megarl.runtime.start import (
    build_team,
    find_start,
    make_models,
    prepare_run_folder,
    set_schedule_lengths,
    token_exchange,
)
from megarl.runtime.validate import validates
from megarl.system.errors import ConfigError
from megarl.system.processes import BUFFER, FINISHED, RESTARTS, TEAM
from megarl.system.tracing import phase, set_step

if TYPE_CHECKING:
    from megarl.dag.graph import TaskGraph
    from megarl.tracking.tracker import Part


def join_run(config: RunConfig, graph: TaskGraph) -> TeamContext:
    """Return this worker's team; if the run has several teams, connect to the buffer.

    Raises:
        ConfigError: the run has several teams, but the launcher started only one.
        HandoverError: the buffer of the run does not answer.
    """
    placement = place(graph, config)
    if not placement.separate:
        return TeamContext(placement.teams[0], placement)
    if TEAM not in os.environ:
        raise ConfigError(
            "this run has several teams, but the launcher started only one",
            where="placement",
            found=", ".join(f"{team.name} {team.devices}" for team in placement.teams),
            fix="start it with --launcher local or ray, or leave placement out",
        )
    name, rank = os.environ[TEAM], int(os.environ["RANK"])
    restarts, finished = (int(os.environ.get(variable, "0")) for variable in (RESTARTS, FINISHED))
    buffer = BufferClient.connect(os.environ[BUFFER], name, rank, config.cluster.timeout_s, restarts)
    plan = placement[name]
    return TeamContext(plan, placement, buffer, restarts, finished, begins_again(config, plan))


def train(config: RunConfig, run_dir: Path, graph: TaskGraph) -> None:
    """Train this team's part of a task graph until `trainer.steps`, from the newest checkpoint when there is one."""
    c = build_team(config, run_dir, graph, join_run(config, graph))
    if c.team.placement.separate:
        c.buffer.join_team(c.layout.world)
    try:
        share_loader(c)
        checkpoints: CheckpointPart
        if c.team.leads:
            checkpoints = lead = Checkpoints(c, graph.roles)
            start = find_start(c, graph, lead)
            if c.layout.rank == 0:
                start.post(c.mail)
        else:
            checkpoints = CheckpointPart(c)
            start = follow_start(c)
        make_models(c, start)
        open_rollout(c)
        if start.source is not None:
            resume(c, checkpoints, Path(start.source), begun=start.begun)
        all_ready(c)
        prepare_run_folder(c, graph, checkpoints)
        part: Part = "second" if config.sft.steps else "whole"
        # The recorder is opened after all checks, so that a start that fails them does not change the run's record.
        with Recorder(c, "train", config.trainer.steps, start.recorded_until, part) as recorder:
            publish(c, c.context.step)
            if not start.begun and not c.team.finished and config.validation.before_train and config.data.held_out:
                checkpoints.rate_step_0(_validate_first(c, recorder))
            with finishing_save(checkpoints):
                if c.team.generates_apart:
                    _generate_apart(c, graph, recorder, checkpoints, start)
                else:
                    _steps(c, graph, recorder, checkpoints)
            if checkpoints.must_stop:  # the run saved because its job ends; it exports nothing
                recorder.status = "stopped"
            else:
                export(c, c.run_dir / FOLDER)
        if c.team.leads and not checkpoints.must_stop:
            show_export(c)
    finally:
        drop_refused_start(c)
        c.close()


def follow_start(c: RankState) -> RunStart:
    """Wait until the actor's team has posted where the run begins, and return its message."""
    with phase("await_start", waits_for=c.team.of(Role.ACTOR)):
        start = RunStart.read_together(c.mail)
    c.context.step = max(start.resumed_at or 0, c.team.finished)
    return start


def all_ready(c: RankState) -> None:
    """Wait until every team has loaded its models. Collective over a team.

    The actor's team reads `TeamReady` from each other team, with the checksums of its frozen models.
    """
    c.layout.world.barrier()
    if not c.team.leads:
        if c.layout.rank == 0:
            TeamReady(c.team.plan.name, c.frozen).post(c.mail)
        return
    for team in c.team.others:
        with phase("await_teams", waits_for=team.name):
            c.frozen |= TeamReady.read_together(c.mail, team.name).frozen


def resume(c: RankState, checkpoints: CheckpointPart, source: Path, *, begun: bool) -> None:
    """Restore this team's part of the checkpoint at `source`, or only the loader if RL had not `begun` at the
    checkpoint.
    """
    with phase("resume"):
        if begun:
            checkpoints.load(source)
            set_schedule_lengths(c)
        resume_loader(c, source)


def _validate_first(c: RankState, recorder: Recorder) -> dict[str, float]:
    """Validate the model with which RL begins, record this as step 0, and return the metrics."""
    set_step(0)
    recorder.start_step()
    with phase("step"):
        evaluate_step(c, recorder, 0)
    return recorder.end_step(0)


def _steps(c: RankState, graph: TaskGraph, recorder: Recorder, checkpoints: CheckpointPart) -> None:
    """Run this team's nodes for all remaining steps, in any team that is not a separate rollout team."""
    config, weights = c.config, WeightUpdates()
    recorder.channel = channel = _open_channel(c, graph)
    executor = Executor(graph, c.roles, c.team.plan.nodes, channel, token_exchange(c, graph))
    if c.team.leads and not config.async_.in_order:
        weights = as_ready = AsReadyUpdates(c)
        recorder.segments = as_ready.metrics
    elif c.team.leads or generates_with(c):
        weights = InOrderUpdates(c)
    if checkpoints.stopped_early:
        return
    for step in range(c.context.step + 1, config.trainer.steps + 1):
        c.context.step = step
        set_step(step)
        accuracy = None
        recorder.start_step(step)
        with phase("step"):
            prompts = None
            if c.loader is not None:
                with phase("load"):
                    prompts = next(c.loader)
            weights.before_step(step)
            samples = executor.run(c.context, prompts, more=c.loader)
            weights.after_step(step, saves=checkpoints.may_save)
            early = checkpoints.ends_early(step, partial(recorder.measured_elsewhere, step))
            if c.team.leads:
                post_last(c, step, early)
            recorder.groups(step, samples, early=early)
            del samples  # frees memory for the next step
            if validates(config, step, early=early):
                accuracy = evaluate_step(c, recorder, step)
        numbers = recorder.end_step(step)
        if c.team.leads and config.has_turns:
            refuse_failed_step(step, numbers)
        channel.done(step)
        checkpoints.after_step(step, numbers, accuracy, last=step == config.trainer.steps)
        if checkpoints.must_stop or checkpoints.stopped_early:
            break


def _open_channel(c: RankState, graph: TaskGraph) -> TeamChannel | NoChannel:
    """Return the channel through which this rank exchanges samples with other teams."""
    if not c.team.others:
        return NoChannel()
    keeps = c.team.generates_apart and c.config.async_.max_staleness > 0  # checkpoints contain samples of later steps
    return TeamChannel(
        graph,
        c.team.placement,
        c.buffer,
        c.layout.dp_rank,
        c.layout.is_lead,
        keeps=keeps,
        dealt=c.config.placement.share == "dealt",
        stays=c.team.plan.may_restart,
    )


def _generate_apart(
    c: RankState, graph: TaskGraph, recorder: Recorder, checkpoints: CheckpointPart, start: RunStart
) -> None:
    """Run the loop of a separate rollout team until the weights of the last step have arrived."""
    source, team = None if start.source is None else Path(start.source), c.team
    if c.config.async_.in_order:
        channel = _open_channel(c, graph)
        assert isinstance(channel, TeamChannel), "another team trains"
        recorder.channel = channel
        executor = Executor(graph, c.roles, team.plan.nodes, channel, token_exchange(c, graph))
        steps = [] if source is None else find_buffered_steps(c, source, c.context.step)
        InOrderLoop(c, executor, channel, recorder, checkpoints, steps).run()
        return
    recorder.channel = groups = GroupChannel(team.placement, c.buffer, c.layout.is_lead)
    nodes = team.plan.nodes[1:]
    waiting = next((place for place, id in enumerate(nodes) if PENDING in graph[id].declared.consumes), len(nodes))
    before, after = (Executor(graph, c.roles, part, groups) for part in (nodes[:waiting], nodes[waiting:]))
    restored = None if source is None else find_buffered_groups(source)
    AsReadyLoop(c, before, after, groups, recorder, checkpoints, restored).run()
