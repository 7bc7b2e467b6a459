"""Names and shapes of a model like DeepSeek-V3 (671B parameters), spread over many ranks: input for the plan only."""

from __future__ import annotations

from megarl.models.layers.rules import TensorRegion
from megarl.sync.plan import Held, TrainerRank

LAYERS, DENSE_LAYERS, EXPERTS = 61, 3, 256
HIDDEN, FFN, EXPERT_FFN, VOCAB = 7168, 18432, 2048, 129280
HEADS, Q_RANK, KV_RANK, NOPE, ROPE, VALUE = 128, 1536, 512, 128, 64, 128


def _attention(layer: str) -> dict[str, tuple[int, ...]]:
    return {
        f"{layer}.input_layernorm.weight": (HIDDEN,),
        f"{layer}.self_attn.q_a_proj.weight": (Q_RANK, HIDDEN),
        f"{layer}.self_attn.q_a_layernorm.weight": (Q_RANK,),
        f"{layer}.self_attn.q_b_proj.weight": (HEADS * (NOPE + ROPE), Q_RANK),
        f"{layer}.self_attn.kv_a_proj_with_mqa.weight": (KV_RANK + ROPE, HIDDEN),
        f"{layer}.self_attn.kv_a_layernorm.weight": (KV_RANK,),
        f"{layer}.self_attn.kv_b_proj.weight": (HEADS * (NOPE + VALUE), KV_RANK),
        f"{layer}.self_attn.o_proj.weight": (HIDDEN, HEADS * VALUE),
        f"{layer}.post_attention_layernorm.weight": (HIDDEN,),
    }


def _mlp(prefix: str, width: int) -> dict[str, tuple[int, ...]]:
    return {
        f"{prefix}.gate_proj.weight": (width, HIDDEN),
        f"{prefix}.up_proj.weight": (width, HIDDEN),
        f"{prefix}.down_proj.weight": (HIDDEN, width),
    }


def deepseek_v3(pp: int, ep: int) -> tuple[dict[str, Held], list[TrainerRank]]:
    """Return every tensor with its holders under pp x ep ranks (tensor parallelism 1), and the ranks.

    Layers are spread evenly over the stages, experts in equal blocks over the `ep` ranks of a stage, which hold
    everything else of their stage each.
    """
    tensors: dict[str, Held] = {}

    def add(shapes: dict[str, tuple[int, ...]], ranks: tuple[int, ...]) -> None:
        for name, shape in shapes.items():
            region: TensorRegion = tuple((0, n) for n in shape)
            tensors[name] = Held(shape, ((region, ranks),))

    def stage(number: int) -> tuple[int, ...]:
        return tuple(range(number * ep, (number + 1) * ep))

    add({"model.embed_tokens.weight": (VOCAB, HIDDEN)}, stage(0))
    for i in range(LAYERS):
        layer, ranks = f"model.layers.{i}", stage(i * pp // LAYERS)
        add(_attention(layer), ranks)
        if i < DENSE_LAYERS:
            add(_mlp(f"{layer}.mlp", FFN), ranks)
            continue
        router = {
            f"{layer}.mlp.gate.weight": (EXPERTS, HIDDEN),
            f"{layer}.mlp.gate.e_score_correction_bias": (EXPERTS,),
        }
        add(router | _mlp(f"{layer}.mlp.shared_experts", EXPERT_FFN), ranks)
        for expert in range(EXPERTS):
            add(_mlp(f"{layer}.mlp.experts.{expert}", EXPERT_FFN), (ranks[expert * ep // EXPERTS],))
    add({"model.norm.weight": (HIDDEN,), "lm_head.weight": (VOCAB, HIDDEN)}, stage(pp - 1))
    return tensors, [TrainerRank(rank // ep, f"node{rank // 8}") for rank in range(pp * ep)]
