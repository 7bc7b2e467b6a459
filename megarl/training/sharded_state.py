"""An engine's parameters and optimizer state as slices of named whole tensors, for checkpoints.

A checkpoint stores every tensor under the name of its parameter with its place in the whole model, so a run can
continue under another layout. This includes optimizer state, because only its tensors are stored, one set per
parameter, and not how a rank's optimizers are composed (Megatron's own form differs between one and a chain of two).

No tensor is gathered: with Megatron's distributed optimizer, a data-parallel rank writes the elements of parameters and
state that it owns, and reads the state that it owns and the parameters that it needs directly into their tensors.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import torch
from torch import Tensor

from megarl.architectures.adapters import is_adapter
from megarl.config.model import LoraConfig
from megarl.models.lora import local_adapters
from megarl.models.weights.adapters import adapter_tensors
from megarl.system.comm import WorkerGroup
from megarl.system.offload_schedule import OPTIMIZER, PARAMETERS
from megarl.training.checksums import few
from megarl.training.host_memory import HostArena
from megarl.training.optimizer import holds_masters, parts
from megarl.training.shards import CheckpointError, Index, Snapshot, fill, foreign
from megarl.training.tensor_slices import SlicePlace, TensorSlice, places_of, slices_of

from megatron.core import parallel_state as mpu  # isort: skip
from megatron.core.dist_checkpointing.mapping import ShardedObject, ShardedTensor, ShardedTensorFactory  # isort: skip
from megatron.core.dist_checkpointing.utils import add_prefix_for_sharding  # isort: skip
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer  # isort: skip

if TYPE_CHECKING:
    from megarl.training.engine import MegatronEngine

MOMENTS = ("exp_avg", "exp_avg_sq")
_MASTER = "param"
Sharded: TypeAlias = ShardedTensor | ShardedTensorFactory


def snapshot(engines: Mapping[str, MegatronEngine], label: dict[str, Any]) -> Snapshot:
    """Copy this rank's slices of all engines to host memory, which the first engine keeps for the next snapshot.
    `engines` may be empty.
    """
    first = next(iter(engines.values()), None)
    memory = HostArena() if first is None else first.snapshots
    return Snapshot(_all_slices(engines, writing=True), label, memory)


def load_engines(engines: Mapping[str, MegatronEngine], folder: Path, index: Index, steps: Mapping[str, int]) -> None:
    """Read all engines from the files of `index`, of any layout, and set their optimizer steps. Collective.

    Raises:
        CheckpointError: the files hold another model; nothing has been loaded.
    """
    slices = _all_slices(engines, writing=False)
    refuse_foreign(slices, index, folder, world_of(engines))
    with torch.no_grad():
        fill(slices, index, folder)
    for name, engine in engines.items():
        engine.step = steps[name]
        for part in _optimizers(engine):
            _set_step(part, engine.step)


def _all_slices(engines: Mapping[str, MegatronEngine], *, writing: bool) -> list[TensorSlice]:
    for engine in engines.values():
        engine.require(PARAMETERS, OPTIMIZER)
    return [part for name, engine in engines.items() for part in engine_slices(name, engine, writing=writing)]


def world_of(engines: Mapping[str, MegatronEngine]) -> WorkerGroup:
    """Return the group of all ranks that hold these engines; `engines` must not be empty."""
    return next(iter(engines.values())).layout.world


def refuse_foreign(
    slices: Iterable[TensorSlice], index: Index, folder: Path, world: WorkerGroup, more: Sequence[str] = ()
) -> None:
    """Check that an index has the slices of all ranks with the same shapes; `more`: further differences. Collective.

    Raises:
        CheckpointError: on every rank; the message lists the differences.
    """
    everyone = world.all_gather_json([*foreign(slices, index), *more])
    lines = list(dict.fromkeys(line for part in everyone for line in part))
    if lines:
        raise CheckpointError(
            "this checkpoint belongs to a different model",
            where=str(folder),
            found=few(lines),
            allowed="a checkpoint of the architecture, sizes and dtype that the recipe's `model` section gives",
            fix="use the model that was trained (see config.yaml of that run), or train this one in a new run folder; "
            "trainer.resume=never in this folder moves its checkpoints to checkpoints.old-K",
        )


# -- engine to slices --------------------------------------------------------------------------------------------------


def weight_slices(name: str, engine: MegatronEngine) -> Iterator[TensorSlice]:
    """Yield slices of this rank's whole parameters and buffers."""
    for copy, tensor in _copies(name, engine):
        yield from slices_of(copy.places, tensor)


class _Copy(NamedTuple):
    """This rank's copy of a tensor: its places in the whole tensor, and whether it is the first of several copies."""

    places: list[SlicePlace]
    first_in_model: bool
    first_in_data: bool


def engine_slices(name: str, engine: MegatronEngine, *, writing: bool) -> Iterator[TensorSlice]:
    """Yield this rank's slices of an engine; their keys begin with the engine's name.

    With `writing`, each element is yielded by only one rank: its owner if the distributed optimizer divides the
    parameter among data-parallel ranks, otherwise the first rank that holds it.
    """
    optimizers = _optimizers(engine)
    for part in optimizers:
        _create_state(part)
    distributed = [part for part in optimizers if isinstance(part, DistributedOptimizer)]
    divided = {id(p) for part in distributed for buffer in part.buffers for p in buffer.params}
    owned = {id(p): piece for part in distributed for p, piece, _ in _owned_pieces(part)}
    copies: dict[int, _Copy] = {}
    for copy, tensor in _copies(name, engine):
        copies[id(tensor)] = copy
        piece = owned.get(id(tensor))
        if not writing or (copy.first_in_model and copy.first_in_data and id(tensor) not in divided):
            yield from slices_of(copy.places, tensor)
        elif copy.first_in_model and piece is not None:
            yield from slices_of(copy.places, tensor.detach().view(-1)[piece], piece.start)
    for part in optimizers:
        pieces = _owned_pieces(part) if isinstance(part, DistributedOptimizer) else _whole_tensors(part)
        for parameter, elements, tensors in pieces:
            copy = copies[id(parameter)]
            if not writing or (copy.first_in_model and (copy.first_in_data or id(parameter) in owned)):
                # A float32 model's master weights are its parameters.
                for key in MOMENTS if engine.dtype == torch.float32 else (*MOMENTS, _MASTER):
                    yield from slices_of(copy.places, tensors[key], elements.start, f"optimizer.{key}.")


def _copies(name: str, engine: MegatronEngine) -> Iterator[tuple[_Copy, Tensor]]:
    """Yield all parameters and buffers of this rank's model chunks; with adapters only the trained ones."""
    if engine.lora is not None:
        yield from _adapters(name, engine, engine.lora)
    for chunk in engine.chunks:
        # One key per layer, not one tensor over all layers: layers may differ (dense and expert ones).
        sharded = _tensors_only(chunk.sharded_state_dict(metadata={"non_homogeneous_layers": True}))
        add_prefix_for_sharding(sharded, f"{name}.")
        for key, value in chunk.state_dict(keep_vars=True).items():
            if key.endswith("_extra_state") or not isinstance(value, Tensor):
                # Transformer Engine's extra state is a pickle, so it is not saved. It is empty except with
                # `fp8: delayed`, whose scales begin at 1 again when a run resumes (megarl/checks/fp8.py warns).
                continue
            if engine.lora is None or (value.requires_grad and not is_adapter(key)):
                replica = sharded[key].replica_id
                *in_model, in_data = replica if isinstance(replica, tuple) else (replica,)
                yield _Copy(places_of(sharded[key]), not any(in_model), in_data == 0), value


def _adapters(name: str, engine: MegatronEngine, lora: LoraConfig) -> Iterator[tuple[_Copy, Tensor]]:
    """Yield the parameters of this rank's adapters under PEFT's names."""
    wholes = adapter_tensors(engine.hf_config, lora)
    layout = engine.layout
    first_in_data = layout.dp_rank == 0 and layout.cp_rank == 0
    first_of_experts = mpu.get_expert_data_parallel_rank() == 0
    for shard, parameter in local_adapters(engine.chunks, lora):
        places = []
        for piece in shard.pieces:
            (top, bottom), (left, right) = piece.source_region
            start = piece.target_region[0][0] * shard.shape[1]
            key, shape = f"{name}.{piece.source}", (bottom - top, right - left)
            places.append(SlicePlace(key, wholes[piece.source], (top, left), shape, start, False))
        split = getattr(parameter, "tensor_model_parallel", False)
        first = first_of_experts if ".experts." in shard.param else first_in_data
        yield _Copy(places, split or layout.tp_rank == 0, first), parameter


def _tensors_only(state: dict[str, Any]) -> dict[str, Sharded]:
    """Drop Megatron's extra-state objects, which would need pickle; see `_copies`."""
    tensors = {key: value for key, value in state.items() if not isinstance(value, ShardedObject)}
    for key, value in tensors.items():
        if key.endswith(("word_embeddings.weight", "output_layer.weight")) and isinstance(value, ShardedTensor):
            # The vocabulary is padded to a multiple of tp, so its global size depends on the layout.
            value.allow_shape_mismatch = True
    return tensors


def _optimizers(engine: MegatronEngine) -> list[Any]:
    return parts(engine.optimizer) if engine.optimizer is not None else []


def _whole_tensors(part: Any) -> Iterable[tuple[Tensor, slice, dict[str, Tensor]]]:
    """Yield each parameter of an optimizer that is not distributed, the slice of all its elements, and its state."""
    if hasattr(part, "float16_groups"):
        pairs = [
            pair
            for models, mains in zip(part.float16_groups, part.fp32_from_float16_groups, strict=True)
            for pair in zip(models, mains, strict=True)
        ]
        pairs += [(parameter, parameter) for group in part.fp32_from_fp32_groups for parameter in group]
    else:
        pairs = [(parameter, parameter) for group in part.param_groups for parameter in group["params"]]
    for parameter, main in pairs:
        yield parameter, slice(0, parameter.numel()), {_MASTER: main.data, **_moments(part, main)}


def _owned_pieces(part: DistributedOptimizer) -> Iterable[tuple[Tensor, slice, dict[str, Tensor]]]:
    """Yield (parameter, elements, state) of each parameter piece that this data-parallel rank owns."""
    for parameter, (group, place) in part.model_param_group_index_map.items():
        shard = part.optimizer.param_groups[group]["params"][place]
        main = part.optimizer.state[shard]["master_param"] if holds_masters(part) else shard.data
        piece = part._get_model_param_range_map(parameter)["param"]
        yield parameter, slice(piece.start, piece.end), {_MASTER: main, **_moments(part, shard)}


def _moments(part: Any, main: Tensor) -> dict[str, Tensor]:
    return {moment: part.optimizer.state[main][moment] for moment in MOMENTS}


def _create_state(part: Any) -> None:
    """Create the state that the first optimizer step would create, so that it can be saved or loaded."""
    if not isinstance(part.optimizer, torch.optim.AdamW) and not holds_masters(part):
        part.init_state_fn(part.optimizer, part.config)
        return
    for group in part.param_groups:
        for parameter in group["params"]:
            if part.optimizer.state[parameter]:
                continue
            # `init_state_fn` would call `initialize_state` without `store_param_remainders`.
            if holds_masters(part):
                part.optimizer.initialize_state(parameter, store_param_remainders=False)
            else:
                part.optimizer.state[parameter].update(
                    step=torch.zeros((), dtype=torch.float32, device=parameter.device),
                    **{moment: torch.zeros_like(parameter.data) for moment in MOMENTS},
                )


def _set_step(part: Any, step: int) -> None:
    for group in part.param_groups:
        if not isinstance(part.optimizer, torch.optim.AdamW):
            group["step"] = step  # fused Adam of Apex and Transformer Engine counts steps per group
            continue
        for parameter in group["params"]:
            part.optimizer.state[parameter]["step"].fill_(step)
