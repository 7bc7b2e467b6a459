"""Translation of a Hugging Face configuration into Megatron's, for the supported architectures."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from megatron.core.transformer import TransformerConfig

from megarl.config.model import LoraConfig, ParallelConfig
from megarl.config.training import EngineConfig
from megarl.models.hf import (
    check_layout,
    encoder_of,
    facts_of,
    head_dim,
    load_hf_config,
    mixers_of,
    mixture_of,
    moe_layers,
    rotated_width,
    wiring_of,
)
from megarl.models.layer_forms import Form, layer_form, refuse_fp8
from megarl.models.layers.attention.plain import Attention
from megarl.models.layers.experts.deepep import Dispatch, dispatch_of
from megarl.models.layers.experts.plain import Mixture
from megarl.models.layers.mixer import Mixer
from megarl.models.layers.wiring import LLAMA, Wiring
from megarl.models.rope import Rope
from megarl.system import device
from megarl.system.comm import WorkerGroup

if TYPE_CHECKING:
    from transformers import PretrainedConfig

__all__ = ["PolicyConfig", "load_hf_config", "transformer_config"]


@dataclass
class PolicyConfig(TransformerConfig):
    """Megatron's configuration, with those properties of a policy for which it has no field."""

    mixers: tuple[Mixer, ...] = ()
    """The mixer of each layer of the whole model."""
    mixture: Mixture | None = None
    """The experts of the layers that have some."""
    wiring: Wiring = LLAMA
    """The differences from Llama outside mixers and experts."""
    layers: Form = "local"
    """Which modules the transformer layers are made of; see `megarl.models.layer_forms`."""

    dispatch: Dispatch = "alltoall"
    """How tokens travel to their experts; see `megarl.models.layers.experts.deepep`."""

    lora: LoraConfig | None = None
    """The model's low-rank adapters, if it has any."""

    draft: bool = False
    """Whether the model has its draft head, to train it."""

    first_stage_layers: int = 0
    """Layers of the first pipeline chunk if the recipe sets them, else 0; `last_stage_layers` those of the last one."""
    last_stage_layers: int = 0


def transformer_config(
    hf: PretrainedConfig,
    parallel: ParallelConfig,
    *,
    dtype: torch.dtype,
    engine: EngineConfig,
    lora: LoraConfig | None = None,
    freeze: Collection[str] = (),
    where: str = "actor.engine",
    world: WorkerGroup | None = None,
) -> PolicyConfig:
    """Return the Megatron configuration of `hf` for the layout `parallel`, with parameters and activations in `dtype`.

    `where` is the recipe key of `engine`, for errors. Collective over `world`.
    """
    check_layout(hf, parallel)
    needs_local = "a model whose samples share prefixes" if engine.share_prefixes else None
    needs_local = needs_local if lora is None else "a model with adapters"
    if "language_model" in freeze:
        needs_local = "a model whose language_model is frozen"
    if encoder_of(hf) is not None:
        needs_local = "a model of images and text, whose positions have three numbers,"
    if others := sorted({mixer.kind for mixer in mixers_of(hf)} - {Attention.kind}):
        needs_local = f"a model with layers of {', '.join(others)}"
    if wiring_of(hf) != LLAMA or any(isinstance(mixer, Attention) and mixer.unusual for mixer in mixers_of(hf)):
        needs_local = f"{hf.model_type}, whose layers differ from Transformer Engine's,"
    elif rotated_width(hf) < head_dim(hf) and Rope(hf).scale != 1:
        # The `te` layers apply RoPE's scale in the softmax scale, which would also scale the unrotated part of a head.
        needs_local = f"{hf.model_type} with scaled rotary positions of a part of each head"
    form = layer_form(engine, dtype, where, needs_local)
    refuse_fp8(hf, parallel, engine, where)
    fields = {**_model_fields(hf, dtype), "lora": lora, "layers": form}
    if form == "te":
        fields["softmax_scale"] = head_dim(hf) ** -0.5 * Rope(hf).scale ** 2
    fields |= _parallel_fields(parallel) | _stage_fields(parallel, hf.num_hidden_layers)
    experts = mixture_of(hf)
    if experts is not None:
        fields |= _moe_fields(hf, experts, parallel)
    fields |= _recompute_fields(engine, form) | _fp8_fields(engine)
    fields["sequence_parallel"] = parallel.splits_tokens(experts=experts is not None)
    config = PolicyConfig(**fields)
    config.dispatch = dispatch_of(facts_of(hf), parallel, dtype, world)
    return config


def _model_fields(hf: PretrainedConfig, dtype: torch.dtype) -> dict[str, Any]:
    return {
        "num_layers": hf.num_hidden_layers,
        "hidden_size": hf.hidden_size,
        "num_attention_heads": hf.num_attention_heads,
        "num_query_groups": hf.num_key_value_heads,
        "kv_channels": head_dim(hf),
        "ffn_hidden_size": getattr(hf, "intermediate_size", None),  # None: no dense layers
        "layernorm_epsilon": hf.rms_norm_eps,
        "normalization": "RMSNorm",
        "qk_layernorm": any(isinstance(mixer, Attention) and mixer.qk_norm for mixer in mixers_of(hf)),
        "add_qkv_bias": any(isinstance(mixer, Attention) and mixer.qkv_bias for mixer in mixers_of(hf)),
        "layernorm_zero_centered_gamma": wiring_of(hf).zero_centered,
        "attention_output_gate": any(isinstance(mixer, Attention) and mixer.gate for mixer in mixers_of(hf)),
        "add_bias_linear": False,
        "gated_linear_unit": True,
        "activation_func": torch.nn.functional.silu,
        "use_te_activation_func": True,  # makes Megatron use the layer spec's activation module
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
        "mixers": mixers_of(hf),
        "wiring": wiring_of(hf),
        "params_dtype": dtype,
        "pipeline_dtype": dtype,
        "bf16": dtype == torch.bfloat16,
        # Parameters are read from a checkpoint or drawn by `init_random`; Megatron's own draw depends on the layout.
        "perform_initialization": False,
        "use_cpu_initialization": not device.has_cuda(),
        # Each of the next five options needs Apex, or concerns a module that the layer spec replaces.
        "gradient_accumulation_fusion": False,
        "masked_softmax_fusion": False,
        "persist_layer_norm": False,
        "bias_activation_fusion": False,
        "bias_dropout_fusion": False,
        "cuda_graph_scope": [],  # Megatron warns about the default, "full"
        "calculate_per_token_loss": True,
        "variable_seq_lengths": True,
        "moe_token_dispatcher_type": "alltoall",
    }


def _parallel_fields(parallel: ParallelConfig) -> dict[str, Any]:
    return {
        "tensor_model_parallel_size": parallel.tp,
        "pipeline_model_parallel_size": parallel.pp,
        "virtual_pipeline_model_parallel_size": parallel.vpp,
        "context_parallel_size": parallel.cp,
        "batch_p2p_comm": False,
        "overlap_p2p_comm": False,
        "deallocate_pipeline_outputs": True,
    }


def _stage_fields(parallel: ParallelConfig, layers: int) -> dict[str, Any]:
    """Return the fields for pipeline chunks that differ in their number of layers; Megatron divides others itself."""
    counts = parallel.chunk_layers(layers)
    if len(set(counts)) == 1:
        return {}
    layout = [["decoder"] * count for count in counts]
    layout[0].insert(0, "embedding")
    layout[-1].append("loss")
    return {
        "pipeline_model_parallel_layout": layout,
        "first_stage_layers": parallel.first_stage_layers or 0,
        "last_stage_layers": parallel.last_stage_layers or 0,
    }


def _moe_fields(hf: PretrainedConfig, experts: Mixture, parallel: ParallelConfig) -> dict[str, Any]:
    return {
        "mixture": experts,
        "num_moe_experts": experts.router.experts,
        "moe_layer_freq": [int(sparse) for sparse in moe_layers(hf)],
        "moe_ffn_hidden_size": experts.width,
        "moe_shared_expert_intermediate_size": experts.shared_width or None,
        "moe_shared_expert_gate": experts.shared_gate,
        "moe_router_topk": experts.router.chosen,
        # Megatron's router is not used (see `megarl.models.layers.experts.router`), but its settings are checked.
        "moe_router_pre_softmax": True,
        "moe_router_load_balancing_type": "none",
        "moe_grouped_gemm": False,
        "expert_model_parallel_size": parallel.ep,
        "expert_tensor_parallel_size": parallel.expert_tp,
    }


def _fp8_fields(engine: EngineConfig) -> dict[str, Any]:
    if engine.fp8 == "none":
        return {}
    # Transposed FP8 copies of weights would stay on the device when the parameters are offloaded.
    fields: dict[str, Any] = {"fp8": "e4m3", "fp8_recipe": engine.fp8, "disable_parameter_transpose_cache": True}
    if engine.fp8 == "delayed":
        fields |= {"fp8": "hybrid", "fp8_amax_history_len": 1024, "fp8_amax_compute_algo": "max"}
    return fields


def _recompute_fields(engine: EngineConfig, form: Form) -> dict[str, Any]:
    if engine.recompute == "full":
        return {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
    if engine.recomputed:
        names = {"attention": "core_attn", "mlp": "mlp", "moe": "moe", "norm": "layernorm"}
        # In Transformer Engine's layers a norm is a part of the projection after it.
        modules = [names[part] for part in sorted(engine.recomputed) if form == "local" or part != "norm"]
        return {"recompute_granularity": "selective", "recompute_modules": modules}
    return {}
