"""The two forms of a transformer layer, and one set of names for the weights of both.

`local` is Megatron's layer of plain parts with this package's attention, norm and SwiGLU. `te` is Megatron's layer of
Transformer Engine modules, in which a norm and the projection after it are one module:

    local                          te                                            name in the weight table
    input_layernorm.weight         self_attention.linear_qkv.layer_norm_weight   input_layernorm.weight
    pre_mlp_layernorm.weight       mlp.linear_fc1.layer_norm_weight              pre_mlp_layernorm.weight

All other weights have the same names and shapes, so one table of weights (megarl/architectures) serves both forms.
Checkpoints of both forms use the same keys, those of Megatron.
"""

from __future__ import annotations

import importlib.metadata
import warnings
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import torch

from megarl.config.model import ParallelConfig
from megarl.config.training import EngineConfig
from megarl.models.hf import head_dim, mixture_of, moe_layers
from megarl.system import device
from megarl.system.compat.transformer_engine import other_arguments
from megarl.system.errors import ConfigError

if TYPE_CHECKING:
    from megatron.core.transformer import TransformerConfig
    from transformers import PretrainedConfig

Form = Literal["local", "te"]

_TABLE_NAMES = (
    (".self_attention.linear_qkv.layer_norm_", ".input_layernorm."),
    (".mlp.linear_fc1.layer_norm_", ".pre_mlp_layernorm."),
)


def layer_form(
    engine: EngineConfig, dtype: torch.dtype, where: str = "actor.engine", needs_local: str | None = None
) -> Form:
    """Return the layer form of an engine: `auto` is `te` if Transformer Engine can compute `dtype` here, else `local`.

    Args:
        engine: the engine's settings; `where` is their key in the recipe.
        dtype: dtype of parameters and activations.
        needs_local: a description of the model if it only works with `local` layers, for the error.
    """
    if engine.layers == "local":
        return "local"
    if engine.layers == "auto" and engine.fp8 == "none":
        if needs_local or dtype != torch.bfloat16 or not device.has_cuda() or te_version() is None:
            return "local"
        problem = te_problem()
        if problem is not None:
            warnings.warn(f"{where}.layers: {problem}: using local layers", stacklevel=2)
        return "te" if problem is None else "local"
    key, value, other = f"{where}.layers", "te", f"or set {where}.layers=local"
    if engine.fp8 != "none":
        key, value, other = f"{where}.fp8", engine.fp8, f"or set {where}.fp8=none"
    if needs_local:
        raise ConfigError(f"{needs_local} cannot use Transformer Engine layers", where=key, found=value, fix=other[3:])
    problem = te_problem()
    if problem is not None:
        raise ConfigError(
            problem,
            where=key,
            found=value,
            fix=f"pip install --no-build-isolation -c constraints-gpu.txt -e '.[te]' in megarl's source, {other}",
        )
    refuse_device(key, value, dtype)
    return "te"


def te_version() -> str | None:
    """Return the version of the installed Transformer Engine without importing it; None if it is not installed."""
    try:
        return importlib.metadata.version("transformer_engine")
    except importlib.metadata.PackageNotFoundError:
        return None


def te_problem() -> str | None:
    """Return why Transformer Engine cannot be used in this interpreter, or None if it can."""
    version = te_version()
    if version is None:
        return "Transformer Engine is not installed in this interpreter"
    try:
        import_te()
    except (ImportError, OSError) as error:  # the package was built for another torch, or its libraries are missing
        return f"Transformer Engine {version} does not import: {error}"
    if misfits := other_arguments():
        return f"Transformer Engine {version} rejects arguments that megatron-core passes: {'; '.join(misfits)}"
    return None


def import_te() -> None:
    """Import the part of Transformer Engine that works on torch tensors."""
    import transformer_engine.pytorch  # noqa: F401 (it may be installed but broken)


def refuse_device(key: str, found: str, dtype: torch.dtype) -> None:
    """Raise a ConfigError at `key` if Transformer Engine has no kernels: without CUDA, or for float32, where its
    attention would store all scores."""
    if dtype != torch.bfloat16:
        raise ConfigError(
            "Transformer Engine's attention has no kernel for float32",
            where=key,
            found=f"{found} with parameters in {str(dtype).removeprefix('torch.')}",
            allowed="bf16",
            fix=f"set model.dtype=bf16, or remove {key} from the recipe",
        )
    if not device.has_cuda():
        raise ConfigError(
            "Transformer Engine needs a CUDA device, and this process has none",
            where=key,
            found=found,
            fix=f"run on a GPU, or remove {key} from the recipe",
        )


def refuse_fp8(hf: PretrainedConfig, parallel: ParallelConfig, engine: EngineConfig, where: str) -> None:
    """Raise an error unless a model can compute in its engine's FP8 format on this device."""
    if engine.fp8 == "none":
        return
    key, off = f"{where}.fp8", f"set {where}.fp8=none"
    if engine.layers == "local":
        raise ConfigError(
            "local layers do not support FP8", where=key, found=engine.fp8, fix=f"set {where}.layers=te, or {off}"
        )
    rows = [head_dim(hf) * heads // parallel.tp for heads in (hf.num_attention_heads, hf.num_key_value_heads)]
    mixture = mixture_of(hf)
    if not all(moe_layers(hf)):
        rows.append(hf.intermediate_size // parallel.tp)
    if mixture is not None:
        rows.append(mixture.width // parallel.expert_tp)
    each = 32 if engine.fp8 == "mxfp8" else 16
    # With `blockwise`, sequence parallelism gathers hidden states in whole FP8 blocks of 128 numbers. Without whole
    # blocks Transformer Engine would gather them in bf16, with a warning for each layer.
    gathers = parallel.splits_tokens(experts=mixture is not None)
    unit = 128 if engine.fp8 == "blockwise" and gathers else each
    odd = [size for size in rows if size % each]
    if odd or hf.hidden_size % unit:
        raise ConfigError(
            "the sizes of this model with this layout do not fit FP8 matrix products",
            where=key,
            found=f"hidden size {hf.hidden_size}; heads, key/value heads and feed-forward of a rank {odd or 'fit'}",
            allowed=f"for the hidden size a multiple of {unit}, for the others multiples of {each}",
            fix=off,
        )
    from transformer_engine import pytorch

    checks = {
        "delayed": "is_fp8_available",
        "blockwise": "is_fp8_block_scaling_available",
        "mxfp8": "is_mxfp8_available",
    }
    can, reason = getattr(pytorch, checks[engine.fp8])(return_reason=True)
    if not can:
        raise ConfigError(f"this device lacks this FP8 format: {reason}", where=key, found=engine.fp8, fix=off)


def fp8_unit(engine: EngineConfig) -> int:
    """Return the unit for FP8: a stream's tokens per tensor-parallel rank must be a multiple of it."""
    return {"none": 1, "delayed": 16, "mxfp8": 32, "blockwise": 128}[engine.fp8]


def expert_unit(config: TransformerConfig) -> int:
    """Return the unit for FP8 products of experts: the rows of each expert must be a multiple of it."""
    return {None: 1, "mxfp8": 32}.get(config.fp8 and config.fp8_recipe, 16)


def table_name(parameter: str) -> str:
    """Return the weight table's name for a chunk's parameter, whatever the layer form."""
    for fused, plain in _TABLE_NAMES:
        parameter = parameter.replace(fused, plain)
    return parameter


def parts_of(spec: Any) -> Any:
    """Return the parts of a module's spec; megatron-core keeps them in a `functools.partial` from 0.19 on."""
    return spec.keywords["submodules"] if isinstance(spec, partial) else spec.submodules


class LayerNorms(NamedTuple):
    """The weights of the norms before a layer's attention and before its MLP; None: the layer has none there."""

    attention: torch.Tensor | None
    mlp: torch.Tensor | None


def layer_norms(layer: Any) -> LayerNorms:
    """Return the weights of the two norms of a Megatron transformer layer, whatever its form."""

    def weight(norm: Any, linear: Any) -> torch.Tensor | None:
        fused = getattr(linear, "layer_norm_weight", None)
        return getattr(norm, "weight", None) if fused is None else fused

    return LayerNorms(
        weight(layer.input_layernorm, getattr(layer.self_attention, "linear_qkv", None)),
        weight(layer.pre_mlp_layernorm, getattr(layer.mlp, "linear_fc1", None)),
    )


def bias_of(linear: Any) -> torch.Tensor | None:
    """Return a linear layer's bias or None; Transformer Engine has an empty tensor for no bias."""
    return linear.bias if linear.bias is not None and linear.bias.numel() else None
