"""Estimates the host memory that all processes of one machine hold, from sizes.

On a CPU this includes the devices' memory: every rank of the machine counts, and teams work at the same time. In a run
on several machines each machine is assumed to hold its part of every team.
"""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

from megarl.artifacts.facts import ModelFacts
from megarl.config.run import RunConfig
from megarl.dag.placement import Placement, TeamPlan
from megarl.dag.stage import Role
from megarl.dag.staleness import policy_of
from megarl.disaggregated.buffer.size import object_store_bytes
from megarl.planning.memory import (
    Memory,
    device_memory,
    learned_parts,
    offloaded_bytes,
    response_terms,
    server_bytes,
    teacher_states,
)
from megarl.planning.shards import BYTES, GRADIENT, Sizes, layout_key, parameter_bytes, state_bytes
from megarl.planning.terms import Moment, Term, term
from megarl.planning.weight_sync import graphs
from megarl.rewards.runner import reward_processes
from megarl.runtime.policies import policy_models

# Bytes of a worker with torch, Megatron, transformers and MLflow; with 2 million parameters it takes 0.6 to 0.7 GB.
_WORKER = 0.65e9
_GPU_WORKER = 4e9  # bytes of a worker with CUDA's context and libraries; an assumption, not a measurement
_REWARD_WORKER = 0.1e9
_CPU_SERVER = 1.2e9  # bytes of an SGLang server without its model
# Bytes of rows as Python objects, rendered texts and tokens, per byte of a data file (jsonl: 3.4 for the rows).
_DATA = 6.0


def host_memory(config: RunConfig, sizes: Sizes, placement: Placement, *, gpu: bool, job: str = "train") -> Memory:
    """Estimate the host memory of all processes of one machine, from the sizes of each role's model."""
    facts = sizes[Role.ACTOR]
    assert facts is not None, "the policy's sizes must be known"
    ranks = sum(_ranks_here(config, team) for team in placement.teams)
    worker = term(f"{ranks} worker processes", ranks * (_GPU_WORKER if gpu else _WORKER), "cluster.nproc", rough=True)
    around = [worker, *_beside_terms(config, facts, placement, gpu=gpu, job=job)]
    teams = [_team_memory(config, sizes, facts, team, gpu=gpu, job=job) for team in placement.teams]
    if placement.separate:
        buffer = object_store_bytes(config, placement)
        around.append(Term("samples between teams", buffer, "data.batch_size, rollout.sampling.n", 0.0))
        fullest = {"all teams at their fullest": [memory.peak for memory in teams]}
        fullest["all teams"] = [memory.needed for memory in teams]
        return Memory(
            tuple(
                Moment(name, (*around, *(part for moment in moments for part in moment.terms)))
                for name, moments in fullest.items()
            )
        )
    return Memory(tuple(Moment(moment.name, (*around, *moment.terms)) for moment in teams[0].moments))


def _ranks_here(config: RunConfig, team: TeamPlan) -> int:
    """Return the largest number of a team's ranks on one machine."""
    return -(-team.devices // config.cluster.nnodes)


def _team_memory(config: RunConfig, sizes: Sizes, facts: ModelFacts, team: TeamPlan, *, gpu: bool, job: str) -> Memory:
    """Estimate the host memory of a team's ranks on one machine; without GPUs it holds the models too. `facts` are the
    policy's sizes.
    """
    ranks, parallel, dp, actor = _ranks_here(config, team), team.parallel, team.replicas, config.actor
    state = state_bytes(facts, parallel, actor.engine, config.model.dtype, dp, lora=config.model.lora)
    adapters = state["gradients"] / GRADIENT * BYTES[config.model.dtype]
    written = state["parameters"] if config.model.lora is None else adapters
    checkpoint = ranks * (state["optimizer"] + written / dp) if Role.ACTOR in team.roles else 0.0
    layout = layout_key(config, team.roles[0], team)
    staging = (
        [Term("a checkpoint on its way to disk", checkpoint, f"the model's size, {layout}", 0.0)] if checkpoint else []
    )
    if gpu:
        away = ranks * offloaded_bytes(config, sizes, team)
        offloaded = [term("offloaded state", away, "actor.engine.offload, critic.engine.offload")] if away else []
        if Role.ROLLOUT in team.roles and config.rollout.colocated and config.rollout.sglang.releases_graphs:
            # while the GPU memory of CUDA graphs is released, SGLang keeps a copy of it in host memory
            offloaded.append(_times(ranks, graphs()))
        # Token ids and log-probs of responses are on the device here, so 0 is the least host memory that they need.
        buffers = response_terms(config, dp, job) if Role.ROLLOUT in team.roles else []
        responses = [replace(_times(ranks, part), least=0.0) for part in buffers]
        states = [_times(ranks, part) for part in teacher_states(config, sizes, team)] if job == "train" else []
        return Memory((Moment("a step", (*offloaded, *staging, *responses, *states)),))
    moments = [
        Moment(moment.name, tuple(_times(ranks, part) for part in moment.terms))
        for moment in device_memory(config, sizes, team, gpu=False, job=job).moments
    ]
    if staging and job in ("train", "sft"):
        parts = learned_parts(config, "actor", facts, parallel, dp, layout)
        moments.append(Moment("a checkpoint", (*(_times(ranks, part) for part in parts.values()), *staging)))
    return Memory(tuple(moments))


def _times(ranks: int, part: Term) -> Term:
    name = f"{part.what}, {ranks} ranks" if ranks > 1 else part.what
    return Term(name, ranks * part.bytes, part.keys, ranks * part.least, part.shrinks)


def _beside_terms(config: RunConfig, facts: ModelFacts, placement: Placement, *, gpu: bool, job: str) -> list[Term]:
    """Return the memory terms of data, reward processes, CPU servers (with their workers), and stored older or newer
    weights.
    """
    terms = []
    generates = job in ("eval", "generate")
    team = placement.of_role(Role.ROLLOUT) or placement.teams[0]
    ranks = _ranks_here(config, team)
    files = [*([] if generates else config.data.train_files), *config.data.held_out]
    local = [file for file in map(Path, map(os.path.expanduser, dict.fromkeys(files))) if file.is_file()]
    rows = ranks * _DATA * sum(file.stat().st_size for file in local) if config.task.writes_text else 0.0
    if rows:
        key = "data.val_files" if generates else "data.train_files"
        terms.append(term(f"rows of data, {ranks} ranks" if ranks > 1 else "rows of data", rows, key, rough=True))
    sections = (config.reward, *config.policy_rewards.values())
    if processes := sum(map(reward_processes, sections)):
        count = processes * max(1, ranks // team.parallel.model_parallel_size)
        terms.append(term(f"{count} reward processes", count * _REWARD_WORKER, "reward.workers", rough=True))
    if config.rollout.stale_steps and job == "train":
        weights = parameter_bytes(facts, team.parallel, config.model.dtype)
        copies = ranks * (config.rollout.stale_steps + 1) * weights
        terms.append(term("weights of past steps", copies, "rollout.stale_steps"))
    trained = [placement.of_role(Role(model)) for model in policy_models(config)]
    if trained[0] is not None and job == "train" and (copies := policy_of(config).copies):
        # The + 1 is a version that is being sent. The minimum is 0: if training is the bottleneck, no version waits.
        weights = (copies + 1) * sum(
            _ranks_here(config, team) * parameter_bytes(facts, team.parallel, config.model.dtype)
            for team in filter(None, trained)
        )
        terms.append(Term("weights that wait until they are generated with", weights, "async.max_staleness", 0.0))
    if job != "sft":
        terms += config.task.host_terms(config, facts, team, ranks, job)
    servers = config.rollout.servers
    if servers is not None and not servers.urls and not gpu and job != "sft":
        needed = servers.servers * servers.ranks * (_CPU_SERVER + server_bytes(config, facts))
        terms.append(term(f"{servers.servers} servers", needed, "rollout.sglang.servers", rough=True))
    if gpu and config.rollout.colocated and config.sync.adapters == "separate" and job != "sft":
        needed = config.rollout.sglang.servers * config.rollout.sglang.ranks * server_bytes(config, facts)
        needed /= config.cluster.nnodes
        terms.append(term("servers' base model while it is off the GPUs", needed, "sync.adapters", rough=True))
    return terms
