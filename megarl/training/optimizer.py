"""Megarl's setup of Megatron's gradient buffers and AdamW, and the learning-rate schedule."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from megarl.config.training import EngineConfig, OptimConfig
from megarl.kernels import amx
from megarl.models.draft_head import DRAFT
from megarl.models.layer_forms import te_problem
from megarl.system.compat import megatron as compat
from megarl.system.compat import torch_compile
from megarl.system.device import DTYPES
from megarl.system.errors import ConfigError

compat.install()
torch_compile.install()

from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig  # noqa: E402
from megatron.core.optimizer import (  # noqa: E402
    ChainedOptimizer,
    MegatronOptimizer,
    get_megatron_optimizer,
)
from megatron.core.optimizer import OptimizerConfig as MegatronOptimizerConfig  # noqa: E402
from megatron.core.optimizer.clip_grads import clip_grad_by_total_norm_fp32, get_grad_norm_fp32  # noqa: E402
from megatron.core.tensor_parallel import param_is_not_tensor_parallel_duplicate  # noqa: E402

if TYPE_CHECKING:
    from megatron.core.transformer import TransformerConfig


def learning_rate(config: OptimConfig, step: int, total_steps: int) -> float:
    """Return the learning rate of optimizer step `step` (from 0): linear warm-up, then constant, linear or cosine.

    The peak is reached at step `warmup_steps`, or at the share `warmup_ratio` of `total_steps`. `min_lr` is reached at
    step `decay_steps`, by default `total_steps`, which is one past the last step. A decaying schedule reaches its peak
    at the last step at the latest, so the warm-up is shortened in a short run.
    """
    end, warmup = config.decay_steps or total_steps, config.warmup(total_steps)
    if config.schedule != "constant":
        warmup = min(warmup, end - 1)
    if step < warmup:
        return config.lr * (step + 1) / (warmup + 1)
    if config.schedule == "constant":
        return config.lr
    progress = min((step - warmup) / (end - warmup), 1.0)
    left = 1.0 - progress if config.schedule == "linear" else 0.5 * (1.0 + math.cos(math.pi * progress))
    return config.min_lr + (config.lr - config.min_lr) * left


def wrap_chunks(
    chunks: Sequence[torch.nn.Module], model_config: TransformerConfig, engine: EngineConfig
) -> list[DistributedDataParallel]:
    """Wrap each model chunk with float32 gradient buffers that are summed, never averaged, over data-parallel ranks."""
    if not model_config.calculate_per_token_loss:
        raise ValueError(
            "calculate_per_token_loss must be set in the model config, or Megatron divides gradients by dp * cp"
        )
    config = DistributedDataParallelConfig(
        grad_reduce_in_fp32=True,
        overlap_grad_reduce=engine.overlap_grad_reduce,
        use_distributed_optimizer=engine.distributed_optimizer,
    )
    wrapped = [
        DistributedDataParallel(model_config, config, chunk, disable_bucketing=number > 0)
        for number, chunk in enumerate(chunks)
    ]
    # With overlap, Megatron's hooks send each gradient while others are computed, and they need it as a tensor.
    if not engine.overlap_grad_reduce:
        add_gradients_in_products(chunks)
    return wrapped


def add_gradients_in_products(chunks: Sequence[torch.nn.Module]) -> None:
    """Let the products of weights' gradients add to the float32 buffers where the CPU has a kernel for it.

    Call it after the chunks have their buffers.
    The layers and the head then compute no gradient tensor for these weights (`add_gradient`); gradients that a weight
    gets elsewhere, such as an embedding that is also the head, are added as before.
    """
    for parameter in (parameter for chunk in chunks for parameter in chunk.parameters()):
        sums = getattr(parameter, "main_grad", None)
        fits = sums is not None and sums.dtype == torch.float32 and sums.is_contiguous()
        if fits and amx.AmxKernels.fits(parameter) and amx.load() is not None:
            parameter.add_gradient = amx.add_gradient  # type: ignore[attr-defined]


def build_optimizer(
    chunks: list[DistributedDataParallel],
    config: OptimConfig,
    engine: EngineConfig,
    dtype: torch.dtype,
    where: str = "actor.engine",
) -> ChainedOptimizer:
    """Return AdamW over all parameters of `chunks`: no weight decay on vectors, float32 master weights for bf16."""
    refuse_short_moment(engine, dtype, f"{where}.exp_avg_dtype")
    optimizer = get_megatron_optimizer(
        MegatronOptimizerConfig(
            optimizer="adam",
            lr=config.lr,
            weight_decay=config.weight_decay,
            adam_beta1=config.beta1,
            adam_beta2=config.beta2,
            adam_eps=config.eps,
            clip_grad=config.clip_grad,
            bf16=dtype == torch.bfloat16,
            params_dtype=dtype,
            use_distributed_optimizer=engine.distributed_optimizer,
            use_precision_aware_optimizer=engine.exp_avg_dtype == "bf16",
            # The second moment stays float32: with the default beta2, its relative change per step (1 - beta2, 0.001)
            # is less than bf16 resolves.
            exp_avg_dtype=DTYPES[engine.exp_avg_dtype],
            store_param_remainders=False,  # whole masters, which checkpoints read and write in place
        ),
        chunks,
    )
    for part in parts(optimizer):
        for group in part.param_groups:
            # Megatron's own scheduler, which is not used, would set this.
            group["weight_decay"] = config.weight_decay * group["wd_mult"]
            if isinstance(part.optimizer, torch.optim.AdamW):
                # One pass over the parameters in place of ten; Megatron has no argument for it.
                group["fused"] = True
    return optimizer


def refuse_short_moment(engine: EngineConfig, dtype: torch.dtype, key: str) -> None:
    """Check that AdamW supports Adam's first moment in bf16, if the recipe sets it at `key`."""
    if engine.exp_avg_dtype == "fp32":
        return
    missing = [
        requirement
        for requirement, is_met in (
            ("a model in bf16", dtype == torch.bfloat16),
            ("distributed_optimizer", engine.distributed_optimizer),
            ("Transformer Engine, whose AdamW supports it", te_problem() is None),
        )
        if not is_met
    ]
    if missing:
        raise ConfigError(
            f"a first moment in bf16 needs {' and '.join(missing)}", where=key, found="bf16", fix=f"set {key}=fp32"
        )


def holds_masters(part: MegatronOptimizer) -> bool:
    """Return whether the inner optimizer holds the float32 master weights itself; it then reads gradients from the
    parameters' `decoupled_grad` and not from `grad`.
    """
    return part.config.use_precision_aware_optimizer_no_fp8_or_ds_fp8


def parts(optimizer: MegatronOptimizer) -> list[MegatronOptimizer]:
    """Return the inner optimizers (of dense layers, of experts) that hold parameters on this rank."""
    chain = getattr(optimizer, "chained_optimizers", [optimizer])
    return [part for part in chain if not part.is_stub_optimizer]


def draft_grad_norm(optimizer: MegatronOptimizer) -> float:
    """Return the global norm of the draft head's ready gradients, which Megatron's own norm leaves out. Collective over
    all ranks of the engine.
    """
    total = 0.0
    for part in getattr(optimizer, "chained_optimizers", [optimizer]):
        attribute = "decoupled_grad" if holds_masters(part) else "grad"
        gradients = [
            gradient
            for parameter in part.get_parameters()
            if _is_draft(parameter)
            and param_is_not_tensor_parallel_duplicate(parameter, getattr(part, "tp_group", None))
            and (gradient := getattr(parameter, attribute, None)) is not None
        ]
        group = part.get_grad_stats_parallel_group()
        total += get_grad_norm_fp32(gradients, grad_stats_parallel_group=group) ** 2
    return math.sqrt(total)


def clip(optimizer: MegatronOptimizer, norm: float, limit: float, draft_norm: float | None = None) -> None:
    """Scale the ready gradients so that their global norm, now `norm`, is at most `limit`; 0: no clipping.

    The gradients of a draft head, whose norm is `draft_norm`, are scaled separately to the same limit.
    """
    if limit <= 0:
        return
    for part in parts(optimizer):
        parameters = part.get_parameters()
        if draft_norm is not None:
            draft = [parameter for parameter in parameters if _is_draft(parameter)]
            clip_grad_by_total_norm_fp32(draft, limit, draft_norm, holds_masters(part))
            parameters = [parameter for parameter in parameters if not _is_draft(parameter)]
        clip_grad_by_total_norm_fp32(parameters, limit, norm, holds_masters(part))


def _is_draft(parameter: torch.Tensor) -> bool:
    return getattr(parameter, "shared", False) == DRAFT
