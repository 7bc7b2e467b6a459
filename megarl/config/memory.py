"""Memory that one process needs, estimated from sizes alone; activations are rough (a factor of 1.5 either way)."""

from __future__ import annotations

from dataclasses import dataclass

from megarl.config.facts import ModelFacts
from megarl.config.model import ParallelConfig
from megarl.config.run import RunConfig
from megarl.config.training import EngineConfig

_BYTES = {"fp32": 4, "bf16": 2}


@dataclass(frozen=True)
class Memory:
    """Bytes on the fullest rank. `parts` are (what, bytes); `peak` is the fullest moment of a step."""

    parts: list[tuple[str, float]]
    peak: float


def stage_parameters(facts: ModelFacts, parallel: ParallelConfig) -> tuple[float, float]:
    """(dense, expert) parameters that the fullest rank holds."""
    layers = facts.layers / parallel.pp
    vocabulary = facts.vocab * facts.hidden / parallel.tp
    both_ends = parallel.pp == 1 and not facts.tied
    dense = layers * facts.layer_parameters / parallel.tp + vocabulary * (2 if both_ends else 1)
    return dense, layers * facts.expert_parameters / (parallel.ep * parallel.expert_tp)


def state_bytes(
    facts: ModelFacts, parallel: ParallelConfig, engine: EngineConfig, dtype: str, dp: int
) -> dict[str, float]:
    """Bytes of parameters, gradients (fp32) and optimizer state (fp32 moments, and masters below bf16)."""
    dense, expert = stage_parameters(facts, parallel)
    per_parameter = 8 + (4 if dtype == "bf16" else 0)
    expert_ranks = parallel.expert_tp * parallel.ep * parallel.pp
    shards = dp * parallel.cp if engine.distributed_optimizer else 1
    expert_shards = max(1, dp * parallel.model_parallel_size // expert_ranks) if engine.distributed_optimizer else 1
    return {
        "parameters": (dense + expert) * _BYTES[dtype],
        "gradients": (dense + expert) * 4,
        "optimizer": per_parameter * (dense / shards + expert / expert_shards),
    }


def activation_bytes(config: RunConfig, facts: ModelFacts, parallel: ParallelConfig, engine: EngineConfig) -> float:
    """Bytes kept for the backward pass of the micro-batches in flight, and of one chunk of logits."""
    element = _BYTES[config.model.dtype]
    longest = config.data.max_prompt_tokens + config.rollout.sampling.max_new_tokens
    tokens = max(engine.micro_batch_tokens, longest) / parallel.cp
    width = facts.ffn * (facts.experts_per_token if facts.is_moe else 1)
    split = 2 * (facts.heads + facts.kv_heads) * facts.head_dim + 3 * width
    residual = 4 * facts.hidden / (parallel.tp if parallel.sp or facts.is_moe else 1)
    layer = tokens * element * (residual + split / parallel.tp)
    layers = facts.layers / parallel.pp
    if engine.recompute == "full":
        kept = parallel.pp * layers * tokens * element * residual / 4 + layer
    else:
        kept = parallel.pp * layers * layer
    return kept + engine.logits_chunk_tokens * facts.vocab / parallel.tp * 4 * 2


def cache_bytes(config: RunConfig, facts: ModelFacts, dp: int) -> float:
    """Bytes of keys and values while `rollout.max_running` sequences are generated."""
    parallel, sampling = config.actor.parallel, config.rollout.sampling
    share = -(-config.data.batch_size * sampling.n // (dp * parallel.cp))
    tokens = min(config.rollout.max_running, share) * (config.data.max_prompt_tokens + sampling.max_new_tokens)
    element = _BYTES[config.rollout_dtype]
    return tokens * 2 * facts.kv_heads * facts.head_dim / parallel.tp * facts.layers / parallel.pp * element


def server_bytes(config: RunConfig, facts: ModelFacts) -> float:
    """Bytes of weights on every GPU of a server; its cache comes on top, up to `memory_fraction`."""
    servers = config.rollout.sglang
    split = ParallelConfig(tp=servers.tp_size, ep=servers.ep_size, etp=max(1, servers.tp_size // servers.ep_size))
    return sum(stage_parameters(facts, split)) * _BYTES[config.rollout_dtype]


def estimate_memory(config: RunConfig, facts: ModelFacts, dp: int) -> Memory:
    """Estimate for the fullest rank. `dp`: data parallel size of the actor."""
    actor = config.actor
    state = state_bytes(facts, actor.parallel, actor.engine, config.model.dtype, dp)
    parts = [(f"actor {name}", value) for name, value in state.items()]
    reference = critic = 0.0
    if config.algorithm.kl.use != "none":
        reference = state["parameters"]
        parts.append(("reference parameters", reference))
    if config.algorithm.needs_teacher:
        reference += state["parameters"]
        parts.append(("teacher parameters (if as large as the policy)", state["parameters"]))
    if config.algorithm.pipeline == "ppo":
        values = state_bytes(facts, actor.parallel, config.critic.engine, config.model.dtype, dp)
        critic = sum(values.values())
        parts += [(f"critic {name}", value) for name, value in values.items()]
    activations = activation_bytes(config, facts, actor.parallel, actor.engine)
    parts.append(("activations and logits (training)", activations))
    cache = 0.0
    if config.rollout.engine == "embedded":
        cache = cache_bytes(config, facts, dp)
        parts.append(("key/value cache (generation)", cache))
    total, weights = sum(state.values()), state["parameters"]
    stays = 0.0 if config.critic.engine.offload else critic
    if actor.engine.offload:
        peak = max(
            stays + max(total + activations, weights + cache, weights + reference), weights + critic + activations
        )
    else:
        peak = total + reference + max(critic + activations, stays + cache)
    return Memory(parts, peak)
