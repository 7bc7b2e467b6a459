"""Fill the parameters of this process from a Hugging Face checkpoint, or at random."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from megatron.core import parallel_state as mpu
from torch import Tensor

from megarl.architectures.adapters import MODULE, is_adapter
from megarl.architectures.tensors import is_of_value_head
from megarl.artifacts.checkpoint_files import read_config, refuse_own_embeddings, refuse_unread_draft
from megarl.models.hf import encoder_of, vision_of, wiring_of
from megarl.models.layers.rules import TensorRegion
from megarl.models.policy import PolicyModel
from megarl.models.weight_table import Coordinate, Shard, as_index, region_numel, region_shape
from megarl.models.weights.files import CheckpointReader
from megarl.system.errors import ConfigError
from megarl.system.processes import is_first_process
from megarl.system.tracing import beat

if TYPE_CHECKING:
    from transformers import PretrainedConfig

    from megarl.models.lora import Adapter


def coordinate(chunks: Sequence[PolicyModel]) -> Coordinate:
    """Return this process's coordinate (its rank on each parallel axis) from Megatron's parallel state."""
    return Coordinate(
        tp=mpu.get_tensor_model_parallel_world_size(),
        tp_rank=mpu.get_tensor_model_parallel_rank(),
        pp=mpu.get_pipeline_model_parallel_world_size(),
        pp_rank=mpu.get_pipeline_model_parallel_rank(),
        vpp=len(chunks),
        ep=mpu.get_expert_model_parallel_world_size(),
        ep_rank=mpu.get_expert_model_parallel_rank(),
        etp=mpu.get_expert_tensor_parallel_world_size(),
        etp_rank=mpu.get_expert_tensor_parallel_rank(),
        first=chunks[0].config.first_stage_layers,
        last=chunks[0].config.last_stage_layers,
    )


def local_shards(chunks: Sequence[PolicyModel]) -> list[tuple[Shard, Tensor]]:
    """Return this process's shards without adapters, each with its parameter."""
    params = {
        (i, name): p for i, chunk in enumerate(chunks) for name, p in chunk.weights().items() if not is_adapter(name)
    }
    shards = chunks[0].weight_table.shards(coordinate(chunks))
    planned = {(s.chunk, s.param) for s in shards}
    if planned != params.keys():
        raise ValueError(
            "the weight table of the architecture and Megatron's model have different parameters (chunk, name), which "
            f"is an error in megarl: {sorted(planned ^ params.keys())[:4]}; report it with the model's config.json"
        )
    for shard in shards:
        if shard.shape != tuple(params[shard.chunk, shard.param].shape):
            raise ValueError(
                f"the parameter {shard.param} of the model has shape {tuple(params[shard.chunk, shard.param].shape)}, "
                f"but {shard.shape} in the weight table of the architecture, which is an error in megarl: report it "
                "with the model's config.json"
            )
    return [(shard, params[shard.chunk, shard.param]) for shard in shards]


#: fn(region of a parameter) -> the weight's values in this region
Reader = Callable[[TensorRegion], Tensor]


def weight_readers(chunks: Sequence[PolicyModel]) -> list[tuple[Shard, Reader]]:
    """Return this process's shards, each with a reader of the weight that the model computes with.

    The reader returns a view of the parameter or, if it has an adapter, the merged weight in new memory.
    """
    readers: list[tuple[Shard, Reader]] = []
    for shard, param in local_shards(chunks):
        module = chunks[shard.chunk].get_submodule(shard.param.rpartition(".")[0])
        adapter = getattr(module, MODULE, None) if param is getattr(module, "weight", None) else None
        readers.append((shard, partial(read_region, param.detach(), adapter)))
    return readers


def read_region(weight: Tensor, adapter: Adapter | None, region: TensorRegion) -> Tensor:
    """Return a view of a region of a weight; with an enabled adapter, the merged region in new memory."""
    if adapter is not None and adapter.enabled:
        return adapter.merged(weight, region)
    return weight[as_index(region)]


@torch.no_grad()
def fill(shards: Iterable[tuple[Shard, Tensor]], read: Callable[[str, TensorRegion], Tensor]) -> None:
    """Copy each shard's pieces, from `read(source, region)`, into its parameter; vocabulary padding becomes zero."""
    for shard, param in shards:
        beat()
        covered = sum(region_numel(piece.target_region) for piece in shard.pieces)
        if covered != param.numel():
            param.zero_()
        for piece in shard.pieces:
            param[as_index(piece.target_region)].copy_(read(piece.source, piece.source_region))


def load_weights(chunks: Sequence[PolicyModel], source_dir: str | Path) -> None:
    """Read this process's slices of a Hugging Face checkpoint into the parameters of `chunks`.

    `load_hf_config` has already compared a stored head with tied embeddings. A critic built on a policy's checkpoint,
    which has no `score.weight`, starts with a value head of zeros. Global rank 0 prints which files are read.
    """
    hf = chunks[0].hf_config
    reader = CheckpointReader(source_dir, vision=encoder_of(hf) is not None)
    if is_first_process():
        print(f"weights: {reader.describe()}", flush=True)
    wanted = chunks[0].weight_table.shapes()
    if chunks[0].has_value_head and "score.bias" in reader and "score.bias" not in wanted:
        raise ValueError(f"{reader.folder} has score.bias, but the critic was built without one")
    if chunks[0].weight_table.has_draft and not reader.draft:
        raise ConfigError(
            "the model's files have no draft head",
            where="actor.mtp",
            found=reader.describe(),
            allowed="files with the tensors of multi-token prediction",
            fix="use files with them, or remove actor.mtp",
        )
    if chunks[0].weight_table.has_draft:
        refuse_own_embeddings(read_config(reader.folder), str(reader.folder / "config.json"))
        refuse_unread_draft(reader.draft, wanted, str(reader.folder))
    reader.check(wanted, vision_of(hf))

    def read(name: str, region: TensorRegion) -> Tensor:
        if is_of_value_head(name) and name not in reader:
            return torch.zeros(region_shape(region))
        return reader.read(name, region)

    fill(local_shards(chunks), read)


def init_random(chunks: Sequence[PolicyModel], hf_config: PretrainedConfig, seed: int) -> None:
    """Initialise the parameters at random; a tensor depends only on `seed` and its Hugging Face name, not on the
    layout.

    Norms and branch scales are 1 (stored as 0 where 1 is added), biases and value heads 0, decays as in transformers,
    the rest normal with `initializer_range`; projections that write to the residual stream are divided by
    sqrt(2 * layers), as in GPT-2 (Radford et al. 2019).
    """
    shapes = chunks[0].weight_table.shapes()
    tensors: dict[str, Tensor] = {}

    def read(name: str, region: TensorRegion) -> Tensor:
        if name not in tensors:
            if len(tensors) > 2:  # three tensors are kept, because q, k and v are read alternately for each head group
                tensors.clear()
            tensors[name] = draw_tensor(hf_config, name, shapes[name], seed)
        return tensors[name][as_index(region)]

    fill(local_shards(chunks), read)


def draw_tensor(hf: PretrainedConfig, name: str, shape: tuple[int, ...], seed: int) -> Tensor:
    """Return tensor `name` of the random model with this `seed`, in fp32."""
    if name.endswith(("bias", "score.weight")):
        return torch.zeros(shape)
    if name.endswith(".A_log"):
        return torch.empty(shape).uniform_(0.01, 16, generator=generator_of(name, seed)).log_()
    if name.endswith(".dt_bias"):
        return torch.ones(shape)
    if "norm" in name:
        centered = not any(part in name for part in ("linear_attn.", "visual.")) and wiring_of(hf).zero_centered
        # an action expert (dit) has Gemma's norms, which multiply by 1 + weight
        return torch.zeros(shape) if centered or name.startswith("model.dit.") else torch.ones(shape)
    if ".ln_q." in name or name.endswith(".scale_factor"):
        return torch.ones(shape)
    std = getattr(hf, "initializer_range", 0.02)
    if name.endswith(("o_proj.weight", "out_proj.weight", "down_proj.weight", "down_proj", "w2.weight")):
        std /= math.sqrt(2 * hf.num_hidden_layers)
    return torch.empty(shape).normal_(0.0, std, generator=generator_of(name, seed))


def generator_of(name: str, seed: int) -> torch.Generator:
    """Return the random generator of tensor `name`, which depends only on this name and `seed`."""
    digest = hashlib.sha256(f"{seed}:{name}".encode()).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest[:8], "little") >> 1)
