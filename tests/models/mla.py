"""Layers with multi-head latent attention: transformers' modules, and this project's with the same weights."""

from __future__ import annotations

from typing import Any

import torch

from megarl.config.model import ModelConfig, ParallelConfig
from megarl.config.training import EngineConfig
from megarl.models.config import load_hf_config, transformer_config
from megarl.models.layers.mla.plain import MLA, mla_of, mla_rules
from megarl.models.layers.mla.training import LatentAttention
from megarl.models.layers.rules import WeightRule, existing
from megarl.models.packing import PackedStream, pack_stream
from tests.models.tiny import tiny_dict

SIZES: dict[str, Any] = {
    "hidden_size": 32,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "q_lora_rank": 24,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 12,
    "qk_rope_head_dim": 8,
    "v_head_dim": 10,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-6,
    "rope_interleave": True,
}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 16,
    "mscale": 0.7,
    "mscale_all_dim": 1.0,
}


def theirs(model_type: str, changes: dict[str, Any], seed: int = 0) -> tuple[Any, torch.nn.Module, Any]:
    """Return transformers' config, its attention module with random weights, and its rotary embedding."""
    from transformers import AutoConfig
    from transformers.models.deepseek_v3 import modeling_deepseek_v3 as deepseek
    from transformers.models.glm4_moe_lite import modeling_glm4_moe_lite as glm

    config = AutoConfig.for_model(model_type, **{**SIZES, **changes})
    config._attn_implementation = "eager"
    torch.manual_seed(seed)
    if model_type == "deepseek_v3":
        module, rotary = deepseek.DeepseekV3Attention(config, 0), deepseek.DeepseekV3RotaryEmbedding(config)
    else:
        module, rotary = glm.Glm4MoeLiteAttention(config, 0), glm.Glm4MoeLiteRotaryEmbedding(config)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.2)
    return config, module, rotary


def rules_of(config: Any) -> list[WeightRule]:
    return [rule for rule in existing(mla_rules(), sizes_of(config)) if rule.part == MLA.kind]


def sizes_of(config: Any) -> dict[str, int]:
    return {"hidden": config.hidden_size, **mixer_of(config).dimensions()}


def mixer_of(config: Any) -> MLA:
    return mla_of(config.to_dict() | {"q_lora_rank": config.q_lora_rank}, config.rope_parameters)


def ours(config: Any, weights: dict[str, torch.Tensor], dtype: torch.dtype, **layout: Any) -> LatentAttention:
    """Return this project's module with this rank's part of the weights of transformers' module."""
    plain = load_hf_config(ModelConfig(hf_config=tiny_dict("llama", hidden_size=config.hidden_size, head_dim=8)))
    tconf = transformer_config(plain, ParallelConfig(**layout), dtype=dtype, engine=EngineConfig())
    tconf.mixers = (mixer_of(config),)
    from megatron.core.process_groups_config import ProcessGroupCollection

    groups = ProcessGroupCollection.use_mpu_process_groups()
    module = LatentAttention(tconf, layer_number=1, pg_collection=groups)
    parameters = dict(module.named_parameters())
    rules = {rule.param.split("self_attention.")[1]: rule for rule in rules_of(config)}
    assert rules.keys() == parameters.keys()
    ways, rank = groups.tp.size(), groups.tp.rank()
    for name, rule in rules.items():
        (source,) = rule.sources
        whole = weights[source.name.split("self_attn.")[1]]
        if rule.split.along:
            whole = whole.chunk(ways, 1 if rule.split.along == "columns" else 0)[rank]
        parameters[name].data.copy_(whole)
    return module


def hf_name(parameter: str) -> str:
    rule = next(rule for rule in mla_rules() if rule.param.endswith(f"self_attention.{parameter}"))
    return rule.sources[0].name.split("self_attn.")[1]


def stream_of(rotary: Any, lengths: list[int], dtype: torch.dtype, **split: int) -> PackedStream:
    stream = pack_stream(lengths, **split)
    cos, sin = rotary(torch.zeros(1, dtype=dtype), stream.position_ids)
    half = cos.shape[-1] // 2
    stream.params.cache["rope"] = cos[0, :, :half], sin[0, :, :half]
    return stream


def latent_module(model_type: str, changes: dict[str, Any]) -> tuple[LatentAttention, Any]:
    """Return this project's module with random weights in float32, and transformers' rotary embedding."""
    config, module, rotary = theirs(model_type, changes)
    return ours(config, module.state_dict(), torch.float32), rotary
