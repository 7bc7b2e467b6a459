"""The two forms of a transformer layer, and one set of names for the weights of both.

`local` is Megatron's layer of plain parts with this package's attention, norm and SwiGLU. `te` is Megatron's layer of
Transformer Engine modules, in which a norm and the projection after it are one module:

    local                          te                                            the weight table says
    input_layernorm.weight         self_attention.linear_qkv.layer_norm_weight   input_layernorm.weight
    pre_mlp_layernorm.weight       mlp.linear_fc1.layer_norm_weight              pre_mlp_layernorm.weight

Everything else has the same name and shape, so one table of weights (megarl/architectures) serves both forms.
Checkpoints of both have Megatron's own keys, which are the same.
"""

from __future__ import annotations

import importlib.metadata
import warnings
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import torch

from megarl.config.model import ParallelConfig
from megarl.config.training import EngineConfig
from megarl.models.hf import head_dim, num_experts
from megarl.system import device
from megarl.system.compat.transformer_engine import BELOW, SINCE, is_tested, other_arguments, too_old
from megarl.system.errors import ConfigError

if TYPE_CHECKING:
    from transformers import PretrainedConfig

Form = Literal["local", "te"]

_TABLE_NAMES = (
    (".self_attention.linear_qkv.layer_norm_", ".input_layernorm."),
    (".mlp.linear_fc1.layer_norm_", ".pre_mlp_layernorm."),
)


def layer_form(
    engine: EngineConfig, dtype: torch.dtype, where: str = "actor.engine", needs_local: str | None = None
) -> Form:
    """Return the form of the layers of an engine: `auto` is `te` where it can compute `dtype`, else `local`.

    Args:
        engine: its settings; `where` is their place in the recipe.
        dtype: dtype of parameters and activations.
        needs_local: what the model is, if it needs the parts of a `local` layer.

    Raises:
        ConfigError: `te` is asked for, and Transformer Engine is missing or does not import, Megatron refuses its
            version, or it has no device to compute on.
    """
    if engine.layers == "local":
        return "local"
    if engine.layers == "auto" and engine.fp8 == "none":
        if needs_local or dtype != torch.bfloat16 or not device.has_cuda() or te_version() is None:
            return "local"
        problem = te_problem()
        if problem is not None:
            warnings.warn(f"{where}.layers: {problem}: layers are local ones", stacklevel=2)
        return "te" if problem is None else "local"
    key, found, other = f"{where}.layers", "te", f"or set {where}.layers=local"
    if engine.fp8 != "none":
        key, found, other = f"{where}.fp8", engine.fp8, f"or set {where}.fp8=none"
    if needs_local:
        raise ConfigError(f"{needs_local} has no layers of Transformer Engine", where=key, found=found, fix=other[3:])
    problem = te_problem()
    if problem is not None:
        raise ConfigError(
            problem,
            where=key,
            found=found,
            allowed=f"transformer-engine from {SINCE} on; below {BELOW} it is what megatron-core names",
            fix=f"pip install --no-build-isolation -c constraints-gpu.txt -e '.[te]' in megarl's source, {other}",
        )
    refuse_device(key, found, dtype)
    return "te"


def te_version() -> str | None:
    """Return the version of Transformer Engine in this interpreter, None without one. Does not import it."""
    try:
        return importlib.metadata.version("transformer_engine")
    except importlib.metadata.PackageNotFoundError:
        return None


def te_problem() -> str | None:
    """Return why Transformer Engine cannot be used in this interpreter; None: it can.

    Warns where it is newer than the tested versions.
    """
    version = te_version()
    if version is None:
        return "Transformer Engine is not installed in this interpreter"
    if too_old(version):
        return f"this version of Transformer Engine is too old for megatron-core: {version}"
    try:
        import_te()
    except (ImportError, OSError) as error:  # built for another torch, or without its libraries
        return f"Transformer Engine {version} does not import: {error}"
    if is_tested(version):
        return None
    if misfits := other_arguments():
        return f"Transformer Engine {version} takes other arguments than megatron-core passes: {'; '.join(misfits)}"
    warnings.warn(
        f"Transformer Engine {version} is newer than what megatron-core names (below {BELOW}), and takes the same "
        "arguments: it is used; actor.engine.layers=local does without",
        stacklevel=2,
    )
    return None


def import_te() -> None:
    """Import the part of Transformer Engine that works on torch tensors."""
    import transformer_engine.pytorch  # noqa: F401 (it may be there, and not work)


def refuse_device(key: str, found: str, dtype: torch.dtype) -> None:
    """Raise a ConfigError at `key` where Transformer Engine has no kernels: without a CUDA device, and in float32 (its
    attention would hold all scores at once)."""
    if dtype != torch.bfloat16:
        raise ConfigError(
            "Transformer Engine's attention has no kernel for float32",
            where=key,
            found=f"{found}, and parameters in {str(dtype).removeprefix('torch.')}",
            allowed="bf16",
            fix=f"set model.dtype=bf16, or take {key} out of the recipe",
        )
    if not device.has_cuda():
        raise ConfigError(
            "Transformer Engine computes on CUDA devices only, and this process has none",
            where=key,
            found=found,
            fix=f"run on a GPU, or take {key} out of the recipe",
        )


def refuse_fp8(hf: PretrainedConfig, parallel: ParallelConfig, engine: EngineConfig, where: str) -> None:
    """Check that a model can compute in the FP8 that its engine asks for, on this device.

    Raises:
        ConfigError: layers of the other form, experts, sizes that FP8 products do not take, or a device without them.
    """
    if engine.fp8 == "none":
        return
    key, off = f"{where}.fp8", f"set {where}.fp8=none"
    if engine.layers == "local":
        raise ConfigError(
            "plain layers have no FP8", where=key, found=engine.fp8, fix=f"set {where}.layers=te, or {off}"
        )
    if num_experts(hf) is not None:
        raise ConfigError("mixtures of experts have no FP8 here", where=key, found=engine.fp8, fix=off)
    rows = head_dim(hf) * hf.num_attention_heads, head_dim(hf) * hf.num_key_value_heads, hf.intermediate_size
    # Under sequence parallelism the hidden states are gathered as whole blocks.
    unit = 128 if engine.fp8 == "blockwise" and parallel.tp > 1 else 16
    odd = [size for size in (*(count // parallel.tp for count in rows),) if size % 16]
    if odd or hf.hidden_size % unit:
        raise ConfigError(
            "FP8 products do not take the sizes of this model under this layout",
            where=key,
            found=f"hidden size {hf.hidden_size}; heads, key/value heads and feed-forward of a rank {odd or 'fit'}",
            allowed=f"a multiple of {unit}; multiples of 16",
            fix=off,
        )
    from transformer_engine.pytorch import is_fp8_available, is_fp8_block_scaling_available

    can, reason = (is_fp8_available if engine.fp8 == "delayed" else is_fp8_block_scaling_available)(return_reason=True)
    if not can:
        raise ConfigError(f"this device has no such FP8: {reason}", where=key, found=engine.fp8, fix=off)


def fp8_unit(engine: EngineConfig) -> int:
    """Return the number of which the tokens of a tensor-parallel rank are a multiple in every stream."""
    return {"none": 1, "delayed": 16, "blockwise": 128}[engine.fp8]


def table_name(parameter: str) -> str:
    """Return the name that the weight table has for a parameter of a chunk, of either form."""
    for fused, plain in _TABLE_NAMES:
        parameter = parameter.replace(fused, plain)
    return parameter


class LayerNorms(NamedTuple):
    """The weights of the norms before a layer's attention and before its MLP."""

    attention: torch.Tensor
    mlp: torch.Tensor


def layer_norms(layer: Any) -> LayerNorms:
    """Return the norms of a Megatron transformer layer of either form."""

    def weight(norm: Any, linear: Any) -> torch.Tensor:
        fused = getattr(linear, "layer_norm_weight", None)
        return norm.weight if fused is None else fused

    return LayerNorms(
        weight(layer.input_layernorm, layer.self_attention.linear_qkv),
        weight(layer.pre_mlp_layernorm, getattr(layer.mlp, "linear_fc1", None)),
    )


def bias_of(linear: Any) -> torch.Tensor | None:
    """Return the bias of a linear layer of either form; Transformer Engine has an empty tensor in place of none."""
    return linear.bias if linear.bias is not None and linear.bias.numel() else None
