"""One rank's share of a model: parameters, gradients and optimizer state, exactly as a layout divides them."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from functools import lru_cache

from megarl.architectures import ARCHITECTURES
from megarl.architectures.adapters import adapter_rules, vision_adapters
from megarl.artifacts.facts import ModelFacts
from megarl.config.model import LoraConfig, ParallelConfig
from megarl.config.run import RunConfig
from megarl.config.training import EngineConfig
from megarl.dag.placement import TeamPlan
from megarl.dag.stage import Role
from megarl.models.layers.rules import VOCAB, layer_parts

BYTES = {"fp32": 4, "bf16": 2, "fp16": 2, "fp8": 1}
GRADIENT = 4
"""Bytes of a gradient: gradient buffers are always float32."""
MOMENT_BYTES = 8
"""Bytes per parameter of Adam's two float32 moments, which exist from the first step on."""
MASTER_BYTES = {"fp32": 0, "bf16": 4}
"""Bytes per parameter of a float32 master copy, which shorter dtypes have."""
STREAMED_BYTES = 1 << 30
"""Bytes of optimizer state on the device at a time with `engine.stream_optimizer`, if no parameter has more."""

#: Role -> sizes of its model; None: the sizes are not known.
Sizes = Mapping[Role, ModelFacts | None]


def known_sizes(sizes: Sizes, role: Role) -> ModelFacts:
    """Return the sizes of a role's model, or the policy's if they are not known."""
    facts = sizes.get(role) or sizes[Role.ACTOR]
    assert facts is not None, "the policy's sizes must be known"
    return facts


def layout_key(config: RunConfig, role: Role, team: TeamPlan) -> str:
    """Return the recipe key of a role's layout; in a job without a task graph all roles have the actor's layout."""
    section = config.models[role.value] if role.is_further else getattr(config, role.value)
    has_layout = bool(team.nodes) and section.parallel is not None
    return f"{config.section_of(role.value) if has_layout else 'actor'}.parallel"


@lru_cache(maxsize=4096)
def stage_parameters(
    facts: ModelFacts, parallel: ParallelConfig, *, value_head: bool = False, trained: bool = False
) -> tuple[float, float]:
    """Return the numbers of dense and of expert parameters on the rank that has the most parameters; with `trained`,
    only of parts that are not frozen. They are cached, because a search tries a layout many times.

    Tensor parallelism divides every matrix except the router, and biases; norms, routers and vision parts are on all of
    its ranks. The vocabulary is padded to equal rows. The first pipeline stage has the embedding and the vision parts,
    the last the final norm and the head, which a tied model holds twice if it has several stages.
    """
    visual = sum(size for part, size in facts.visual_parts.items() if not trained or part not in facts.frozen)
    if trained and "language_model" in facts.frozen:
        head = facts.hidden if value_head else 0
        return float(visual + head if parallel.pp == 1 else max(visual, head)), 0.0
    part = _elements(facts, parallel.tp, parallel.expert_tp)
    first = part["embedding"] + visual
    last = part["final"] + (facts.hidden if value_head else part["embedding"])
    stages = _stages(facts, parallel)
    if len(stages) == 1:
        ends = [first + part["final"] if facts.tied and not value_head else first + last]
    else:
        ends = [first, *[0] * (len(stages) - 2), last]
    experts = facts.experts // parallel.ep
    counts_of = [
        (sum(count * part[name] for name, count in counts.items() if name != "expert"), counts["expert"] * experts)
        for counts in stages
    ]
    totals = [
        (float(dense + end), float(part["expert"] * expert))
        for (dense, expert), end in zip(counts_of, ends, strict=True)
    ]
    return max(totals, key=sum)


def _stages(facts: ModelFacts, parallel: ParallelConfig) -> list[Counter[str]]:
    """Return, for each pipeline stage, the number of its layers with each kind of part (mixer, MLP, experts, ...)."""
    stages = [Counter[str]() for _ in parallel.stage_layers(facts.layers)]
    layer = 0
    for chunk, count in enumerate(parallel.chunk_layers(facts.layers)):
        for number in range(layer, layer + count):
            stages[chunk % len(stages)].update(_parts(facts, number))
        layer += count
    if facts.trains_draft:
        stages[-1].update(("draft", *_parts(facts.draft_layer, 0)))
    return stages


def _parts(facts: ModelFacts, layer: int) -> tuple[str, ...]:
    return layer_parts(facts.mixers[layer].kind, sparse=facts.has_experts(layer))


def key_value_bytes(facts: ModelFacts, tp: int, dtype: str) -> float:
    """Return the bytes that decoding caches of one token on a rank, over all layers."""
    return sum(count * mixer.cache_elements(tp) for mixer, count in facts.mixer_counts.items()) * BYTES[dtype]


def sequence_state_bytes(facts: ModelFacts, tp: int, element: int) -> float:
    """Return the bytes of decoding's state of one sequence on a rank, over all layers and whatever its length.

    Args:
        element: bytes of an element in the decoding dtype.
    """
    return sum(count * mixer.state_bytes(tp, element) for mixer, count in facts.mixer_counts.items())


@lru_cache(maxsize=4096)
def _elements(facts: ModelFacts, tp: int, expert_tp: int) -> Mapping[str, int]:
    """Return the number of parameters of each part of the model on a rank, per layer and expert, cached."""
    size = facts.dimensions
    counts = Counter[str](draft=facts.outer_draft_parameters)
    for rule in facts.rules:
        ways = expert_tp if rule.part == "expert" else tp
        for source in rule.sources:
            rows, *rest = (size[dimension] for dimension in source.shape)
            count = rows * math.prod(rest)
            if rule.split is VOCAB:
                count = -(-rows // ways) * math.prod(rest)
            elif rule.split.along is not None:
                count //= ways
            counts[rule.part] += count
    return counts


def attention_copies(facts: ModelFacts, tp: int, attention_tp: int) -> float:
    """Return how many more parameters a rank of a server has if only `attention_tp` of its `tp` ranks share the
    attention heads and the rows of the embedding."""
    more, fewer = _elements(facts, attention_tp, 1), _elements(facts, tp, 1)
    kinds = Counter(mixer.kind for mixer in facts.mixers)
    embedding = _elements(facts, embedding_ranks(facts, attention_tp), 1)["embedding"] - fewer["embedding"]
    return float(embedding + sum(count * (more[kind] - fewer[kind]) for kind, count in kinds.items()))


def embedding_ranks(facts: ModelFacts, attention_tp: int) -> int:
    """Return the number of ranks of a server with attention groups, of `attention_tp` ranks each, that share the rows
    of the embedding."""
    return 1 if ARCHITECTURES[facts.model_type].served.whole_embedding else attention_tp


def adapter_parameters(facts: ModelFacts, parallel: ParallelConfig, lora: LoraConfig) -> tuple[float, float]:
    """Return the (dense, expert) parameters of adapters on a rank; a stage has its share of the layers, and the first
    one those of a vision encoder."""
    dense, expert = decoder_adapters(facts, parallel, lora)
    if facts.encoder is not None:
        visual = {f"visual.{name}": tensor for name, tensor in facts.encoder.tensors.items()}
        dense += sum(math.prod(shape) for _, shape in vision_adapters(visual, lora.targets, lora.rank).values())
    return dense, expert


def decoder_adapters(facts: ModelFacts, parallel: ParallelConfig, lora: LoraConfig) -> tuple[float, float]:
    """Return the (dense, expert) parameters of the decoder's adapters on a rank."""
    size = {**facts.dimensions, "rank": lora.rank}
    sparse = facts.copies["router"] / facts.layers
    per_layer = {
        **_layer_shares(facts),
        "dense": facts.copies["mlp"] / facts.layers,
        "shared": facts.copies["shared"] / facts.layers,
        "expert": facts.experts / parallel.ep * sparse if sparse else 0.0,
    }
    counts = dict.fromkeys(per_layer, 0.0)
    for rule in adapter_rules(facts.rules, lora.targets):
        whole = sum(math.prod(size[dimension] for dimension in source.shape) for source in rule.sources)
        split = parallel.expert_tp if rule.part == "expert" else parallel.tp
        counts[rule.part] += whole / (1 if rule.split.along is None else split) * per_layer[rule.part]
    share = parallel.most_layers(facts.layers)
    expert = counts.pop("expert")
    return sum(counts.values()) * share, expert * share


def _layer_shares(facts: ModelFacts) -> dict[str, float]:
    """Return the share of layers that have the tensors of each kind of mixer; all have those under the name `layer`."""
    kinds = Counter(mixer.kind for mixer in facts.mixers)
    return {"layer": 1.0, **{kind: count / facts.layers for kind, count in kinds.items()}}


def trained_parameters(
    facts: ModelFacts, parallel: ParallelConfig, lora: LoraConfig | None, *, value_head: bool = False
) -> tuple[float, float]:
    """Return the fullest rank's (dense, expert) parameters with gradients: those that are not frozen or, with `lora`,
    adapters and a value head."""
    if lora is None:
        return stage_parameters(facts, parallel, value_head=value_head, trained=True)
    dense, expert = adapter_parameters(facts, parallel, lora)
    return dense + (facts.hidden if value_head else 0), expert


def parameter_bytes(facts: ModelFacts, parallel: ParallelConfig, dtype: str, *, value_head: bool = False) -> float:
    """Return the bytes of a model's parameters on the rank that has the most."""
    return sum(stage_parameters(facts, parallel, value_head=value_head)) * BYTES[dtype]


def owned_parameters(
    facts: ModelFacts,
    parallel: ParallelConfig,
    engine: EngineConfig,
    dp: int,
    *,
    value_head: bool = False,
    lora: LoraConfig | None = None,
) -> float:
    """Return the number of parameters of which the fullest rank has optimizer state.

    The distributed optimizer divides parameters among the ranks that hold the same ones: dp * cp ranks for dense
    parameters, another number for expert parameters.
    """
    dense, expert = trained_parameters(facts, parallel, lora, value_head=value_head)
    if not engine.distributed_optimizer:
        return dense + expert
    expert_ranks = parallel.expert_tp * parallel.ep * parallel.pp
    expert_shards = max(1, dp * parallel.model_parallel_size // expert_ranks)
    return dense / (dp * parallel.cp) + expert / expert_shards


def state_bytes(
    facts: ModelFacts,
    parallel: ParallelConfig,
    engine: EngineConfig,
    dtype: str,
    dp: int,
    *,
    value_head: bool = False,
    lora: LoraConfig | None = None,
) -> dict[str, float]:
    """Return the bytes of parameters, gradients (fp32) and optimizer state (moments, and fp32 masters of a bf16
    model) on the rank that has the most."""
    model = sum(stage_parameters(facts, parallel, value_head=value_head))
    trained = sum(trained_parameters(facts, parallel, lora, value_head=value_head))
    owned = owned_parameters(facts, parallel, engine, dp, value_head=value_head, lora=lora)
    return {
        "parameters": (model + (0 if lora is None else sum(adapter_parameters(facts, parallel, lora)))) * BYTES[dtype],
        "gradients": trained * GRADIENT,
        "optimizer": owned * step_bytes(engine, dtype),
    }


def step_bytes(engine: EngineConfig, dtype: str) -> int:
    """Return the bytes of optimizer state per parameter: moments and master."""
    return MOMENT_BYTES - (2 if engine.exp_avg_dtype == "bf16" else 0) + MASTER_BYTES[dtype]


def checkpoint_bytes(facts: ModelFacts, dtype: str, lora: LoraConfig | None = None) -> float:
    """Return the bytes of a trained model's checkpoint: parameters, or adapters, and optimizer state."""
    saved, trained = float(facts.parameters), float(facts.trained_parameters)
    if lora is not None:
        saved = trained = sum(adapter_parameters(facts, ParallelConfig(), lora))
    return saved * BYTES[dtype] + trained * (MOMENT_BYTES + MASTER_BYTES[dtype])
