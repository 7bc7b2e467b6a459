"""Build this process's pipeline chunks of a model, with uninitialised parameters: load or draw them afterwards."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from megatron.core import parallel_state as mpu
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.tensor_parallel.layers import (
    ColumnParallelLinear,
    RowParallelLinear,
    VocabParallelEmbedding,
    set_tensor_model_parallel_attributes,
)
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules, get_num_layers_to_build
from megatron.core.transformer.transformer_layer import get_transformer_layer_offset

from megarl.models.config import PolicyConfig
from megarl.models.draft_head import DraftHead
from megarl.models.hf import draft_place, encoder_of, moe_layers, vision_of
from megarl.models.layer_forms import parts_of
from megarl.models.layers.attention.plain import Attention
from megarl.models.layers.attention.training import PackedAttention
from megarl.models.layers.attention.wide_norm import WideNorm
from megarl.models.layers.experts.deepep import DeepEPDispatcher
from megarl.models.layers.experts.replay import replay_routes
from megarl.models.layers.experts.router import ExpertRouter
from megarl.models.layers.experts.stacked import StackedExperts
from megarl.models.layers.experts.training import GroupedExperts, TokenDispatcher, expert_groups
from megarl.models.layers.kinds import KINDS
from megarl.models.layers.linear import ColumnsWithBias, RowsWithBias
from megarl.models.layers.mlp.geglu import GeGLU
from megarl.models.layers.mlp.swiglu import SwiGLU
from megarl.models.layers.residual import ResidualAdd
from megarl.models.lora import attach
from megarl.models.norm import RMSNorm
from megarl.models.policy import PolicyModel
from megarl.system.device import device

if TYPE_CHECKING:
    from transformers import PretrainedConfig


def build_policy(hf_config: PretrainedConfig, tconf: PolicyConfig, *, value_head: bool = False) -> list[PolicyModel]:
    """Return this process's chunks of the model (one per virtual pipeline stage) on its device, uninitialised.

    Megatron's parallel state must be initialised. Then call `load_weights` or `init_random` from models.weights.
    """
    vpp = tconf.virtual_pipeline_model_parallel_size
    wide = any(isinstance(mixer, Attention) and mixer.wide_norm for mixer in tconf.mixers)
    # Without this flag megatron-core 0.19 rejects layers with a norm over all query heads.
    tconf.qk_layernorm = tconf.qk_layernorm or wide
    chunks = []
    for stage in range(vpp or 1):
        vp_stage = stage if vpp else None
        if vpp:
            mpu.set_virtual_pipeline_model_parallel_rank(stage)
        where = {"ignore_virtual": not vpp, "vp_stage": vp_stage}
        settings: dict[str, Any] = {
            "pre_process": mpu.is_pipeline_first_stage(**where),
            "post_process": mpu.is_pipeline_last_stage(**where),
            "vp_stage": vp_stage,
            "value_head": value_head,
        }
        chunk = _build_chunk(hf_config, tconf, block_spec(hf_config, tconf, vp_stage), settings)
        if tconf.draft and chunk.post_process:
            place = draft_place(hf_config)
            layer = mixed_layer(tconf, place, sparse=any(moe_layers(hf_config)))
            chunk.draft = DraftHead(tconf, layer, place, vp_stage)
        _mark_split(chunk)
        _dispatch(chunk)
        replay_routes(chunk, moe_layers(hf_config))
        # Megatron creates some parameters (gates of shared experts) on the host whatever the device.
        chunks.append(chunk.to(device()))
    if wide:
        # With the flag Megatron would sum the norms' gradients over tensor-parallel ranks, as if each had all heads.
        tconf.qk_layernorm = False
    if tconf.lora is not None:
        attach(chunks, tconf.lora)
    return chunks


def _build_chunk(
    hf: PretrainedConfig, config: PolicyConfig, spec: TransformerBlockSubmodules, settings: dict[str, Any]
) -> PolicyModel:
    if (sight := vision_of(hf)) is not None:
        from megarl.robots.models.vla.vision import VlaModel

        return VlaModel(hf, config, spec, sight, **settings)
    if (encoder := encoder_of(hf)) is not None:
        from megarl.models.vlm.model import VisionLanguageModel

        return VisionLanguageModel(hf, config, spec, encoder, **settings)
    return PolicyModel(hf, config, spec, **settings)


def _mark_split(chunk: PolicyModel) -> None:
    """Mark each weight that tensor parallelism splits, with the dimension of the split.

    megatron-core 0.16 sets these marks only if it initialises the weight itself. Without them the gradient norm would
    take the other ranks' shards for copies and leave them out.
    """
    kinds = {VocabParallelEmbedding: 0, ColumnParallelLinear: 0, RowParallelLinear: 1}
    for module in chunk.modules():
        dim = next((dim for kind, dim in kinds.items() if isinstance(module, kind)), None)
        if dim is not None and module.weight is not None and not hasattr(module.weight, "tensor_model_parallel"):
            set_tensor_model_parallel_attributes(module.weight, is_parallel=True, dim=dim, stride=1)


def _dispatch(chunk: PolicyModel) -> None:
    """Replace the token dispatcher of layers with experts by this package's; Megatron only selects its own, by name."""
    for module in chunk.modules():
        if isinstance(module, MoELayer):
            kind = DeepEPDispatcher if chunk.config.dispatch == "deepep" else TokenDispatcher
            module.token_dispatcher = kind(module.num_local_experts, chunk.config, expert_groups())


def block_spec(hf: PretrainedConfig, config: PolicyConfig, vp_stage: int | None) -> TransformerBlockSubmodules:
    """Return the layer specs of one chunk, in the layer form that `config.layers` selects."""
    first = get_transformer_layer_offset(config, vp_stage=vp_stage)
    count = get_num_layers_to_build(config, vp_stage=vp_stage)
    layers = []
    for place, sparse in list(enumerate(moe_layers(hf)))[first : first + count]:
        layers.append(mixed_layer(config, place, sparse=sparse))
    return TransformerBlockSubmodules(layer_specs=layers, layer_norm=final_norm(config))


def mixed_layer(config: PolicyConfig, place: int, *, sparse: bool) -> ModuleSpec:
    """Return the spec of a layer with the mixer of layer `place`, and a dense MLP or a mixture of experts."""
    layer, mixer = layer_spec(config, sparse=sparse), config.mixers[place]
    training = KINDS[mixer.kind].training
    if training is not None:
        layer.submodules.self_attention = training(mixer)
    return layer


def layer_spec(config: PolicyConfig, *, sparse: bool) -> ModuleSpec:
    """Return the spec of one transformer layer, with a dense MLP or a mixture of experts."""
    if config.layers == "local":
        return local_layer_spec(config, sparse=sparse)
    from megarl.models.te_layers import te_layer_spec

    return te_layer_spec(config, local_layer_spec(config, sparse=True).submodules.mlp if sparse else None)


def final_norm(config: PolicyConfig) -> type:
    """Return the class of the norm after the last layer."""
    if config.layers == "local":
        return RMSNorm
    from megarl.models.te_layers import FINAL_NORM

    return FINAL_NORM


def local_layer_spec(config: PolicyConfig, *, sparse: bool) -> ModuleSpec:
    """Return the spec of a `local` layer: Megatron's plain parts with this package's attention, norm and SwiGLU."""
    spec = get_gpt_layer_local_spec(
        num_experts=config.num_moe_experts if sparse else None,
        moe_grouped_gemm=config.moe_grouped_gemm,
        qk_layernorm=config.qk_layernorm,
        normalization="RMSNorm",
    )
    parts = spec.submodules
    wiring = config.wiring
    parts.input_layernorm = parts.pre_mlp_layernorm = IdentityOp if wiring.norms == "after" else RMSNorm
    if wiring.norms != "before" or wiring.residual != 1:
        parts.self_attn_bda = parts.mlp_bda = ModuleSpec(module=ResidualAdd, params={"config": config})
    attention = parts.self_attention.submodules
    attention.core_attention = PackedAttention
    kinds = [mixer for mixer in config.mixers if isinstance(mixer, Attention)]
    if any(mixer.out_bias for mixer in kinds):
        attention.linear_proj = RowsWithBias
    if sparse:
        mixture = parts_of(parts.mlp)
        stacked = config.mixture is not None and config.mixture.stacked
        mixture.router, mixture.experts = ExpertRouter, ModuleSpec(module=StackedExperts if stacked else GroupedExperts)
        parts_of(mixture.shared_experts).activation_func = SwiGLU
    else:
        mlp = parts_of(parts.mlp)
        mlp.activation_func = SwiGLU if wiring.activation == "silu" else GeGLU
        if wiring.mlp_bias:
            mlp.linear_fc1, mlp.linear_fc2 = ColumnsWithBias, RowsWithBias
    if config.qk_layernorm:
        attention.q_layernorm = attention.k_layernorm = RMSNorm
    if any(isinstance(mixer, Attention) and mixer.wide_norm for mixer in config.mixers):
        attention.q_layernorm = ModuleSpec(module=WideNorm, params={"groups": False})
        attention.k_layernorm = ModuleSpec(module=WideNorm, params={"groups": True})
    return spec
