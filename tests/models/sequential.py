"""Megatron's experts, which compute one after another: the oracle of grouped ones, and what older checkpoints hold."""

from __future__ import annotations

from typing import Any

import torch


def submodules(experts: int) -> Any:
    """What Megatron's SequentialMLP is built of, for so many experts of a process."""
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec

    from megarl.models.layer_forms import parts_of
    from megarl.models.layers.mlp.swiglu import SwiGLU

    spec = get_gpt_layer_local_spec(num_experts=experts, moe_grouped_gemm=False, normalization="RMSNorm")
    parts = parts_of(parts_of(spec.submodules.mlp).experts)
    parts.activation_func = SwiGLU
    return parts


def sequential_experts(experts: Any) -> Any:
    """Megatron's SequentialMLP with the weights of these grouped experts, which must be of this process's layout."""
    from megatron.core.transformer.moe.experts import SequentialMLP

    from megarl.models.layers.experts.training import expert_groups

    count = experts.experts
    made = SequentialMLP(count, experts.config, submodules(count), pg_collection=expert_groups())
    with torch.no_grad():
        for name in ("linear_fc1", "linear_fc2"):
            for expert, weight in zip(made.local_experts, getattr(experts, name).stacked, strict=True):
                getattr(expert, name).weight.copy_(weight)
    return made
