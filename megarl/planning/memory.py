"""The memory that one rank of a team needs on its device, estimated from sizes.

An estimate is a list of moments (the actor's update, generation, ...), and each moment a list of terms (`terms.py`).
docs/planning.md compares estimates with measurements.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from megarl.algorithms.divergences import chosen_divergence
from megarl.algorithms.needs import distillation_fields, whole_vocabulary
from megarl.artifacts.facts import ModelFacts
from megarl.artifacts.shared_prefixes import shares_prefixes
from megarl.config.model import ParallelConfig
from megarl.config.rollout import BRANCHING, SamplingConfig
from megarl.config.run import RunConfig
from megarl.dag.placement import TeamPlan
from megarl.dag.stage import Role
from megarl.planning.activations import Activations, Needed, Passes
from megarl.planning.assumptions import PlanAssumptions
from megarl.planning.nccl import nccl_terms
from megarl.planning.shards import (
    BYTES,
    MASTER_BYTES,
    STREAMED_BYTES,
    Sizes,
    attention_copies,
    key_value_bytes,
    known_sizes,
    layout_key,
    parameter_bytes,
    sequence_state_bytes,
    state_bytes,
    step_bytes,
)
from megarl.planning.terms import Moment, Term, held, term
from megarl.planning.vision import image_patches, patch_bytes, patch_tokens
from megarl.planning.weight_sync import WeightSyncMemory, graphs, sends_weights
from megarl.system.offload_schedule import (
    ACTOR,
    CACHE,
    CRITIC,
    GRADIENTS,
    OPTIMIZER,
    PARAMETERS,
    PARTS,
    REFERENCE,
    REWARD_MODEL,
    SERVERS,
    TEACHER,
    WEIGHTS,
    leaves,
    needed,
)

SERVER_CACHE, _SERVER_WEIGHTS = "a server's cache, per rank of it", "a server's weights, per rank of it"
_FRACTIONS, _MOST = 20, 0.9  # a chosen `memory_fraction` is a multiple of 1/20, at most 0.9
_SERVER = "a server"  # name of the `Moment` with the memory of a server on GPUs of its own
PACK_LIMIT_BYTES, PACK_STEPS = 1 << 30, 16
"""On a CPU the embedded engine repacks weights up to this size once, if it decodes at least this many tokens."""
# Bytes per generated token: Python numbers that ranks exchange, and the fields of a batch.
_TOKEN, _TOKEN_BUFFERS = 120.0, 20.0
# bytes per generated token that are certain: the token id (int64) and log-prob (fp32) of embedded generation
_TOKEN_CERTAIN = 12.0
_LOGIT_COPIES = {"forward_kl": 7, "forward_kl_topk": 7, "reverse_kl": 7, "jsd": 13}
"""Number of float32 tensors with the size of a chunk's logits in the backward pass of a divergence, rounded up."""


@dataclass(frozen=True)
class GpuRoom:
    """The memory of a GPU that may also run a server."""

    bytes: float
    # share of the free memory that a server takes at its start, if the recipe does not set it
    server_share: float = PlanAssumptions.server_memory


@dataclass(frozen=True)
class Memory:
    """An estimate of the memory in use on a device, for each moment of a step."""

    moments: tuple[Moment, ...]
    # bytes that are free when a server starts on the device; 0: no server does, or the device is not known
    free: float = 0.0

    @property
    def peak(self) -> Moment:
        """The moment of the step with the largest estimated bytes."""
        return max(self.moments, key=lambda moment: moment.bytes)

    @property
    def needed(self) -> Moment:
        """The moment of the step with the most bytes that are certain (`Moment.least`)."""
        return max(self.moments, key=lambda moment: moment.least)

    def terms(self) -> list[Term]:
        """Return the terms of memory of all moments of a step, each once."""
        return list(dict.fromkeys(term for moment in self.moments for term in moment.terms))


def update_passes(
    config: RunConfig, facts: ModelFacts, role: str, parallel: ParallelConfig, dp: int, job: str
) -> Passes:
    """Return the passes of one optimizer step of a role on a rank, if every sample has the maximum length.

    The rank's sequences are divided equally over as many micro-batches as the token budget needs; a longer sequence is
    a micro-batch by itself. In `megarl sft` the responses are the examples', whose lengths are not known here.
    """
    section = config.training_of(role)
    budget = section.engine.micro_batch_tokens
    if job == "sft":
        limit = config.sft.limit(facts.max_positions) or facts.max_positions
        share, longest = -(-config.sft.batch_size // dp), min(budget, limit)
        packed = min(budget, share * limit)
        return Passes(packed / parallel.cp, packed / parallel.cp, longest, max(1, share * longest // packed))
    if config.preference is not None:
        together = 1 if config.preference.labelled else 2  # the two samples of a pair are in the same micro-batch
        longest = min(config.preference.max_tokens or facts.max_positions, facts.max_positions)
        share = -(-(section.mini_batch_size or config.data.batch_size) // dp)
        count = -(-share // max(1, budget // (together * longest)))
        tokens = min(together * longest * -(-share // count), max(budget, together * longest)) / parallel.cp
        return Passes(tokens, tokens, longest, count)
    sampling = config.rollout.sampling
    # a micro-batch has as many policy calls as its budget allows
    if (call := config.task.call_tokens(config, facts)) is not None:
        longest, slots = call
        calls = max(1, budget // longest)
        share = -(-(section.mini_batch_size or config.data.batch_size) * sampling.n // dp)
        return Passes(calls * longest / parallel.cp, calls * slots / parallel.cp, longest, share)
    response = config.response_tokens(sampling)
    # No later token is predicted from the last token of a response.
    longest = max(1, config.data.max_prompt_tokens + response - 1)
    share = -(-(section.mini_batch_size or config.data.batch_size) * sampling.n // dp)
    if shares_prefixes(config, facts, role):
        return _shared_passes(budget, config.data.max_prompt_tokens, response, sampling.n, share)
    count = -(-share // max(1, budget // longest))
    each = -(-share // count)
    return Passes(each * longest / parallel.cp, each * response / parallel.cp, longest, count)


def _shared_passes(budget: int, prompt: int, response: int, n: int, share: int) -> Passes:
    """Return the passes over `share` samples in groups of `n` that share their prompts: a micro-batch has as many whole
    groups as fit, or a part of one."""
    own = response - 1
    group = prompt + n * own
    if group <= budget:
        groups = -(-share // n)
        count = -(-groups // (budget // group))
        prompts = -(-groups // count)
        each = min(share, prompts * n)
    else:
        each, prompts = min(share, max(1, (budget - prompt) // max(1, own))), 1
        count = -(-share // each)
    return Passes(prompts * prompt + each * own, each * response, max(1, prompt + own), count)


def update_needs(
    config: RunConfig, facts: ModelFacts, role: str, parallel: ParallelConfig, dp: int, *, gpu: bool, job: str = "train"
) -> Needed:
    """Return the bytes that an update's forward and backward passes take in addition to the model's state, on the
    pipeline stage that needs the most."""
    formulas = Activations(
        facts,
        parallel,
        config.training_of(role).engine,
        update_passes(config, facts, role, parallel, dp, job),
        element=BYTES[config.model.dtype],
        gpu=gpu,
        value_head=role == CRITIC,
        logit_copies=logit_copies(config) if role == ACTOR and job == "train" else 0,
    )
    return max((formulas.needed(last=last) for last in (False, True)), key=lambda needed: needed.bytes)


def logit_copies(config: RunConfig) -> float:
    """Return how many float32 copies of a chunk's logits exist at once when the policy is compared with distributions
    of a teacher or the reference; 0 if it is not.

    They are the logits of both models, the terms of the divergence, and their gradients.
    """
    fields, name = distillation_fields(config.algorithm), config.algorithm.distillation.estimator
    if whole_vocabulary(config.algorithm) == "ref_hidden":
        return _LOGIT_COPIES["reverse_kl"]
    if "teacher_hidden" in fields:
        chosen = chosen_divergence(config.algorithm.distillation)
        clamped = chosen is not None and chosen.settings.log_prob_min_clamp is not None
        return _LOGIT_COPIES.get(name, max(_LOGIT_COPIES.values())) + (2 if clamped else 0)
    return 4 if "teacher_topk" in fields else 0


def teacher_states(config: RunConfig, sizes: Sizes, team: TeamPlan) -> list[Term]:
    """Return the term for the hidden states of teachers or reference for a step's samples in a rank's host memory;
    empty if the team does not handle such states.

    The ranks of these models hold them twice, because they reorder them.
    """
    role = compared_role(config)
    if role is None or not {role, Role.ACTOR} & {*team.roles}:
        return []
    sampling, hidden = config.rollout.sampling, compared_width(config, sizes)
    tokens = -(-config.data.batch_size * sampling.n // team.replicas) * config.response_tokens(sampling)
    size = (2 if role in team.roles else 1) * tokens * hidden * BYTES[config.model.dtype]
    setting = "algorithm.distillation.topk" if role is Role.TEACHER else "algorithm.kl.estimator"
    keys = f"{setting}, rollout.sampling.max_new_tokens, data.batch_size"
    # `size` is for responses of the maximum length; it has no lower bound, because responses may be short.
    return [Term(f"the {role.value}'s hidden states", size, keys, least=0.0)]


def compared_role(config: RunConfig) -> Role | None:
    """Return the role with whose distributions over the whole vocabulary the policy is compared; None: with none."""
    field = whole_vocabulary(config.algorithm)
    return None if field is None else Role.TEACHER if field == "teacher_hidden" else Role.REFERENCE


def compared_width(config: RunConfig, sizes: Sizes) -> int:
    """Return the width of the hidden states of the role that the policy is compared with (`compared_role`); the widths
    of several teachers add up."""
    if compared_role(config) is Role.REFERENCE:
        return known_sizes(sizes, Role.ACTOR).hidden
    return known_sizes(sizes, Role.TEACHER).hidden * max(1, len(config.teacher.models))


def cache_bytes(
    config: RunConfig, facts: ModelFacts, parallel: ParallelConfig, dp: int, job: str = "train"
) -> tuple[float, float]:
    """Return the KV-cache bytes of one full-length sequence, and of all sequences that a rank decodes at the same time,
    at most `rollout.max_running`. An episode of an agent counts as two sequences, because its calls may be generated at
    the same time."""
    if job == "train":
        sampling, rows = config.rollout.sampling, config.data.batch_size
    else:
        sampling, rows = config.validation_sampling, _held_out(config) or config.rollout.max_running * dp * parallel.cp
    share = -(-rows * sampling.n // (dp * parallel.cp))
    if config.env.get("name") in BRANCHING:  # an agent, whose calls may be generated at the same time
        share *= 2
    tokens = config.data.max_prompt_tokens + config.response_tokens(sampling)
    element = BYTES[config.rollout_dtype]
    most = parallel.most_layers(facts.layers) / facts.layers
    each = key_value_bytes(facts, parallel.tp, config.rollout_dtype)
    row = most * (tokens * each + sequence_state_bytes(facts, parallel.tp, element))
    return row, min(config.rollout.max_running, share) * row


def _held_out(config: RunConfig) -> int | None:
    """Return the maximum number of held-out prompts that are generated at once; None: all of them."""
    return min((n for n in (config.data.val_batch_size, config.data.max_val_samples) if n is not None), default=None)


def _samples(config: RunConfig, dp: int, job: str) -> list[tuple[str, int, int, SamplingConfig]]:
    """Return, for each kind of generation of `job`: the key of the number of prompts, the samples that a rank has at
    once, how many of them are certain, and the sampling.

    Only one held-out prompt is certain, since the size of the files is not known here.
    """
    calls = []
    if job == "train":
        share = -(-config.data.batch_size * config.rollout.sampling.n // dp)
        calls.append(("data.batch_size", share, share, config.rollout.sampling))
    rows = _held_out(config) or (None if job == "train" else 1)
    if job != "sft" and config.data.held_out and rows:
        sampling = config.validation_sampling
        calls.append(("data.val_batch_size", -(-rows * sampling.n // dp), -(-sampling.n // dp), sampling))
    return calls


def response_terms(config: RunConfig, dp: int, job: str) -> list[Term]:
    """Return the memory term of the samples for each kind of generation: buffers of the maximum length while it runs,
    and the tokens and log-probs that it returns. The list is empty if the task writes no text."""
    if not config.task.writes_text:
        return []
    certain = _TOKEN_CERTAIN if config.rollout.holds_model else 0.0
    return [
        Term(
            f"responses of {samples} samples of {config.response_tokens(sampling)} tokens",
            samples * config.response_tokens(sampling) * (_TOKEN_BUFFERS + _TOKEN),
            f"{'rollout' if rows == 'data.batch_size' else 'validation'}.sampling.max_new_tokens, {rows}",
            least * sampling.max_new_tokens * certain,
            shrinks=True,
        )
        for rows, samples, least, sampling in _samples(config, dp, job)
    ]


def server_bytes(config: RunConfig, facts: ModelFacts) -> float:
    """Return the bytes of weights on each GPU of a server, without the key/value cache."""
    servers = config.rollout.sglang
    split = ParallelConfig(tp=servers.tp_size, ep=servers.ep_size, etp=max(1, servers.tp_size // servers.ep_size))
    size = parameter_bytes(facts, split, config.rollout_dtype)
    if servers.attention_dp > 1:
        size += attention_copies(facts, servers.tp_size, servers.attention_tp) * BYTES[config.rollout_dtype]
    return size


def _server_weights(config: RunConfig, sizes: Sizes) -> list[Term]:
    """Return the memory terms of one rank of a GPU server that this run starts, without the key/value cache."""
    servers = config.rollout.servers
    if servers is None or servers.urls:
        return []
    size = server_bytes(config, known_sizes(sizes, Role.ROLLOUT))
    # Extra arguments may quantise the weights, or place them elsewhere.
    least = 0.0 if servers.extra_args else size / BYTES[config.rollout_dtype] if config.sync.fp8 else size
    keys = "rollout.sglang.tp_size, rollout.sglang.ep_size"
    keys += ", rollout.sglang.attention_dp" if servers.attention_dp > 1 else ""
    return [Term(_SERVER_WEIGHTS, size, keys, least)]


def _server_cache(config: RunConfig, sizes: Sizes, share: float, free: float) -> Term:
    """Return the term for keys and values of a server that takes its share of the memory that is free at its start."""
    servers, facts = config.rollout.sglang, known_sizes(sizes, Role.ROLLOUT)
    size = max(0.0, (servers.memory_fraction or share) * free - server_bytes(config, facts))
    if servers.max_total_tokens is not None:
        size = min(size, servers.max_total_tokens * key_value_bytes(facts, servers.attention_tp, config.cache_dtype))
    # Extra arguments may change the share, and without a share SGLang chooses it.
    least = 0.0 if servers.extra_args or servers.memory_fraction is None else size
    return Term(SERVER_CACHE, size, "rollout.sglang.memory_fraction, rollout.sglang.max_total_tokens", least)


def beside_servers(moment: Moment) -> float:
    """Return the bytes of a moment used by everything except the servers, with `Term.shrinks` at their minimum."""
    return held(term for term in moment.terms if term.what not in (_SERVER_WEIGHTS, SERVER_CACHE))


def planned_fraction(memory: Memory, limit: float) -> float:
    """Return the `memory_fraction` with which servers on the trainer's devices fill a device up to `limit` bytes during
    generation, rounded down to a multiple of 0.05; 0 if nothing is left for servers."""
    generation = next(moment for moment in memory.moments if moment.name == "generation")
    if memory.free <= 0:
        return 0.0
    share = (limit - beside_servers(generation)) / memory.free
    return max(0.0, min(_MOST, math.floor(share * _FRACTIONS) / _FRACTIONS))


def device_memory(
    config: RunConfig, sizes: Sizes, team: TeamPlan, *, gpu: bool, job: str = "train", room: GpuRoom | None = None
) -> Memory:
    """Estimate the device memory of the fullest rank of a team; the policy's sizes replace unknown sizes.

    Args:
        room: the device's memory; None: unknown, so the cache of a server on the device is left out.
    """
    memory = _device_memory(config, sizes, team, gpu=gpu, job=job, room=room)
    roles = [role for role in team.roles if role is not Role.ROLLOUT or config.rollout.holds_model]
    if not gpu or not roles:
        return memory
    mixture = any(known_sizes(sizes, role).is_moe for role in roles)
    here = min(team.devices, -(-config.cluster.nproc // config.cluster.nnodes))
    stays = nccl_terms(team.parallel, team.replicas, here, mixture=mixture)
    moments = (
        moment if moment.name == _SERVER else replace(moment, terms=(*moment.terms, *stays))
        for moment in memory.moments
    )
    return replace(memory, moments=tuple(moments))


def _device_memory(
    config: RunConfig, sizes: Sizes, team: TeamPlan, *, gpu: bool, job: str, room: GpuRoom | None
) -> Memory:
    """Estimate the device memory as `device_memory` does, but without NCCL's connections between ranks."""
    servers = _server_weights(config, sizes) if gpu and Role.ROLLOUT in team.roles else []
    shared = servers if config.rollout.colocated else []
    models = _Models(config, sizes, team, shared, gpu=gpu)
    known = room if servers else None
    free = 0.0 if known is None else max(0.0, known.bytes - (models.when_servers_start(job) if shared else 0.0))
    cache = [] if known is None else [_server_cache(config, sizes, known.server_share, free)]
    on_its_own = [Moment(_SERVER, (*servers, *cache))] if servers and not shared else []
    if shared and config.rollout.sglang.releases_graphs:
        cache = [*cache, graphs()]
    generation = _generation(config, sizes, team, job, gpu=gpu) + (cache if shared else [])
    travels = gpu and job != "sft" and sends_weights(config, team)
    sync = WeightSyncMemory(config, models.facts[ACTOR], team) if travels else None
    if job in ("eval", "generate"):
        weights = models.state[ACTOR][PARAMETERS]
        beside = [part for name in models.state.keys() & {REWARD_MODEL} for part in models.state[name].values()]
        moments = [Moment("generation", (weights, *beside, *shared, *generation))]
        return Memory((*_with_sync(moments, sync, [weights, *shared]), *on_its_own), free)
    moments = []
    if Role.ACTOR in team.roles:
        learning = _learning_terms("actor", config, models.facts[ACTOR], team, gpu=gpu, job=job)
        moments.append(Moment("the actor's update", (*models.resident("update", ACTOR), *learning)))
    if job == "sft":
        return Memory((replace(moments[0], name="the update"),))
    seen = config.task.score_terms(config, gpu=gpu) if Role.ROLLOUT in team.roles else []
    if Role.ROLLOUT in team.roles:
        moments.append(Moment("generation", (*models.resident("generate"), *generation)))
    if gpu and Role.ACTOR in team.roles:
        moments.append(Moment("a checkpoint", tuple(models.resident("checkpoint"))))
    scoring = {REFERENCE: "log-probs", TEACHER: "log-probs", REWARD_MODEL: "scores", CRITIC: "values"}
    for role, name in scoring.items():
        if role in models.state:
            states = teacher_states(config, sizes, team) if role == TEACHER and not gpu else []
            moments.append(Moment(name, (*models.resident("score", role), *states)))
    if CRITIC in models.state:
        values = _learning_terms("critic", config, models.facts[CRITIC], team, gpu=gpu)
        moments.append(Moment("the critic's update", (*models.resident("update", CRITIC), *values)))
    moments += _further_moments(config, models, team, gpu=gpu)
    if seen:
        moments = [replace(moment, terms=(*moment.terms, seen[0])) for moment in moments]
        moments.append(Moment("scores of episodes", (*models.resident("generate"), *seen)))
    return Memory((*_with_sync(moments, sync, models.resident("publish")), *on_its_own), free)


def _further_moments(config: RunConfig, models: _Models, team: TeamPlan, *, gpu: bool) -> list[Moment]:
    """Return the moments in which further models score samples or are trained."""
    moments = []
    for name in (role.value for role in team.roles if role.is_further):
        if config.models[name].train:
            learning = _learning_terms(name, config, models.facts[name], team, gpu=gpu)
            moments.append(Moment(f"{name}'s update", (*models.resident("update", name), *learning)))
        moments.append(Moment(f"{name}'s log-probs", tuple(models.resident("score", name))))
    return moments


def offloaded_bytes(config: RunConfig, sizes: Sizes, team: TeamPlan) -> float:
    """Return the bytes of host memory for everything that is offloaded from a rank's GPU."""
    return _Models(config, sizes, team, [], gpu=True).offloaded()


def _with_sync(moments: list[Moment], sync: WeightSyncMemory | None, publishing: list[Term]) -> list[Moment]:
    """Add the memory of weight updates: permanent parts to every moment, and a moment of its own for the update."""
    if sync is None:
        return moments
    stays = sync.always()
    updated = Moment("new weights for servers", (*publishing, *stays, *sync.passing()))
    return [*(replace(moment, terms=(*moment.terms, *stays)) for moment in moments), updated]


def _generation(config: RunConfig, sizes: Sizes, team: TeamPlan, job: str, *, gpu: bool) -> list[Term]:
    if not config.task.writes_text:
        return config.task.generation_terms(config, known_sizes(sizes, Role.ROLLOUT), team)
    responses = response_terms(config, team.replicas, job)
    if not config.rollout.holds_model:
        return responses
    copies = _decoding_weights(config, known_sizes(sizes, Role.ROLLOUT), team, job, gpu=gpu)
    row, rows = cache_bytes(config, known_sizes(sizes, Role.ROLLOUT), team.parallel, team.replicas, job)
    # If the cache does not fit, fewer sequences run, so only the cache of one sequence is certain.
    keys = f"{'rollout' if job == 'train' else 'validation'}.sampling.max_new_tokens, rollout.max_running"
    return [Term("key/value cache (generation)", rows, keys, row, shrinks=True), *copies, *responses]


def _decoding_weights(config: RunConfig, facts: ModelFacts, team: TeamPlan, job: str, *, gpu: bool) -> list[Term]:
    """Return the term of the embedded engine's copy of the weights, in another dtype or repacked for a CPU; empty if it
    needs no copy."""
    size = parameter_bytes(facts, team.parallel, config.rollout_dtype)
    sampling = config.rollout.sampling if job == "train" else config.validation_sampling
    packed = not gpu and size <= PACK_LIMIT_BYTES and sampling.max_new_tokens >= PACK_STEPS
    if not packed and config.rollout_dtype == config.model.dtype:
        return []
    embedding = 0.0
    # Generation reads the embedding without a copy. A tied embedding is also the head, which is copied; with several
    # stages, the last one has the head but no embedding.
    if not facts.tied and team.parallel.pp == 1:
        embedding = facts.vocab / team.parallel.tp * facts.hidden * BYTES[config.rollout_dtype]
    return [term("weights as generation reads them", size - embedding, "rollout.dtype, the model's size", rough=True)]


class _Models:
    """The memory of a team's models, by role, and of servers on the same devices."""

    def __init__(self, config: RunConfig, sizes: Sizes, team: TeamPlan, servers: list[Term], *, gpu: bool) -> None:
        self._gpu, dtype, dp = gpu, config.model.dtype, team.replicas
        self._colocated = config.rollout.colocated
        engines = {ACTOR: config.actor.engine, CRITIC: config.critic.engine}
        engines |= {name: further.engine for name, further in config.models.items() if further.train}
        self._moments = {role: 1 - MASTER_BYTES[dtype] / step_bytes(engine, dtype) for role, engine in engines.items()}
        self.facts = {role.value: known_sizes(sizes, role) for role in team.roles}
        self.state: dict[str, dict[str, Term]] = {}
        self._always: list[Term] = []
        for role in team.roles:
            name, facts, layout = role.value, self.facts[role.value], layout_key(config, role, team)
            if name in engines:
                self.state[name] = learned_parts(config, name, facts, team.parallel, dp, layout)
                if role is Role.ACTOR and (other := compared_role(config)) is not None:
                    size = BYTES[dtype] * facts.vocab * compared_width(config, sizes) / team.parallel.tp
                    self._always.append(term(f"the {other.value}'s output embedding (last stage)", size, layout))
            elif role is Role.REFERENCE and config.reference_is_base and Role.ACTOR in team.roles:
                continue  # this reference is the actor without its adapters
            elif role in (Role.REFERENCE, Role.TEACHER, Role.REWARD_MODEL) or role.is_further:
                what = f"{name} parameters" + (" (if as large as the policy)" if sizes.get(role) is None else "")
                size = parameter_bytes(facts, team.parallel, dtype, value_head=role is Role.REWARD_MODEL)
                if role is Role.TEACHER and (several := len(config.teacher.models)) > 1:
                    # if the parameters are offloaded, only one teacher at a time is on the device
                    in_turn = PARAMETERS in config.actor.engine.offloaded and gpu
                    what += f" (the largest of {several})" if in_turn else f" ({several}, all as large as the largest)"
                    size *= 1 if in_turn else several
                self.state[name] = {PARAMETERS: term(what, size, layout)}
            elif Role.ACTOR not in team.roles and config.rollout.holds_model:
                size = parameter_bytes(facts, team.parallel, dtype)
                self._always.append(term("rollout parameters", size, layout))
        if Role.ROLLOUT in team.roles:  # copies of policies that other teams train
            apart = {Role(policy.model) for policy in config.policies.values() if policy.model} - {*team.roles}
            for role in sorted(apart, key=lambda role: role.value):
                size = parameter_bytes(known_sizes(sizes, role), team.parallel, dtype)
                self._always.append(term(f"{role.value} parameters (a copy)", size, "actor.parallel"))
        if servers:
            self.state[SERVERS] = {WEIGHTS: servers[0]}
        others = {CRITIC: config.critic.engine.offloaded, SERVERS: frozenset((WEIGHTS, CACHE))}
        others |= {name: further.engine.offloaded for name, further in config.models.items()}
        streams = (engine.stream_optimizer and OPTIMIZER in engine.offloaded for engine in engines.values())
        self._streams = {role for role, streamed in zip(engines, streams, strict=True) if streamed and gpu}
        self._further = tuple(config.models)
        self._several = {TEACHER: max(1, len(config.teacher.models))}
        self._offloads = dict.fromkeys(self.state, config.actor.engine.offloaded) | others
        self._offloads[ACTOR] = leaves(PARTS, config.actor.engine.offloaded)

    def resident(self, phase: str, role: str | None = None) -> list[Term]:
        """Return the terms on the device in a phase (see `offload_schedule`). On a CPU only gradients can be freed."""
        wanted = needed(phase, role, self._further, colocated=self._colocated)
        return self._always + [
            self._piece(part) if phase == "update" and kind == OPTIMIZER and name in self._streams else part
            for name, parts in self.state.items()
            for kind, part in parts.items()
            if kind in wanted.get(name, ()) or kind not in self._offloads[name] or not (self._gpu or kind == GRADIENTS)
        ]

    @staticmethod
    def _piece(optimizer: Term) -> Term:
        """Return the memory term for one piece of a streamed optimizer's state, which is all of the state that is on
        the device at a time during an update."""
        size = min(optimizer.bytes, STREAMED_BYTES)
        return Term(f"{optimizer.what}, a piece", size, optimizer.keys, least=0.0)

    def offloaded(self) -> float:
        """Return the bytes of host copies: what leaves the device in some phase and must be kept."""
        stays = () if self._colocated else ((ACTOR, PARAMETERS),)
        return sum(
            part.bytes * self._several.get(name, 1)
            for name, parts in self.state.items()
            for kind, part in parts.items()
            if name != SERVERS and kind in self._offloads[name] and kind != GRADIENTS and (name, kind) not in stays
        )

    def when_servers_start(self, job: str) -> float:
        """Return the bytes on the device when servers start, without those of the servers: optimizer state has no Adam
        moments before the first step."""
        if job in ("eval", "generate"):
            return self.state[ACTOR][PARAMETERS].bytes
        learners = [role for role in self._moments if role in self.state and OPTIMIZER not in self._offloads[role]]
        moments = sum(self.state[role][OPTIMIZER].bytes * self._moments[role] for role in learners)
        return held(part for part in self.resident("start_servers") if part.what != _SERVER_WEIGHTS) - moments


def learned_parts(
    config: RunConfig, role: str, facts: ModelFacts, parallel: ParallelConfig, dp: int, layout: str
) -> dict[str, Term]:
    """Return terms for parameters, gradients and optimizer state of `role`; `layout`: recipe key of its layout."""
    engine, model = config.training_of(role).engine, config.model
    lora = None if role in config.models else model.lora
    state = state_bytes(facts, parallel, engine, model.dtype, dp, value_head=role == CRITIC, lora=lora)
    return {name: term(f"{role} {name}", size, f"the model's size, {layout}") for name, size in state.items()}


def _learning_terms(
    role: str, config: RunConfig, facts: ModelFacts, team: TeamPlan, *, gpu: bool, job: str = "train"
) -> list[Term]:
    """Return the memory terms of a role's update, without parameters, gradients and optimizer state."""
    parallel, dp, engine = team.parallel, team.replicas, config.training_of(role).engine
    section = config.section_of(role)
    longest = config.data.max_prompt_tokens + config.response_tokens(config.rollout.sampling)
    keys = f"{section}.engine.micro_batch_tokens, {section}.engine.recompute"
    # A sequence above the budget is a micro-batch by itself, so only shorter responses save memory then. The
    # lengths of supervised examples are not known here.
    if longest > engine.micro_batch_tokens and job != "sft":
        keys = f"rollout.sampling.max_new_tokens, {section}.engine.recompute"
    needed = update_needs(config, facts, role, parallel, dp, gpu=gpu, job=job)
    terms = [term(f"{role} activations", needed.kept + needed.passing, keys, rough=True)]
    passes = update_passes(config, facts, role, parallel, dp, job)
    terms += config.task.update_terms(config, facts, role, passes)
    lora = config.model.lora
    if facts.encoder is not None and "tower" not in facts.frozen and (lora is None or lora.in_tower):
        most, sequence = image_patches(config, facts.encoder), min(passes.longest, longest)
        counted = sequence + most * patch_tokens(facts, parallel, engine, learns=True)
        sequences = min(passes.tokens * parallel.cp / sequence, max(1.0, engine.micro_batch_tokens // counted))
        recompute = engine.recompute == "full"
        flying = min(parallel.pp, passes.count)  # micro-batches that the encoder's stage, the first, holds at once
        size = flying * sequences * most * patch_bytes(facts.encoder, BYTES[config.model.dtype], recompute=recompute)
        keys = f"{section}.engine.micro_batch_tokens, {section}.engine.recompute, data.max_pixels, data.limit_images"
        # Prompts may have fewer patches than the limit, and samples of a group may share theirs.
        terms.append(Term("the vision encoder at work, at most", size, keys, least=0.0))
    if needed.head and role == ACTOR:
        terms.append(term("logits of one chunk", needed.head, "actor.engine.logits_chunk_tokens", rough=True))
    # The length of supervised examples is not known here, so none of these bytes are certain.
    return [replace(part, least=0.0) for part in terms] if job == "sft" else terms
