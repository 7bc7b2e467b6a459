"""Small models with random weights, their engines and batches, and the losses that sections train on."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from megarl.config.model import ModelConfig
from megarl.config.training import EngineConfig, OptimConfig
from megarl.data.batch import Batch, Jagged
from megarl.system.device import dist_backend
from megarl.system.metrics import Metrics

if TYPE_CHECKING:
    from transformers import PretrainedConfig

    from megarl.models.layer_forms import Form
    from megarl.models.policy import PolicyModel
    from megarl.training.engine import MegatronEngine
    from megarl.training.parallel import Layout

_VOCABULARY = 131  # a prime, so that tensor parallelism has to pad it
_COMMON = {
    "hidden_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "intermediate_size": 96,
    "vocab_size": _VOCABULARY,
    "max_position_embeddings": 512,
    "tie_word_embeddings": False,
    "rms_norm_eps": 1e-6,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 48, "norm_topk_prob": True, "mlp_only_layers": []}
#: model -> `model.hf_config`
MODELS: dict[str, dict[str, Any]] = {
    "dense": {"model_type": "qwen3", **_COMMON},
    "tied": {"model_type": "qwen3", **_COMMON, "tie_word_embeddings": True},
    "mixture": {"model_type": "qwen3_moe", **_COMMON, **_EXPERTS, "num_experts": 8, "decoder_sparse_step": 1},
    "critic": {"model_type": "qwen3", **_COMMON, "tie_word_embeddings": True},
    "llama": {"model_type": "llama", **_COMMON},
    "mistral": {"model_type": "mistral", **_COMMON, "sliding_window": 8},
    "mixtral": {"model_type": "mixtral", **_COMMON, "num_local_experts": 4, "num_experts_per_tok": 2},
    "qwen2": {"model_type": "qwen2", **{key: value for key, value in _COMMON.items() if key != "head_dim"}},
}
OPTIM = OptimConfig(lr=1e-2, eps=1e-3, weight_decay=0.0, clip_grad=1.0)
_SCALE = 4.0  # scale of the random weights, so that every part of the model affects log-probs
SEED = 3
_DEADLINE_S = 300.0


def single_layout() -> Layout:
    """Return the layout of this single process."""
    from megarl.config.model import ParallelConfig
    from megarl.system.comm import single_world
    from megarl.training.parallel import init_parallel

    return init_parallel(ParallelConfig(), single_world(dist_backend(), _DEADLINE_S))


def hf_config(model: str) -> PretrainedConfig:
    """Return the Hugging Face configuration of one of `MODELS`."""
    from megarl.models.config import load_hf_config

    return load_hf_config(ModelConfig(hf_config=MODELS[model]))


def fill(chunks: list[PolicyModel], hf: PretrainedConfig) -> None:
    """Fill model chunks with random weights that are the same under every layout."""
    from megarl.models.weights import init_random

    init_random(chunks, hf, SEED)
    with torch.no_grad():
        for chunk in chunks:
            for parameter in chunk.parameters():
                if parameter.dim() > 1:
                    parameter.mul_(_SCALE)
            # `init_random` sets the value head to zero; it is not sharded, so every rank draws the same numbers
            if chunk.has_value_head and chunk.post_process:
                value = torch.randn(chunk.value_weight.shape, generator=torch.Generator().manual_seed(SEED)) * 0.1
                chunk.value_weight.copy_(value)


def make_engine(
    model: str,
    layout: Layout,
    dtype: torch.dtype,
    *,
    layers: Form = "local",
    frozen: bool = False,
) -> MegatronEngine:
    """Return an engine for one of `MODELS` under `layout`; `layers` is the implementation of its layers."""
    from megarl.training.engine import MegatronEngine

    hf = hf_config(model)
    return MegatronEngine(
        hf,
        layout.parallel,
        EngineConfig(layers=layers, micro_batch_tokens=256, logits_chunk_tokens=64),
        None if frozen else OPTIM,
        dtype=dtype,
        layout=layout,
        total_steps=10,
        weights=lambda chunks: fill(chunks, hf),
        value_head=model == "critic",
    )


def save_model(model: str, folder: Path, layout: Layout) -> None:
    """Write one of `MODELS` in float32 as a Hugging Face folder; every rank of `layout` takes part."""
    from megarl.models.weights import export_weights

    engine = make_engine(model, layout, torch.float32, frozen=True)
    export_weights(engine.chunks, folder, engine.hf_config, None, world=layout.world)


def make_batch(count: int = 16, longest: int = 60, seed: int = 0) -> Batch:
    """Return samples of different lengths, with random token weights of both signs, whose mean size is 0.8 / tokens."""
    g = torch.Generator().manual_seed(seed)
    lengths = torch.randint(1, longest, (count, 2), generator=g).tolist()
    prompts, responses = (
        [torch.randint(0, _VOCABULARY, (sizes[k],), generator=g) for sizes in lengths] for k in range(2)
    )
    total = sum(map(len, responses))
    weights = [torch.randn(len(r), generator=g) / total for r in responses]
    columns = {"prompt_ids": prompts, "response_ids": responses, "loss_weights": weights}
    return Batch(
        {name: Jagged.from_list(rows) for name, rows in columns.items()},
        {"sample_id": [f"s{number}" for number in range(count)]},
    )


def token_loss(weights: Tensor, logp: Tensor, entropy: Tensor) -> Tensor:
    """Return a loss that depends on all outputs: weighted log-probs, their squares, and entropy."""
    return (weights * logp + weights.abs() * (0.05 * logp.square() - 0.1 * entropy)).sum()


def value_loss(weights: Tensor, values: Tensor) -> Tensor:
    """Return a loss for testing the critic's gradients, which decreases when values rise."""
    return (weights.abs() * torch.nn.functional.softplus(-values)).sum()


def outputs(engine: MegatronEngine, batch: Batch) -> dict[str, Tensor]:
    """Return the outputs for every response token: log-probs and entropies, or values."""
    if engine.chunks[0].has_value_head:
        return {"value": engine.values(batch).values}
    logp, entropy = engine.logprobs(batch)
    return {"log-prob": logp.values, "entropy": entropy.values}


def step(engine: MegatronEngine, batch: Batch) -> dict[str, float]:
    """Make one optimizer step; return loss and gradient norm."""

    def loss(*given: Any) -> tuple[Tensor, Metrics]:
        *numbers, micro = given
        weights = micro["loss_weights"].values.to(numbers[0].device)
        value = value_loss(weights, *numbers) if len(numbers) == 1 else token_loss(weights, *numbers)
        metrics = Metrics()
        metrics.sum("loss", value.item())
        return value, metrics

    critic = engine.chunks[0].has_value_head
    result = (engine.value_step(batch, loss) if critic else engine.train_step(batch, loss)).result()
    return {"loss": result["loss"], "gradient norm": result[f"{engine.name}/grad_norm"]}
