"""Small engines and batches for the training tests: the same model and samples under every layout."""

from __future__ import annotations

import hashlib

import torch

from megarl.config.model import ParallelConfig
from megarl.config.training import EngineConfig, MtpConfig, OptimConfig
from megarl.data.batch import Batch, Jagged
from megarl.system.metrics import Metrics
from tests.dist import layout_for

VOCAB = 131  # divided by no tensor-parallel size
_DENSE = {
    "model_type": "qwen3",
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": VOCAB,
    "max_position_embeddings": 256,
    "tie_word_embeddings": False,
}
_EXPERTS = {
    "model_type": "qwen3_moe",
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 48,
    "norm_topk_prob": True,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
}
_LATENT = {
    "model_type": "deepseek_v3",
    "num_key_value_heads": 4,
    "q_lora_rank": 24,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 12,
    "first_k_dense_replace": 4,
}
_SHARED = {
    "model_type": "glm4_moe",
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "first_k_dense_replace": 1,
}
_WIDE = {"model_type": "minimax_m2", "num_local_experts": 4, "num_experts_per_tok": 2, "rotary_dim": 8}
_SINKS = {
    "model_type": "gpt_oss",
    "intermediate_size": 48,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "sliding_window": 8,
    "swiglu_limit": 1.0,
    "pad_token_id": None,
}
_CAPPED = {
    "model_type": "gemma2",
    "sliding_window": 8,
    "query_pre_attn_scalar": 9,
    "attn_logit_softcapping": 2.0,
    "final_logit_softcapping": 3.0,
}
_TIED = {**_DENSE, "tie_word_embeddings": True}
MODELS = {
    "dense": _DENSE,
    "tied": _TIED,
    "moe": {**_DENSE, **_EXPERTS},
    "latent": {**{key: value for key, value in _DENSE.items() if key != "head_dim"}, **_LATENT},
    "shared": {**_DENSE, **_SHARED},  # with biases that follow the load of experts
    "drafting": {**_DENSE, **_SHARED},  # these three train their draft heads
    "drafting tied": {**_TIED, **_SHARED},
    "drafting latent": {**{key: value for key, value in _DENSE.items() if key != "head_dim"}, **_LATENT},
    "wide": {**_DENSE, **_WIDE},  # norms of queries and keys over all heads
    "sinks": {**_DENSE, **_SINKS},  # with windows, and biases everywhere
    "capped": {**_DENSE, **_CAPPED},  # scores and logits have soft caps
    "critic": _TIED,  # with a value head
    "moe critic": {**_DENSE, **_EXPERTS},
}


_OWN = tuple(MODELS)


def hf_config(name: str, **changes):
    from transformers import AutoConfig

    fields = {**MODELS[name], **changes}
    return AutoConfig.for_model(fields.pop("model_type"), **fields)


def make_engine(model: str = "dense", parallel: ParallelConfig | None = None, **kwargs):
    """Engine with seeded weights; `engine`, `optim`, `dtype`, `frozen`, `layout`, `layers` and `seed` can be given.

    A policy with experts replays the routes of samples that have some (`with_routes`)."""
    from megarl.models.hf import route_form
    from megarl.training.engine import MegatronEngine
    from megarl.training.sequence_layout import TextLayout

    parallel = parallel or ParallelConfig()
    layout = kwargs.pop("layout", None) or layout_for(parallel)
    hf = hf_config(model, num_hidden_layers=kwargs.pop("layers", MODELS[model]["num_hidden_layers"]))
    optim = None if kwargs.pop("frozen", False) else kwargs.pop("optim", OptimConfig(lr=1e-2, eps=1e-3))
    if model in ("shared", "drafting") and optim is not None:
        optim = optim.model_copy(update={"expert_bias_rate": 1e-5})
    seed, engine = kwargs.pop("seed", 3), kwargs.pop("engine", None)
    engine = engine or EngineConfig(micro_batch_tokens=64, logits_chunk_tokens=16)
    return MegatronEngine(
        hf,
        parallel,
        engine,
        optim,
        dtype=kwargs.pop("dtype", torch.float32),
        layout=layout,
        total_steps=kwargs.pop("total_steps", 10),
        weights=lambda chunks: _random(chunks, hf, seed),
        value_head="critic" in model,
        sequences=TextLayout(routes=route_form(hf) if model == "moe" else None, share=engine.share_prefixes),
        mtp=MtpConfig(loss_weight=0.5) if model.startswith("drafting") else None,
        **kwargs,
    )


def layers_for(name: str, sizes: dict) -> int:
    """Return how deep a model is that these sizes can cut: two stages of two parts need four layers; stages of
    different depth have one more. Models that a test has added to `MODELS` keep their depth."""
    if name not in _OWN:
        return int(MODELS[name]["num_hidden_layers"])
    return (4 if "vpp" in sizes else 2) + any(name.endswith("_stage_layers") for name in sizes)


def kind(name: str, layers: int) -> str:
    """Return how tests of layouts call a model of this depth in a single process."""
    return f"{name}, {layers} layers"


def kinds(layouts: list) -> dict[str, tuple[str, int]]:
    """Return name and depth of each model that a single process has to train for these (name, sizes, settings)."""
    models = {(name, layers_for(name, sizes)) for name, sizes, _ in layouts}
    return {kind(*model): model for model in sorted(models)}


def _random(chunks, hf, seed) -> None:
    """Random weights with a scale that makes log-probs differ clearly."""
    from megarl.models.weights import init_random

    init_random(chunks, hf, seed)
    with torch.no_grad():
        for chunk in chunks:
            for parameter in chunk.parameters():
                if parameter.dim() > 1:
                    parameter.mul_(4.0)
            if chunk.has_value_head and chunk.post_process:  # whole on every rank, and zero until here
                chunk.value_weight.normal_(generator=torch.Generator().manual_seed(seed)).mul_(0.1)


def make_batch(count: int = 9, seed: int = 0, longest: int = 40) -> Batch:
    """Samples of uneven lengths with per-token weights that sum to about one."""
    rng = torch.Generator().manual_seed(seed)
    draw = lambda low, high: int(torch.randint(low, high, (), generator=rng))  # noqa: E731
    prompts = [torch.randint(0, VOCAB, (draw(1, 9),), generator=rng) for _ in range(count)]
    responses = [torch.randint(0, VOCAB, (draw(1, longest),), generator=rng) for _ in range(count)]
    total = sum(map(len, responses))
    weights = [torch.randn(len(r), generator=rng) / total for r in responses]
    fields = {"prompt_ids": prompts, "response_ids": responses, "loss_weights": weights}
    return Batch(
        {key: Jagged.from_list(rows) for key, rows in fields.items()},
        {"sample_id": [f"s{i}" for i in range(count)]},
    )


def with_routes(batch: Batch, layers: int) -> Batch:
    """Samples with random routes for a model "moe" of this depth."""
    from megarl.models.hf import route_form

    return with_random_routes(batch, route_form(hf_config("moe", num_hidden_layers=layers)))


def with_random_routes(batch: Batch, form) -> Batch:
    """Samples with random routes; every third token has none."""
    lengths = batch["prompt_ids"].lengths + batch["response_ids"].lengths - 1
    total = int(lengths.sum())
    shuffled = torch.rand(total, form.layers, form.experts, generator=torch.Generator().manual_seed(4)).argsort(-1)
    routes = shuffled[..., : form.chosen].flatten(1).to(form.dtype)
    routes[::3] = form.none
    return batch.with_values({"routes": Jagged(routes, torch.nn.functional.pad(lengths.cumsum(0), (1, 0)))})


def with_kept(batch: Batch) -> Batch:
    """Samples with random kept tokens, from none to seven for each token."""
    rng = torch.Generator().manual_seed(6)
    responses = batch["response_ids"]
    counts = torch.randint(0, 8, (len(responses.values),), generator=rng, dtype=torch.int32)
    ids = torch.rand(len(counts), VOCAB, generator=rng).argsort(1)[torch.arange(VOCAB) < counts[:, None]]
    kept = Jagged.from_lengths(ids.to(torch.int32), responses.like(counts).sum())
    return batch.with_values({"kept_counts": responses.like(counts), "kept_ids": kept})


def split_over(batch: Batch, dp_rank: int, dp_size: int) -> Batch:
    """Uneven parts: the first rank has all but one sample for each other rank, the last rank none (from three on)."""
    if dp_size == 1:
        return batch
    few = [1] * (dp_size - 1)
    if dp_size > 2:
        few[-1] = 0
    return batch.split([len(batch) - sum(few), *few])[dp_rank]


def outputs(engine, batch: Batch, temperature: float = 1.0) -> dict[str, Jagged]:
    """What the engine's head says of every response token."""
    if engine.chunks[0].has_value_head:
        return {"value": engine.values(batch)}
    return dict(zip(("logp", "entropy"), engine.logprobs(batch, temperature), strict=True))


def train(engine, batch: Batch, temperature: float = 1.0) -> Metrics:
    """One optimizer step on `loss_fn`, or on `value_loss_fn` for a critic."""
    if engine.chunks[0].has_value_head:
        return engine.value_step(batch, value_loss_fn)
    return engine.train_step(batch, loss_fn, temperature)


def value_loss_fn(values, micro: Batch):
    """The larger the values, the better."""
    weights = micro["loss_weights"].values.to(values.device)
    loss = (weights.abs() * torch.nn.functional.softplus(-values)).sum()
    metrics = Metrics()
    metrics.sum("loss", loss.item())
    metrics.mean("value", values.sum().item(), len(values))
    metrics.sum("samples", len(micro))
    return loss, metrics


def loss_fn(logp, entropy, micro: Batch):
    """A loss that uses everything: weighted log-probs, their squares, entropy."""
    weights = micro["loss_weights"].values.to(logp.device)
    loss = (weights * logp + weights.abs() * (0.05 * logp.square() - 0.1 * entropy)).sum()
    metrics = Metrics()
    metrics.sum("loss", loss.item())
    metrics.mean("logp", logp.sum().item(), len(logp))
    metrics.sum("samples", len(micro))
    return loss, metrics


def digest(tensor: torch.Tensor) -> str:
    """Hash of the exact bits."""
    return hashlib.sha256(tensor.detach().contiguous().cpu().view(torch.uint8).numpy().tobytes()).hexdigest()
